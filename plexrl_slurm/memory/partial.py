"""A file that comes in chunks, in any order: complete under its name, or not there.

Beside it, while it is not complete, lie its bytes and a list of the chunks that are there, with
their checksums; whoever opens it again goes on from there, also after a kill -9.
"""

import errno
import fcntl
import mmap
import os
import signal
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from crc32c import crc32c

from plexrl_slurm.memory.files import storage_errors
from plexrl_slurm.memory.kept_maps import KeptMap, KeptMaps

#: One chunk: its checksum, and this if it is there.
_RECORD: Final = struct.Struct("<II")
_THERE: Final = 0x504C5852
#: Where the records begin.
_HEAD_BYTES: Final = 1024
#: madvise: have the pages there before they are written (Linux 5.14).
_POPULATE_WRITE: Final = 23


class _Head(msgspec.Struct, frozen=True):
    """Which file it will be; parts of another are worth nothing."""

    identity: str
    size: int
    chunk: int


class PartialFile:
    """Open while it is filled. Not for two at once."""

    def __init__(
        self,
        path: Path,
        *,
        identity: str,
        size: int,
        chunk: int,
        spare: Path,
        maps: KeptMaps | None = None,
    ) -> None:
        """``identity``: of what it is a copy; ``spare``: a file of which nothing is needed, whose
        memory it may take; ``maps``: where mappings of such files are and come back to. Raises
        ``StorageFull`` if there is no room for all of it."""
        self._path, self._chunk, self.size = path, chunk, size
        self._maps = maps
        self._data, self._list = part_of(path), list_of(path)
        self._count = -(-size // chunk)
        head = _Head(identity, size, chunk)
        # Only what has all its pages is mapped: a missing one would have to be cleared first, and
        # would end the process where there is no room for it.
        whole = self._head() != head and self._begin(head, spare)
        kept = maps.take(self._data, size) if maps is not None else None
        if kept is not None and not whole:
            kept.close()
            kept = None
        if kept is None:
            self._file = os.open(self._data, os.O_RDWR | os.O_CLOEXEC)
            self._map = mmap.mmap(self._file, size) if whole and size else None
        else:
            self._file, self._map = kept.descriptor, kept.map
        #: Every page of it is mapped.
        self._populated = kept is not None
        self._records = os.open(self._list, os.O_RDWR | os.O_CLOEXEC)
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")
        self._missing = {index for index in range(self._count) if not self._there(index)}

    def _head(self) -> _Head | None:
        try:
            with self._list.open("rb") as file:
                head = msgspec.json.decode(file.read(_HEAD_BYTES).rstrip(b"\0"), type=_Head)
            return head if self._data.stat().st_size == head.size else None
        except (OSError, msgspec.DecodeError):
            return None

    def _begin(self, head: _Head, spare: Path) -> bool:
        """Whether it has all its pages already."""
        self._list.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            spare.rename(self._data)
        descriptor = os.open(self._data, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, head.size)
            missing = head.size - os.fstat(descriptor).st_blocks * 512
            with storage_errors(self._path.parent, head.size):
                free = os.statvfs(self._path.parent)
                if missing > free.f_bavail * free.f_frsize and free.f_blocks:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._data.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        text = msgspec.json.encode(head).ljust(_HEAD_BYTES, b"\0")
        descriptor = os.open(self._list, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file, storage_errors(self._path.parent, len(text)):
            file.write(text + bytes(_RECORD.size * self._count))
        return missing <= 0

    def _there(self, index: int) -> bool:
        """Whether the chunk is there, and what it was."""
        found = os.pread(self._records, _RECORD.size, _HEAD_BYTES + _RECORD.size * index)
        if len(found) < _RECORD.size:
            return False
        crc, mark = _RECORD.unpack(found)
        if mark != _THERE:
            return False
        start, end = self.bounds(index)
        data = self._view[start:end] if self._view else os.pread(self._file, end - start, start)
        return bool(crc32c(data) == crc)

    def missing(self) -> list[int]:
        """Chunks that are not there, in order."""
        return sorted(self._missing)

    def bounds(self, index: int) -> tuple[int, int]:
        """Of a chunk: from, to."""
        start = index * self._chunk
        return start, min(start + self._chunk, self.size)

    def space(self, index: int) -> memoryview | None:
        """Where the chunk belongs, if it is mapped; else it is to be given to :meth:`write`. It
        counts when :meth:`done` says so."""
        if self._map is None:
            return None
        start, end = self.bounds(index)
        if not self._populated:
            with suppress(OSError):  # an older kernel
                self._map.madvise(_POPULATE_WRITE, start, end - start)
        return self._view[start:end]

    def write(self, at: int, data: memoryview) -> None:
        """Some bytes of a chunk that is not mapped. Raises ``StorageFull``."""
        with storage_errors(self._path.parent, len(data)):
            done = 0
            while done < len(data):
                with data[done:] as rest:
                    done += os.pwrite(self._file, rest, at + done)

    def done(self, index: int, crc: int) -> None:
        """The chunk is there."""
        os.pwrite(self._records, _RECORD.pack(crc, _THERE), _HEAD_BYTES + _RECORD.size * index)
        self._missing.discard(index)

    def complete(self) -> None:
        """Every chunk is there: it gets its name."""
        assert not self._missing, "not complete"
        self._data.rename(self._path)
        self._list.unlink(missing_ok=True)
        self._populated = self._map is not None

    def close(self) -> None:
        """What is there stays."""
        self._view.release()
        os.close(self._records)
        if self._map is None:
            os.close(self._file)
        elif self._populated and self._maps is not None:
            self._maps.keep(KeptMap(descriptor=self._file, map=self._map))
        else:
            KeptMap(descriptor=self._file, map=self._map).close()


def part_of(path: Path) -> Path:
    """Where its bytes are while it is not complete."""
    return path.with_name(f".{path.name}.fetch")


def list_of(path: Path) -> Path:
    """Where the list of its chunks is."""
    return path.with_name(f".{path.name}.chunks")


def forget_partial(path: Path) -> None:
    """Delete what there is of a file that is not complete."""
    part_of(path).unlink(missing_ok=True)
    list_of(path).unlink(missing_ok=True)


def nobody_has(path: Path, maps: KeptMaps | None = None) -> bool:
    """Whether the file is there and no process has it open or mapped, as the kernel knows; what
    ``maps`` keeps of it aside."""
    try:
        with (KeptMaps() if maps is None else maps).opened(path) as descriptor:
            # Whoever opens it just then has us told by a signal, which must be a harmless one.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
