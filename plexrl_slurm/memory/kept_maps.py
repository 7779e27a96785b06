"""Mappings of files that may be written again: to map pages anew costs as much as to fill them.

A mapping keeps the memory of a file that was deleted. So they are few, and none is left once
:meth:`KeptMaps.prune` has been called after the deletion.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: More are closed, the one that was kept first before others.
_MOST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMap:
    """A file that is open, with all of it mapped and every page there."""

    descriptor: int
    map: mmap.mmap

    def close(self) -> None:
        """Of no use any more."""
        self.map.close()
        os.close(self.descriptor)


class KeptMaps:
    """By device and inode, whatever names the files have. For any thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], KeptMap] = {}
        self._lock = threading.Lock()

    def take(self, path: Path, size: int) -> KeptMap | None:
        """The mapping of this file, for its taker alone from now on, if it has this size."""
        stat = path.stat()
        with self._lock:
            found = self._kept.pop((stat.st_dev, stat.st_ino), None)
        if found is None or (len(found.map) == size == stat.st_size):
            return found
        found.close()
        return None

    def keep(self, one: KeptMap) -> None:
        """Nobody uses it just now."""
        stat = os.fstat(one.descriptor)
        with self._lock:
            known = self._kept.pop((stat.st_dev, stat.st_ino), None)
            self._kept[stat.st_dev, stat.st_ino] = one
            many = len(self._kept) > _MOST
            oldest = self._kept.pop(next(iter(self._kept))) if many else None
        for each in (known, oldest):
            if each is not None:
                each.close()
        self.prune()

    def prune(self) -> None:
        """Give back the memory of files that were deleted."""
        with self._lock:
            gone = [
                key for key, each in self._kept.items() if not os.fstat(each.descriptor).st_nlink
            ]
            closing = [self._kept.pop(key) for key in gone]
        for each in closing:
            each.close()

    def close(self) -> None:
        """Keep none."""
        with self._lock:
            closing, self._kept = [*self._kept.values()], {}
        for each in closing:
            each.close()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._kept)

    @contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """A descriptor to write the file with: that of its mapping, if there is one."""
        own = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_PATH)
        try:
            stat = os.fstat(own)
        finally:
            os.close(own)
        with self._lock:  # it is not taken meanwhile
            known = self._kept.get((stat.st_dev, stat.st_ino))
            if known is not None:
                yield known.descriptor
                return
        own = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield own
        finally:
            os.close(own)
