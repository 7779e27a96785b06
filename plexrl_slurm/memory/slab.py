"""The file format of an image: one slab per rank on a tmpfs, self-describing, no torch.

A slab is a prelude, a header (msgpack) and tensors at page-aligned offsets. The *commit mark*
in the prelude is wiped before anything is overwritten and written last, so a slab whose
writer died is refused instead of half believed. Pages are reserved before they are touched:
a full tmpfs is an error here, never a SIGBUS. A slab grows and never shrinks, so that its
pages stay warm and a switch runs at the speed of memory.
"""

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from plexrl_slurm.core.errors import BadImage, StorageFull
from plexrl_slurm.memory import disk
from plexrl_slurm.memory.files import write_all

_MAGIC: Final = b"PLEXSLAB"
_VERSION: Final = 1
#: magic, version, header bytes, bytes of the file in use, commit mark.
_PRELUDE: Final = struct.Struct("<8sIIQQ")
_MARK: Final = struct.Struct("<Q")
_MARK_AT: Final = _PRELUDE.size - _MARK.size
_PAGE: Final = 4096
#: Bytes before the header; the commit mark is their end.
PRELUDE_BYTES: Final = _PRELUDE.size


class SlabTensor(msgspec.Struct, frozen=True, array_like=True):
    """Where one tensor lies."""

    name: str
    #: As the engine spells it: ``float32``, ``bfloat16``, …
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    #: From the start of the file.
    offset: int = 0


class SlabHeader(msgspec.Struct, frozen=True):
    """What a slab says about itself."""

    deployment: str
    #: Calls with ``(seq, part)`` below this are contained.
    progress: tuple[int, int]
    rank: int
    world: int
    architecture: str
    tensors: tuple[SlabTensor, ...]
    #: Counters and flags of the engine.
    state: Mapping[str, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the tensors: what a switch moves."""
        return sum(tensor.bytes for tensor in self.tensors)


def read_header(path: Path) -> SlabHeader:
    """The header of the complete slab at ``path``; raises ``BadImage`` for anything else."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prelude = file.read(_PRELUDE.size)
            header = file.read(_header_bytes(path, prelude))
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror})") from error
    return _parse(path, size, prelude, header)


def parse_header(path: Path, prelude: bytes) -> SlabHeader:
    """The header of a slab at ``path`` that lacks nothing but its ``prelude``; or ``BadImage``."""
    with path.open("rb") as file:
        file.seek(_PRELUDE.size)
        header = file.read(_header_bytes(path, prelude))
        return _parse(path, os.fstat(file.fileno()).st_size, prelude, header)


def used_bytes(path: Path) -> int:
    """Bytes of the complete slab at ``path`` that mean something; raises ``BadImage``."""
    read_header(path)
    with path.open("rb") as file:
        return int(_PRELUDE.unpack(file.read(_PRELUDE.size))[3])


def unmarked(prelude: bytes) -> bytes:
    """The prelude of a slab that is not finished."""
    return prelude[:_MARK_AT] + bytes(_MARK.size)


def put_prelude(path: Path, prelude: bytes) -> None:
    """Make a slab valid, or not; everything else of it is there already."""
    descriptor = disk.disk.open(path, os.O_WRONLY)
    try:
        write_all(descriptor, prelude, 0)
    finally:
        disk.disk.close(descriptor)


def _header_bytes(path: Path, prelude: bytes) -> int:
    if len(prelude) < _PRELUDE.size or not prelude.startswith(_MAGIC):
        raise BadImage(str(path), "is no PlexRL image")
    _, version, length, _, _ = _PRELUDE.unpack(prelude)
    if version != _VERSION:
        raise BadImage(str(path), f"has format {version}; this release reads format {_VERSION}")
    return int(length)


def _parse(path: Path, size: int, prelude: bytes, header: bytes) -> SlabHeader:
    _, _, length, used, mark = _PRELUDE.unpack(prelude)
    if mark == 0:
        raise BadImage(str(path), "is torn: its writer never finished it")
    if size < used or len(header) < length:
        raise BadImage(str(path), f"is cut off: {size} of {used} bytes are there")
    if mark != _mark(header):
        raise BadImage(str(path), "is torn: its header does not match its commit mark")
    try:
        return msgspec.msgpack.decode(header, type=SlabHeader)
    except msgspec.DecodeError as error:
        raise BadImage(str(path), f"has an unreadable header ({error})") from error


