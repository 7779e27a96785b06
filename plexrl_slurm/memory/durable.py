"""The durable tier in its simplest form: a folder of slab files for each image on a shared disk.

A folder is complete or it does not exist: it is written under another name, synced, and renamed;
its manifest has a checksum of every file, checked when the image comes back. What is there is
never changed, so an agent that was declared lost can at worst leave a folder that nobody asks for.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import disk
from plexrl_slurm.memory.files import (
    publish_folder,
    storage_errors,
    sync_folder,
    write_all,
    write_bytes,
)
from plexrl_slurm.memory.slab import PRELUDE_BYTES, put_prelude, read_header, unmarked, used_bytes

_CHUNK: Final = 8 << 20
MANIFEST: Final = "manifest.json"


class RankFile(msgspec.Struct, frozen=True):
    """One rank's slab."""

    name: str
    bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """What a folder contains."""

    deployment: str
    progress: tuple[int, int]
    files: tuple[RankFile, ...]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)


def folder_of(durable: Path, deployment: str, progress: tuple[int, int]) -> Path:
    """Where an image with this progress lies, or would lie."""
    seq, part = progress
    return home_of(durable, deployment) / f"{seq:09d}.{part:04d}"


def home_of(durable: Path, deployment: str) -> Path:
    """All images of a deployment."""
    return durable / deployment.replace(":", ".").replace("/", "_")


def write_image(folder: Path, slabs: Sequence[Path], *, writer: str) -> Manifest:
    """Copy complete slabs, one for each rank, into the new ``folder``.

    ``writer`` keeps apart what two agents write at once. If the folder is there already, it has
    the same image. Raises ``BadImage`` for a slab that is not complete, and ``StorageFull``.
    """
    header = read_header(slabs[0])
    part = folder.with_name(f".{folder.name}.{writer}.part")
    disk.disk.remove_tree(part)
    disk.disk.make_folder(part)
    try:
        files = [write_rank(part, slab, rank) for rank, slab in enumerate(slabs)]
        manifest = Manifest(
            deployment=header.deployment, progress=header.progress, files=tuple(files)
        )
        write_bytes(part / MANIFEST, msgspec.json.encode(manifest))
        if (folder / MANIFEST).exists():
            sync_folder(folder.parent)  # whoever gave it its name may have died before that
        else:
            publish_folder(part, folder)
        sync_folder(folder.parent.parent)
        return manifest
    finally:
        disk.disk.remove_tree(part)


def _write_file(path: Path, chunks: Iterator[bytes]) -> int:
    """Returns the checksum."""
    target = disk.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        crc = at = 0
        for chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            write_all(target, chunk, at)
            at += len(chunk)
        disk.disk.sync(target)
    finally:
        disk.disk.close(target)
    return crc


def write_rank(part: Path, slab: Path, rank: int) -> RankFile:
    """Copy one rank's complete slab into an image that is not finished."""
    name, size = f"rank-{rank}.slab", used_bytes(slab)
    with storage_errors(part, size):
        crc = _write_file(part / name, _chunks(slab, size))
    return RankFile(name=name, bytes=size, crc32=crc)


def read_manifest(folder: Path) -> Manifest:
    """Raises ``BadImage`` if there is no complete image."""
    try:
        return msgspec.json.decode(disk.disk.read_file(folder / MANIFEST), type=Manifest)
    except OSError as error:
        raise BadImage(str(folder), f"cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise BadImage(str(folder), f"has an unreadable manifest ({error})") from error


def read_image(
    folder: Path, slabs: Sequence[Path], *, first: int = 0, world: int | None = None
) -> Manifest:
    """Copy the image in ``folder`` into slabs, which are valid only once all is there and checked.

    A slab that exists is overwritten in place: ranks keep their mapping of it. ``first``: the rank
    of the first slab, if another node has ranks, too; ``world``: of all.
    """
    manifest, ranks = read_manifest(folder), world or len(slabs)
    if len(manifest.files) != ranks:
        raise BadImage(
            str(folder),
            f"is of {len(manifest.files)} ranks, and {ranks} are to load it",
        )
    preludes = []
    mine = manifest.files[first : first + len(slabs)]
    for file, slab in zip(mine, slabs, strict=True):
        preludes.append(_read_slab(folder / file.name, file, slab))
    for prelude, slab in zip(preludes, slabs, strict=True):
        put_prelude(slab, prelude)
    return manifest


def _read_slab(source_path: Path, file: RankFile, slab: Path) -> bytes:
    """Everything but the commit mark; returns the prelude, which has it."""
    target = disk.disk.open(slab, os.O_RDWR | os.O_CREAT)
    try:
        with storage_errors(slab.parent, file.bytes):
            disk.disk.allocate(target, max(file.bytes, os.fstat(target).st_size))
        crc, at, prelude = 0, 0, b""
        for chunk in _chunks(source_path, file.bytes):
            crc = zlib.crc32(chunk, crc)
            if not prelude:
                prelude = chunk[:PRELUDE_BYTES]
                chunk = unmarked(prelude) + chunk[PRELUDE_BYTES:]
            write_all(target, chunk, at)
            at += len(chunk)
    finally:
        disk.disk.close(target)
    if crc != file.crc32:
        raise BadImage(str(source_path), "is damaged: its checksum is not that of its manifest")
    return prelude


def keep_newest(durable: Path, deployment: str, progress: tuple[int, int]) -> None:
    """Delete images that are older than the one with ``progress``, which is complete."""
    kept = folder_of(durable, deployment, progress)
    for folder in sorted(home_of(durable, deployment).glob("[0-9]*")):
        if folder.name < kept.name:
            _delete(folder)


def folders_of(home: Path) -> list[Path]:
    """Images of a deployment, the newest first; ``home``: see :func:`home_of`."""
    return sorted(home.glob("[0-9]*"), reverse=True)


def progress_of(folder: Path) -> tuple[int, int]:
    """The progress of the image in a folder, which its name says."""
    seq, _, part = folder.name.partition(".")
    return int(seq), int(part)


def set_aside(folder: Path) -> None:
    """A damaged image gets a name under which nobody looks for one; it goes with its deployment."""
    aside = folder.with_name(f"damaged-{folder.name}")
    disk.disk.remove_tree(aside)
    if folder.exists():
        disk.disk.rename(folder, aside)
        sync_folder(folder.parent)


def drop_images(durable: Path, deployment: str) -> None:
    """Delete all images of a deployment."""
    home = home_of(durable, deployment)
    for folder in home.glob("[0-9]*"):
        _delete(folder)
    disk.disk.remove_tree(home)


def _delete(folder: Path) -> None:
    """The manifest first, so that half an image is none."""
    with suppress(OSError):
        disk.disk.remove(folder / MANIFEST)
    disk.disk.remove_tree(folder)


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    """Exactly ``size`` bytes. Raises ``BadImage``."""
    try:
        source = disk.disk.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror})") from error
    try:
        at = 0
        while at < size:
            chunk = bytearray(min(_CHUNK, size - at))
            try:
                read = disk.disk.read(source, [memoryview(chunk)], at)
            except OSError as error:
                raise BadImage(str(path), f"cannot be read ({error.strerror})") from error
            if not read:
                raise BadImage(str(path), f"is cut off: {size - at} bytes are missing")
            at += read
            yield bytes(memoryview(chunk)[:read])
    finally:
        disk.disk.close(source)
