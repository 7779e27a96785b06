"""Swap folders: the part of a training state that lies on a disk of the node, and stays there.

One folder for each deployment, in it one for each rank, in it one for each *version*. A version is
written whole, by an optimizer step, and never changed while an image names it: a process that
dies in the middle of a step leaves the version that the step began with. It has checksums, see
:mod:`plexrl_slurm.memory.swap_manifest`.
"""

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import swap_manifest
from plexrl_slurm.memory.files import storage_errors
from plexrl_slurm.memory.swap_manifest import Trust

#: Variable that tells a rank where the swap folders of its agent are.
SWAP_DIR: Final = "PLEXRL_SWAP_DIR"
#: Name under which the header of an image says which version it belongs to.
VERSION: Final = "swap.version"
#: Name under which it says how many files the version has.
FILES: Final = "swap.files"
#: Images that may be a deployment's newest one; the agent knows, the rank does not.
_NAMED: Final = 2


def home_of(root: Path, wpg: str, deployment: str) -> Path:
    """The swap folder of a deployment."""
    return root / wpg / deployment.replace(":", ".").replace("/", "_")


def scratch_of(root: Path, wpg: str, rank: int) -> Path:
    """What a rank needs during a step only."""
    return root / wpg / f".scratch-{rank}"


def rank_folder(home: Path, rank: int, world: int) -> Path:
    """One rank's versions."""
    return home / f"rank-{rank}-of-{world}"


def version_folder(home: Path, *, rank: int, world: int, state: Mapping[str, int]) -> Path | None:
    """What belongs to an image whose header has this ``state``; ``None``: all is in the image."""
    version = state.get(VERSION)
    return None if version is None else rank_folder(home, rank, world) / str(version)


def check_version(
    home: Path, *, rank: int, world: int, state: Mapping[str, int], trust: Trust | None = None
) -> None:
    """Raises ``BadImage`` if files are gone that belong to an image whose header has ``state``,
    or are not what they were as far as ``trust`` has it looked at."""
    place = version_folder(home, rank=rank, world=world, state=state)
    if place is None or FILES not in state:
        return
    there = sum(path.suffix == ".swp" for path in place.glob("*"))
    if there < state[FILES]:
        raise BadImage(str(place), f"has {there} of {state[FILES]} files of the image's state")
    if trust is not None:
        trust.check(home, place)


class SwapFolder:
    """One deployment's versions on one rank. While it is open nobody else deletes it."""

    def __init__(self, home: Path, *, rank: int, world: int) -> None:
        self._folder = rank_folder(home, rank, world)
        self._lock = _share(home)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        #: The version that the state is in; 0: none yet.
        self.current = 0
        #: Versions that the newest images name, oldest first.
        self._named: list[int] = []
        self._begun, self._sizes = 0, dict[str, int]()
        #: The version before the one that was loaded, until a step has read that.
        self._before = 0

    def path(self, version: int) -> Path:
        """Folder of a version."""
        return self._folder / str(version)

    def begin(self, sizes: Mapping[str, int]) -> Path:
        """A folder for a new version, with room for these files; raises ``StorageFull``."""
        if self._begun:
            self.abandon()
        self._begun = max(now_us(), self.current + 1, *self._named, *self._versions()) + 1
        garbage = [version for version in self._versions() if not self._is_kept(version)]
        place = self.path(self._begun)
        if garbage:  # its blocks are written again, which costs no allocation
            self.path(garbage.pop()).rename(place)
        else:
            place.mkdir(mode=0o700)
        for version in garbage:
            shutil.rmtree(self.path(version), ignore_errors=True)
        try:
            with storage_errors(place, sum(sizes.values())):
                swap_manifest.reserve(place, len(sizes))
                for name, size in sizes.items():
                    allocate(place / name, size)
        except BaseException:
            self.abandon()
            raise
        self._sizes = dict(sizes)
        return place

    def commit(self, crcs: Mapping[str, int] | None = None) -> None:
        """The new version is whole: the state is in it. ``crcs``: of files, as far as known."""
        swap_manifest.write(self.path(self._begun), self._sizes, crcs or {})
        self.current, self._begun, self._before = self._begun, 0, 0

    def abandon(self) -> None:
        """The state stays in the version before."""
        shutil.rmtree(self.path(self._begun), ignore_errors=True)
        self._begun = 0

    def saved(self) -> None:
        """The image that was just written names the current version."""
        if self.current not in self._named:
            self._named = [*self._named, self.current][-_NAMED:]

    def load(self, version: int, sizes: Mapping[str, int]) -> None:
        """Go back to a version; others are worth nothing, but for the one before it, which is what
        is left if this one turns out to be damaged. Raises ``BadImage``."""
        place = self.path(version)
        for name, size in sizes.items():
            try:
                found = (place / name).stat().st_size
            except FileNotFoundError:
                raise BadImage(
                    str(place), f"lacks {name}, in which the image has its state"
                ) from None
            if found != size:
                raise BadImage(str(place / name), f"has {found} bytes where {size} belong")
        self.current, self._named, self._begun = version, [version], 0
        self._before = max((each for each in self._versions() if each < version), default=0)

    def close(self) -> None:
        """Somebody else is resident."""
        os.close(self._lock)

    def _versions(self) -> list[int]:
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def _is_kept(self, version: int) -> bool:
        return version in (*self._named, self.current, self._begun, self._before)


def allocate(path: Path, size: int) -> None:
    """Have room for a file of so many bytes, or fail now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _share(home: Path) -> int:
    """A lock on ``home``, which others may have too."""
    while True:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            if os.path.samestat(home.stat(), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # it was deleted in the meantime


def set_aside(home: Path, gone: Path) -> bool:
    """Rename a deployment's folder to ``gone``, if it is there; ``False``: a rank uses it."""
    try:
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        home.rename(gone)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def used_bytes(root: Path) -> int:
    """Bytes of all files below ``root``."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total
