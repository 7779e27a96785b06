"""The durable tier in its simplest form: a folder of slab files for each image on a shared disk.

A folder is complete or it does not exist: it is written under another name, synced, and renamed;
its manifest has a checksum of every file, checked when the image comes back. What is there is
never changed, so an agent that was declared lost can at worst leave a folder that nobody asks for.
"""

import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import disk, manifests, sums, swap_manifest
from plexrl_slurm.memory.fence import NONE, Token, moving, passing
from plexrl_slurm.memory.files import (
    chunks,
    publish_folder,
    storage_errors,
    sync_folder,
    write_all,
    write_bytes,
)
from plexrl_slurm.memory.nvme import Gate
from plexrl_slurm.memory.slab import (
    PRELUDE_BYTES,
    SlabHeader,
    parse_header,
    put_prelude,
    read_header,
    unmarked,
    used_bytes,
)
from plexrl_slurm.memory.swap import VERSION, version_folder

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_DAMAGED: Final = "is damaged: its checksum is not that of its manifest"


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
    #: What the ranks' swap folders held, by ``rank-0.swap/NAME``.
    swapped: tuple[RankFile, ...] = ()
    #: Of the order that it was written by.
    order: Token = NONE
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in (*self.files, *self.swapped))


def folder_of(durable: Path, deployment: str, progress: tuple[int, int]) -> Path:
    """Where an image with this progress lies, or would lie."""
    seq, part = progress
    return home_of(durable, deployment) / f"{seq:09d}.{part:04d}"


def home_of(durable: Path, deployment: str) -> Path:
    """All images of a deployment."""
    return durable / deployment.replace(":", ".").replace("/", "_")


def write_image(
    folder: Path,
    slabs: Sequence[Path],
    *,
    writer: str,
    swap: Path | None = None,
    order: Token = NONE,
) -> Manifest:
    """Copy complete slabs, one for each rank, into the new ``folder``; and what of the state is in
    the deployment's swap folder, ``swap``.

    ``writer`` keeps apart what two agents write at once. If the folder is there already, and not
    of an earlier home, it has the same image. Raises ``BadImage`` for a slab that is not complete,
    ``StorageFull``, and ``Denied`` if ``order`` is not the newest one.
    """
    header = read_header(slabs[0])
    part = folder.with_name(f".{folder.name}.{writer}.part")
    disk.disk.remove_tree(part)
    disk.disk.make_folder(part)
    try:
        with passing(folder.parent, order):
            pass  # before anything is copied
        files, swapped = [], []
        for rank, slab in enumerate(slabs):
            files.append(write_rank(part, slab, rank))
            version = _version(slab, rank, len(slabs), swap)
            if version is None:
                continue
            disk.disk.make_folder(part / f"rank-{rank}.swap")
            for path in _listed(version):
                name = f"rank-{rank}.swap/{path.name}"
                swapped.append(_copy_in(part, name, path, path.stat().st_size))
            # Of the copy, which the page cache has: nothing bad gets a good checksum.
            copied = part / f"rank-{rank}.swap"
            swap_manifest.check(copied, swap_manifest.read(copied))
            sync_folder(part / f"rank-{rank}.swap")
        manifest = Manifest(
            deployment=header.deployment,
            progress=header.progress,
            files=tuple(files),
            swapped=tuple(swapped),
            order=order,
        )
        write_bytes(part / MANIFEST, manifests.encoded(manifest))
        publish(part, folder, order)
        return manifest
    finally:
        disk.disk.remove_tree(part)


def publish(part: Path, folder: Path, order: Token) -> None:
    """Give the finished folder ``part`` its name. Raises ``Denied``; see :func:`write_image`."""
    with passing(folder.parent, order) as moved:
        if _order_of(folder) >= moved and (folder / MANIFEST).exists():
            sync_folder(folder.parent)  # whoever gave it its name may have died before that
        else:
            publish_folder(part, folder)
        sync_folder(folder.parent.parent)


def _order_of(folder: Path) -> Token:
    try:
        return read_manifest(folder).order
    except BadImage:
        return NONE


def take_over(durable: Path, deployment: str, order: Token, known: tuple[int, int] | None) -> None:
    """The deployment has another home, which goes on from the image with progress ``known``: no
    order before ``order`` adds an image any more, and newer ones that such orders have added go."""
    home = home_of(durable, deployment)
    with moving(home, order):
        for folder in folders_of(home):
            newer = known is None or progress_of(folder) > known
            if newer and _order_of(folder) < order:
                _delete(folder)


def _write_file(path: Path, parts: Iterable[memoryview]) -> int:
    """Returns the checksum."""
    target = disk.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        crc = at = 0
        for chunk in parts:
            crc = zlib.crc32(chunk, crc)
            write_all(target, chunk, at)
            at += len(chunk)
        disk.disk.sync(target)
    finally:
        disk.disk.close(target)
    return crc


def write_rank(part: Path, slab: Path, rank: int) -> RankFile:
    """Copy one rank's complete slab into an image that is not finished."""
    return _copy_in(part, f"rank-{rank}.slab", slab, used_bytes(slab), known=sums.read(slab))