def _mark(header: bytes) -> int:
    return 1 << 32 | zlib.crc32(header)


def _page_up(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE


def needed_bytes(header: SlabHeader) -> int:
    """Bytes of file that :meth:`Slab.write` would need for it."""
    return _lay_out(header)[1]


def _lay_out(header: SlabHeader) -> tuple[SlabHeader, int]:
    """The header with offsets filled in, and the bytes of file it needs."""
    # Offsets have at most nine bytes in msgpack, and the header is written after them.
    at = _page_up(_PRELUDE.size + len(msgspec.msgpack.encode(header)) + 9 * len(header.tensors))
    placed = []
    for tensor in header.tensors:
        placed.append(msgspec.structs.replace(tensor, offset=at))
        at = _page_up(at + tensor.bytes)
    return msgspec.structs.replace(header, tensors=tuple(placed)), at


class Slab:
    """A slab mapped into this process. Keep it open: its pages are warm then."""

    def __init__(self, path: Path) -> None:
        """Open the file at ``path``; :meth:`write` creates it if it is not there."""
        self.path = path
        self._map: mmap.mmap | None = None
        self._inode: tuple[int, int] | None = None
        self._header = b""

    def current(self) -> bool:
        """Whether the mapping still is the file of that name, at its full size."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        return (
            self._map is not None
            and self._inode == (stat.st_dev, stat.st_ino)
            and len(self._map) == stat.st_size
        )

    def read(self) -> SlabHeader:
        """Map the file and check that it is complete; raises ``BadImage``."""
        header = read_header(self.path)
        if not self.current():
            with self.path.open("r+b") as file:
                self._map_file(file.fileno())
        return header

    def reserve(self, header: SlabHeader) -> None:
        """Make room for ``header`` and its tensors; raises ``StorageFull``.

        What the slab holds stays valid.
        """
        _, needed = _lay_out(header)
        if not self.current() or self._map is None or len(self._map) < needed:
            self._grow(needed)

    def write(self, header: SlabHeader) -> SlabHeader:
        """Invalidate what is there and write ``header``; answers with the offsets filled in.

        The slab is valid again after :meth:`commit`.
        """
        self.reserve(header)
        placed, needed = _lay_out(header)
        space = self._map
        assert space is not None  # for the type checker: reserve maps or raises
        _MARK.pack_into(space, _MARK_AT, 0)
        self._header = msgspec.msgpack.encode(placed)
        _PRELUDE.pack_into(space, 0, _MAGIC, _VERSION, len(self._header), needed, 0)
        space[_PRELUDE.size : _PRELUDE.size + len(self._header)] = self._header
        return placed

    def commit(self) -> None:
        """Everything is in place: make the slab valid."""
        assert self._map is not None
        _MARK.pack_into(self._map, _MARK_AT, _mark(self._header))

    def views(self, tensors: Sequence[SlabTensor]) -> list[memoryview]:
        """Writable bytes of the tensors. They keep the mapping alive; let them go soon."""
        whole = self.whole()
        return [whole[tensor.offset : tensor.offset + tensor.bytes] for tensor in tensors]

    def whole(self) -> memoryview:
        """All that is mapped. It keeps the mapping alive."""
        assert self._map is not None
        return memoryview(self._map)

    def _grow(self, needed: int) -> None:
        new = not self.path.exists()
        descriptor = disk.disk.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            size = max(needed, os.fstat(descriptor).st_size)
            disk.disk.allocate(descriptor, size)
            self._map_file(descriptor)
        except OSError as error:
            if new:
                with suppress(OSError):
                    self.path.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            free = os.statvfs(self.path.parent)
            raise StorageFull(
                str(self.path.parent), needed, free.f_bavail * free.f_frsize
            ) from error
        finally:
            disk.disk.close(descriptor)

    def _map_file(self, descriptor: int) -> None:
        # The old mapping, if any, goes when the last view of it does.
        self._map = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        stat = os.fstat(descriptor)
        self._inode = (stat.st_dev, stat.st_ino)
