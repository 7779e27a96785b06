"""Folders that one agent owns, on a tmpfs or a disk where others could be first."""

import asyncio
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import Denied, StorageFull
from plexrl_slurm.logs import say

_LOCK: Final = "agent.lock"
#: Looks at a lock that others have, 0.2 s apart, after which the log says so, and how often.
SAID_FIRST: Final = 25
SAID_EVERY: Final = 300

log = logging.getLogger(__name__)


async def locked(folder: Path, make: Callable[[], None]) -> int:
    """Wait until no other agent has the lock of ``folder``, and take it; the descriptor keeps it.

    ``make``: makes the folder again; another hold's agent may have taken it for left over.
    An agent that ends gives it back soon; one that is another partition's never does, so the log
    says who has it.
    """
    waited = 0
    while True:
        make()
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        ours = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = _is_at(descriptor, folder / _LOCK)
            if ours:
                with suppress(OSError):  # a full disk has no room for a number either
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            waited += 1
            if waited % SAID_EVERY == SAID_FIRST:
                say(log, "folder_taken", reason=_taken(folder, descriptor))
            await asyncio.sleep(0.2)
        finally:
            if not ours:
                os.close(descriptor)
        if ours:
            return descriptor


def _taken(folder: Path, descriptor: int) -> str:
    pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    return (
        f"{folder} is in use by another agent (pid {pid}): this one waits for its end; if it is "
        f"another partition's, give one of them a folder or a [partition] name of its own"
    )


def refuse_foreign(folder: Path, *, above: int, setting: str) -> None:
    """The folder, and those above it that agents make: on a tmpfs anybody may be first.

    Raises ``Denied`` if others can change what is in them.
    """
    for each in (folder, *folder.parents[:above]):
        found = each.stat()
        sticky = found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o002 and not sticky):
            raise Denied(
                f"{each} can be changed by other users (owner {found.st_uid}, mode "
                f"{found.st_mode & 0o7777:o}): remove it, or name another {setting}"
            )


def tidy_siblings(host: Path, *, say: Callable[[str], None]) -> None:
    """Delete the folders of other holds' agents beside ``host`` that no agent uses any more.

    Only what is ours for certain: a folder with an agent's lock, both of this user, and no link.
    """
    for folder in host.parent.iterdir() if host.parent.is_dir() else ():
        if folder == host or not (_is_mine(folder, stat.S_ISDIR) and _has_lock(folder)):
            continue
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            say(str(folder))
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def too_small(folder: Path, wanted: int, *, setting: str) -> str:
    """What to say if the file system of ``folder`` can never hold so many bytes; "" if it can."""
    room = os.statvfs(folder)
    total = room.f_blocks * room.f_frsize
    if total >= wanted:
        return ""
    return (
        f"{folder} is on a file system of {total / 2**30:.2f} GiB and {setting} is "
        f"{wanted / 2**30:.2f} GiB: mount it larger (a container's /dev/shm has 64 MiB unless it "
        f"is asked for more), or lower {setting}"
    )


def refuse_full(folder: Path, wanted: int) -> None:
    """Raises ``StorageFull`` if the file system of ``folder`` has no room for so many bytes."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if wanted > free:
        raise StorageFull(str(folder), wanted, free)


def _has_lock(folder: Path) -> bool:
    return _is_mine(folder / _LOCK, stat.S_ISREG)


def _is_mine(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether it is of this user, and neither a link nor of another kind."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return kind(found.st_mode) and found.st_uid == os.geteuid()


def is_there(lock: int, folder: Path) -> bool:
    """Whether the folder is the one that was locked: not deleted, moved or unmounted since."""
    return _is_at(lock, folder / _LOCK)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file has not been deleted since it was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
