"""Folders that one agent owns, on a tmpfs or a disk where others could be first."""

import asyncio
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import Denied

_LOCK: Final = "agent.lock"


async def locked(folder: Path, make: Callable[[], None]) -> int:
    """Wait until no other agent has the lock of ``folder``, and take it; the descriptor keeps it.

    ``make``: makes the folder again; another hold's agent may have taken it for left over.
    """
    while True:
        make()
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        ours = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = _is_at(descriptor, folder / _LOCK)
        except BlockingIOError:
            await asyncio.sleep(0.2)
        finally:
            if not ours:
                os.close(descriptor)
        if ours:
            return descriptor


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
    """Delete the folders of other holds' agents beside ``host`` that no agent uses any more."""
    for folder in host.parent.iterdir() if host.parent.is_dir() else ():
        if folder == host or not (folder / _LOCK).is_file():
            continue
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            say(str(folder))
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def is_there(lock: int, folder: Path) -> bool:
    """Whether the folder is the one that was locked: not deleted, moved or unmounted since."""
    return _is_at(lock, folder / _LOCK)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file has not been deleted since it was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
