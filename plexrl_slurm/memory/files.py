"""Files and folders that are complete or not there: write under another name, sync, rename.

``write_tensors`` writes the safetensors format (https://github.com/huggingface/safetensors) from
plain buffers: no copy, no torch, and the checksum comes for free.
"""

import errno
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadImage, PlexError, StorageFailed, StorageFull
from plexrl_slurm.memory import disk

#: dtype names of numpy and torch to those of safetensors.
_SAFETENSORS: Final = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
}
#: Bytes that are read at once.
CHUNK: Final = 8 << 20
#: Variable that names whoever writes, in processes that are not alone.
WRITER: Final = "PLEXRL_WRITER"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBuffer:
    """One tensor as bytes."""

    name: str
    #: ``float32``, ``bfloat16``, ``float16`` or ``int64``.
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a file turned out to be."""

    bytes: int
    #: Hex digest; "" if it was not asked for.
    sha256: str


@contextmanager
def storage_errors(where: Path, needed_bytes: int) -> Iterator[None]:
    """Turn a full disk into ``StorageFull``, at this border only."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = os.statvfs(_standing(where))
        raise StorageFull(str(where), needed_bytes, free.f_bavail * free.f_frsize) from error


def _standing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


@contextmanager
def saving_errors(where: Path) -> Iterator[None]:
    """Turn whatever keeps a file from being written into ``StorageFull`` or ``StorageFailed``."""
    try:
        with storage_errors(where, 0):
            yield
    except OSError as error:
        if isinstance(error, PlexError):
            raise
        raise StorageFailed(str(error.filename or where), error.strerror or str(error)) from error


def write_tensors(
    path: Path, tensors: Sequence[NamedBuffer], *, durable: bool, checksum: bool = False
) -> Written:
    """Write a safetensors file at ``path``, complete or not at all. ``durable``: fsync it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    part = part_name(path)
    try:
        with storage_errors(path.parent, at), part.open("wb", buffering=0) as file:
            head = memoryview(len(text).to_bytes(8, "little") + text)
            for piece in (head, *(tensor.data for tensor in tensors)):
                _write_all(file.fileno(), piece.cast("B"))
                if checksum:
                    digest.update(piece)
            if durable:
                os.fsync(file.fileno())
        part.rename(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
    if durable:
        sync_folder(path.parent)
    return Written(bytes=8 + len(text) + at, sha256=digest.hexdigest() if checksum else "")


def _write_all(descriptor: int, data: memoryview) -> None:
    # One write() moves 2 GiB at most, and a full disk may cut it short before it fails.
    while data.nbytes:
        data = data[os.write(descriptor, data[: 1 << 30]) :]


def part_name(path: Path, writer: str | None = None) -> Path:
    """Where ``path`` is written before it is renamed: the same for every rank of a gang, and for
    no other gang, which may be lost and still write. ``writer``: not this process."""
    writer = os.environ.get(WRITER, "") if writer is None else writer
    return path.with_name(f".{path.name}{f'.{writer}' if writer else ''}.part")


def sync_folder(path: Path) -> None:
    """Make renames in the folder survive a power cut."""
    disk.disk.sync_folder(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write and fsync a small file inside a folder that is not published yet."""
    with storage_errors(path.parent, len(data)):
        descriptor = disk.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(descriptor, data, 0)
            disk.disk.sync(descriptor)
        finally:
            disk.disk.close(descriptor)


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of it, though the system may do less at once."""
    view = memoryview(data)
    while view.nbytes:
        done = disk.disk.write(descriptor, view, offset)
        view, offset = view[done:], offset + done


def chunks(path: Path, size: int, *, first: int = 0) -> Iterator[memoryview]:
    """A file from ``first`` to ``size``, each part until the next is asked for; or ``BadImage``."""
    try:
        source = disk.disk.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror})") from error
    try:
        # Pages of its own, which no allocator keeps.
        room = memoryview(mmap.mmap(-1, CHUNK))
        at, filled = first, 0
        while at < size:
            wanted = min(CHUNK, size - at)
            try:
                read = disk.disk.read(source, [room[filled:wanted]], at + filled)
            except OSError as error:
                raise BadImage(str(path), f"cannot be read ({error.strerror})") from error
            if not read:
                raise BadImage(str(path), f"is cut off: {size - at - filled} bytes are missing")
            filled += read
            if filled == wanted:
                yield room[:filled]
                at, filled = at + filled, 0
    finally:
        disk.disk.close(source)


def publish_folder(part: Path, path: Path) -> None:
    """Give the finished folder ``part`` its name; whatever has the name is replaced at once."""
    sync_folder(part)
    if path.exists():
        _exchange(part, path)
        disk.disk.remove_tree(part)
    else:
        disk.disk.rename(part, path)
    sync_folder(path.parent)


def _exchange(one: Path, other: Path) -> None:
    if disk.disk.exchange(one, other):
        return
    # A file system without exchange (NFS): two renames, and the old one stays findable between.
    old = other.with_name(f".{other.name}.old")
    disk.disk.remove_tree(old)
    disk.disk.rename(other, old)
    disk.disk.rename(one, other)
    disk.disk.remove_tree(old)