def _copy_in(
    part: Path, name: str, path: Path, size: int, *, known: sums.Sums | None = None
) -> RankFile:
    """``known``: checksums that what is copied must match."""
    with storage_errors(part, size):
        crc = _write_file(part / name, sums.compared(path, known, chunks(path, size)))
    return RankFile(name=name, bytes=size, crc32=crc)


def _version(slab: Path, rank: int, world: int, swap: Path | None) -> Path | None:
    """The part of a slab's state that is on the disk, if one is."""
    state = read_header(slab).state
    if VERSION not in state:
        return None
    if swap is None:
        raise BadImage(str(slab), "has a part in a swap folder, and this node has none")
    return version_folder(swap, rank=rank, world=world, state=state)


def _listed(version: Path) -> list[Path]:
    try:
        return sorted(version.iterdir())
    except FileNotFoundError:
        raise BadImage(str(version), "is gone, and an image has its state in it") from None


def read_manifest(folder: Path) -> Manifest:
    """Raises ``BadImage`` if there is no complete image of this format."""
    return manifests.read(folder / MANIFEST, Manifest, format_=FORMAT)


def slab_bytes(folder: Path, *, first: int, count: int) -> int:
    """Of the slabs of so many ranks; 0: there is no complete image."""
    try:
        manifest = read_manifest(folder)
    except BadImage:
        return 0
    return sum(file.bytes for file in manifest.files[first : first + count])


def read_image(
    folder: Path,
    slabs: Sequence[Path],
    *,
    first: int = 0,
    world: int | None = None,
    swap: Path | None = None,
) -> Manifest:
    """Copy the image in ``folder`` into slabs, which are valid only once all is there and checked;
    and what else there is of it into the deployment's swap folder, ``swap``.

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
    for rank, (prelude, slab) in enumerate(zip(preludes, slabs, strict=True), first):
        _check_owner(folder, manifest, parse_header(slab, prelude), rank)
    for rank, (prelude, slab) in enumerate(zip(preludes, slabs, strict=True)):
        _read_swapped(folder, manifest, rank, slab, prelude, swap)
    for prelude, slab in zip(preludes, slabs, strict=True):
        put_prelude(slab, prelude)
    return manifest


def _check_owner(folder: Path, manifest: Manifest, header: SlabHeader, rank: int) -> None:
    """A whole slab may be another image's."""
    wanted = manifest.deployment, tuple(manifest.progress), rank
    if (header.deployment, tuple(header.progress), header.rank) != wanted:
        seq, part = header.progress
        raise BadImage(
            str(folder / manifest.files[rank].name),
            f"is of {header.deployment} at {seq}.{part}, rank {header.rank}",
        )


def _read_swapped(
    folder: Path, manifest: Manifest, rank: int, slab: Path, prelude: bytes, swap: Path | None
) -> None:
    files = [file for file in manifest.swapped if file.name.startswith(f"rank-{rank}.swap/")]
    if not files:
        return
    if swap is None:
        raise BadImage(str(folder), "has a part that belongs on a disk, and this node has none")
    state = parse_header(slab, prelude).state
    version = version_folder(swap, rank=rank, world=len(manifest.files), state=state)
    if version is None:
        raise BadImage(str(folder), "has swapped files and a slab that knows of none")
    part = version.with_name(f".{version.name}.part")
    disk.disk.remove_tree(part)
    disk.disk.make_folder(part)
    try:
        for file in files:
            name = file.name.rpartition("/")[2]
            copy = _copy_in(part, name, folder / file.name, file.bytes)
            if copy.crc32 != file.crc32:
                raise BadImage(str(folder / file.name), _DAMAGED)
        # What is there should be the same, as versions do not change; a disk may have lost some.
        if version.exists() and disk.disk.exchange(part, version):
            return
        disk.disk.remove_tree(version)
        disk.disk.rename(part, version)
    finally:
        disk.disk.remove_tree(part)


def _read_slab(source_path: Path, file: RankFile, slab: Path) -> bytes:
    """Everything but the commit mark; returns the prelude, which has it."""
    target = disk.disk.open(slab, os.O_RDWR | os.O_CREAT)
    try:
        with storage_errors(slab.parent, file.bytes):
            disk.disk.allocate(target, max(file.bytes, os.fstat(target).st_size))
        crc, at, prelude = 0, 0, b""
        for chunk in chunks(source_path, file.bytes):
            crc = zlib.crc32(chunk, crc)
            if not prelude:
                prelude = bytes(chunk[:PRELUDE_BYTES])
                chunk[:PRELUDE_BYTES] = unmarked(prelude)
            write_all(target, chunk, at)
            at += len(chunk)
    finally:
        disk.disk.close(target)
    if crc != file.crc32:
        raise BadImage(str(source_path), _DAMAGED)
    return prelude


def check_image(folder: Path, *, gate: Gate) -> None:
    """Read all of it, and nothing else. Raises ``BadImage`` and ``Abandoned``."""
    manifest = read_manifest(folder)
    for file in (*manifest.files, *manifest.swapped):
        crc, parts = 0, chunks(folder / file.name, file.bytes)
        while True:
            with gate.block():
                chunk = next(parts, None)
                crc = zlib.crc32(chunk, crc) if chunk is not None else crc
            if chunk is None:
                break
        if crc != file.crc32:
            raise BadImage(str(folder / file.name), _DAMAGED)


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
