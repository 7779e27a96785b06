"""Reads and writes of files that are under way at once, none of which fails without saying so.

Pieces go between the caller's memory and the disk (O_DIRECT), and through the page cache where
the file system or the disk does not take them so: in memory or at an offset that is not aligned
to its blocks.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from crc32c import crc32c

from plexrl_slurm.memory import disk

#: What one thread moves at once; a multiple of any disk's block.
PIECE: Final = 8 << 20
#: Pieces that are under way at once.
_THREADS: Final = 8
#: Files of which what was read is summed up at once.
_CHECKS: Final = 4


class Requests:
    """Keep what they read into or write from alive until :meth:`wait`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="swap")
        self._sums = ThreadPoolExecutor(_CHECKS, thread_name_prefix="swap-sum")
        self._pieces: list[Future[None]] = []
        self._checks: list[Future[None]] = []
        self._files = 0
        self._crcs: dict[Path, Future[int]] = {}

    def read(
        self, path: Path, into: memoryview, offset: int = 0, *, crc: int | None = None
    ) -> None:
        """Exactly so many bytes; ``crc``: their CRC-32C, if that is known."""
        pieces = self._begin(path, into, offset, os.O_RDONLY, _read)
        if crc is not None:
            self._checks.append(self._sums.submit(_check, path, into, pieces, crc))

    def write(
        self, path: Path, data: memoryview, offset: int = 0, *, checksum: bool = False
    ) -> None:
        """``checksum``: see :meth:`checksums`. Nothing is cut off behind ``data``."""
        if checksum:
            self._crcs[path] = self._pool.submit(crc32c, data)
        self._begin(path, data, offset, os.O_WRONLY | os.O_CREAT, _write)

    def wait(self) -> int:
        """All of them are done; how many there were. Raises what the first of them failed with."""
        files, self._files = self._files, 0
        pieces, self._pieces = self._pieces, []
        checks, self._checks = self._checks, []
        failures = [each.exception() for each in (*pieces, *checks)]
        for crc in self._crcs.values():
            crc.result()  # it reads the same memory
        for failure in failures:
            if failure is not None:
                raise failure
        return files

    def checksums(self) -> dict[Path, int]:
        """CRC-32C of what was written with ``checksum`` since the last time."""
        crcs, self._crcs = self._crcs, {}
        return {path: crc.result() for path, crc in crcs.items()}

    def _begin(
        self,
        path: Path,
        data: memoryview,
        offset: int,
        flags: int,
        move: Callable[[int, memoryview, int], int],
    ) -> "list[Future[None]]":
        self._files += 1
        first = len(self._pieces)
        for at in range(0, data.nbytes, PIECE):
            piece = data[at : at + PIECE]
            self._pieces.append(self._pool.submit(_whole, path, piece, offset + at, flags, move))
        return self._pieces[first:]


def _check(path: Path, data: memoryview, pieces: "list[Future[None]]", crc: int) -> None:
    """Sum the pieces up as they come."""
    found = 0
    for number, piece in enumerate(pieces):
        piece.result()
        found = crc32c(data[number * PIECE : (number + 1) * PIECE], found)
    if found != crc:
        raise OSError(errno.EIO, "is damaged: it does not match its checksum", str(path))


def _read(descriptor: int, into: memoryview, offset: int) -> int:
    return disk.disk.read(descriptor, [into], offset)


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    return disk.disk.write(descriptor, data, offset)


def _whole(
    path: Path,
    data: memoryview,
    offset: int,
    flags: int,
    move: Callable[[int, memoryview, int], int],
) -> None:
    descriptor = _direct(path, flags)
    try:
        while data.nbytes:
            try:
                moved = move(descriptor, data, offset)
            except OSError as error:
                was = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not was & os.O_DIRECT:
                    raise
                fcntl.fcntl(descriptor, fcntl.F_SETFL, was & ~os.O_DIRECT)
                continue
            if moved <= 0:
                raise OSError(errno.EIO, f"{data.nbytes} bytes are missing")
            data, offset = data[moved:], offset + moved
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        disk.disk.close(descriptor)


def _direct(path: Path, flags: int) -> int:
    try:
        return disk.disk.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return disk.disk.open(path, flags)  # a file system without O_DIRECT
