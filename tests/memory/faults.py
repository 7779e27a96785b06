"""A disk that fails, tears what it writes, stops its process at any step, or loses its power."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from plexrl_slurm.memory.disk import Disk

#: What may happen instead of a step, or after half of it.
STOP, TEAR, FULL, BROKEN, READ_ONLY, SHORT = FAULTS = (
    "stop", "tear", "full", "broken", "read-only", "short",
)  # fmt: skip
NUMBERS: Final = {FULL: errno.ENOSPC, BROKEN: errno.EIO, READ_ONLY: errno.EROFS}
#: Steps that make or change something.
CHANGES: Final = frozenset(
    {"create", "allocate", "write", "sync", "folder", "make", "rename", "exchange"}
)


class Stopped(BaseException):
    """The process is no more: it does nothing from here on."""


@dataclass
class FaultyDisk(Disk):
    """Counts steps, and asks ``fault`` what happens at each: ``(step, kind) -> fault or ""``."""

    rng: random.Random
    #: A tmpfs: it may be full, and does not fail otherwise.
    memory: Path
    fault: Callable[[int, str], str] = lambda _step, _kind: ""
    #: Called before every step: others may do something first.
    pause: Callable[[], None] = lambda: None
    steps: int = 0
    #: Faults that were injected.
    faults: int = 0
    dead: bool = False
    _paths: dict[int, Path] = field(default_factory=dict)
    #: Files whose data a power cut loses, by inode.
    _unsynced: dict[int, Path] = field(default_factory=dict)
    #: Names that a power cut takes back, by folder, oldest first.
    _names: dict[Path, list[tuple[Path | None, Path]]] = field(default_factory=dict)

    def _step(self, kind: str, path: Path) -> str:
        if self.dead:
            raise Stopped
        self.pause()
        if self.dead:
            raise Stopped
        self.steps += 1
        fault = self.fault(self.steps, kind)
        if fault in NUMBERS:
            in_memory = path.is_relative_to(self.memory)
            possible = kind in CHANGES if fault != BROKEN else kind not in ("close", "truncate")
            if in_memory and (fault != FULL or kind not in ("create", "allocate")):
                possible = False
            if possible:
                self.faults += 1
                raise OSError(NUMBERS[fault], os.strerror(NUMBERS[fault]), str(path))
            return ""
        if fault == STOP:
            self._die()
        self.faults += fault == SHORT
        return fault

    def _die(self) -> None:
        self.dead = True
        raise Stopped

    def _after(self, fault: str) -> None:
        if fault == TEAR:
            self._die()

    def open(self, path: Path, flags: int) -> int:
        new = bool(flags & os.O_CREAT) and not path.exists()
        fault = self._step("create" if new else "open", path)
        # The tests' folder may be on a file system that wants other alignments.
        descriptor = super().open(path, flags & ~os.O_DIRECT)
        self._paths[descriptor] = path
        if new:
            self._names.setdefault(path.parent, []).append((None, path))
        if fault == TEAR:
            super().close(descriptor)
            self._die()
        return descriptor

    def close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        super().close(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        fault = self._step("allocate", self._paths[descriptor])
        super().allocate(descriptor, size)
        self._after(fault)

    def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
        path = self._paths[descriptor]
        fault = self._step("write", path)
        self._unsynced[os.fstat(descriptor).st_ino] = path
        if fault in (TEAR, SHORT):
            part = memoryview(data)[: self.rng.randint(1, len(data))]
            done = super().write(descriptor, part, offset)
            self._after(fault)
            return done
        return super().write(descriptor, data, offset)

    def read(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        fault = self._step("read", self._paths[descriptor])
        if fault == SHORT:
            return super().read(descriptor, [into[0][: max(1, len(into[0]) // 2)]], offset)
        done = super().read(descriptor, into, offset)
        self._after(fault)
        return done

    def sync(self, descriptor: int) -> None:
        fault = self._step("sync", self._paths[descriptor])
        self._unsynced.pop(os.fstat(descriptor).st_ino, None)
        self._after(fault)

    def sync_folder(self, path: Path) -> None:
        fault = self._step("folder", path)
        path.stat()
        self._names.pop(path, None)
        self._after(fault)

    def read_file(self, path: Path) -> bytes:
        self._after(self._step("read", path))
        return super().read_file(path)

    def make_folder(self, path: Path) -> None:
        fault = self._step("make", path)
        for each in [path, *path.parents]:
            if not each.exists():
                self._names.setdefault(each.parent, []).append((None, each))
        super().make_folder(path)
        self._after(fault)

    def rename(self, one: Path, other: Path) -> None:
        fault = self._step("rename", one)
        super().rename(one, other)
        self._names.setdefault(other.parent, []).append((one, other))
        self._after(fault)

    def exchange(self, one: Path, other: Path) -> bool:
        fault = self._step("exchange", one)
        can = super().exchange(one, other)
        self._after(fault)
        return can

    def remove(self, path: Path) -> None:
        fault = self._step("remove", path)
        super().remove(path)
        self._after(fault)

    def remove_tree(self, path: Path) -> None:
        try:
            fault = self._step("remove", path)
        except OSError:
            return
        if fault == TEAR and path.is_dir():
            for each in sorted(path.rglob("*")):
                if each.is_file() and self.rng.random() < 0.5:
                    each.unlink()
            self._die()
        super().remove_tree(path)
        self._after(fault)

    def truncate(self, path: Path) -> None:
        fault = self._step("truncate", path)
        super().truncate(path)
        self._after(fault)

    def cut_power(self) -> None:
        """What was not synced is lost, wholly or in part; memory is empty."""
        self.dead = False
        inodes = self._unsynced
        for path in [p for parent in {p.parent for p in inodes.values()} for p in _files(parent)]:
            if path.stat().st_ino in inodes and self.rng.random() < 0.7:
                keep = self.rng.randint(0, path.stat().st_size)
                whole = path.stat().st_size
                os.truncate(path, keep)
                if self.rng.random() < 0.5:
                    os.truncate(path, whole)  # zeros where data was
        for names in self._names.values():
            for one, other in reversed(names[self.rng.randint(0, len(names)) :]):
                if not other.exists():
                    continue
                if one is None:
                    shutil.rmtree(other) if other.is_dir() else other.unlink()
                elif one.parent.is_dir() and not one.exists():
                    other.rename(one)
        self._unsynced.clear()
        self._names.clear()
        shutil.rmtree(self.memory, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    # The folder may have another name by now.
    root = folder if folder.is_dir() else folder.parent
    return [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
