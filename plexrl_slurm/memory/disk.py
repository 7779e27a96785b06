"""Every step by which the tiers touch files: one seam, where tests put a disk that fails.

Each method is one step that may fail, be torn, or be the last one that a process does. What
ranks store into their mappings is not here.
"""

import ctypes
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class Disk:
    """The real one."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor; files are made for their owner only."""
        return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        """Never fails for a reason of the disk's that :meth:`sync` has not told."""
        os.close(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        """Have room for ``size`` bytes in all, or fail now."""
        os.posix_fallocate(descriptor, 0, size)

    def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
        """The number of bytes that were written: perhaps not all."""
        return os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        """The number of bytes that were read; 0 at the end."""
        return os.preadv(descriptor, into, offset)

    def sync(self, descriptor: int) -> None:
        """What was written outlives a power cut from now on."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Names that were given in the folder outlive a power cut from now on."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_file(self, path: Path) -> bytes:
        """A small file."""
        return path.read_bytes()

    def make_folder(self, path: Path) -> None:
        """With those above it."""
        path.mkdir(parents=True, mode=0o700)

    def rename(self, one: Path, other: Path) -> None:
        """At once; ``other`` is replaced if it is a file."""
        one.rename(other)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swap two names at once; whether the file system can."""
        libc = ctypes.CDLL(None, use_errno=True)
        answer = libc.renameat2(
            _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
        )
        return bool(answer == 0)

    def remove(self, path: Path) -> None:
        """A file, if it is there."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """As much of it as can be removed."""
        shutil.rmtree(path, ignore_errors=True)

    def truncate(self, path: Path) -> None:
        """Give a file's pages back, though somebody may have it mapped."""
        with suppress(FileNotFoundError):
            os.truncate(path, 0)


#: In use; looked up at every step.
disk: Disk = Disk()
