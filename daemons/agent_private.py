"""The folder in /tmp that an agent shares with its ranks, and what killed agents left there.

A living agent holds the lock of its folder, so a folder whose lock is free is a dead one's. It says
which shared memory the dead agent's ranks had, which outlives them when they are killed.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from plexrl_slurm.daemons import left_behind

_PREFIX: Final = "plexrl-agent-"
_LOCK: Final = "agent.lock"
#: A socket's path may have 107 characters, and vLLM's have a name of 36 in the folder.
_LONGEST: Final = 70


class PrivateFolder:
    """Of one agent, for its lifetime."""

    def __init__(self) -> None:
        # Nobody looks for a folder of this name before it is locked.
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.with_name(made.name.removeprefix("."))
        made.rename(self.path)

    def close(self) -> None:
        """The agent ends."""
        _delete(self.path)
        os.close(self._lock)


def tidy(*, say: Callable[[str], None]) -> None:
    """Delete what dead agents of this user left on the node: shared memory of their ranks that no
    process has mapped, and their folders."""
    mapped: set[str] | None = None
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not (_is_mine(folder, stat.S_ISDIR) and _is_mine(folder / _LOCK, stat.S_ISREG)):
            continue
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            mapped = left_behind.mapped_by_any() if mapped is None else mapped
            found = [file for notes in folder.glob("*.shared") for file in left_behind.noted(notes)]
            for file in found:
                if file not in mapped:
                    say(file)
            left_behind.remove(file for file in found if file not in mapped)
            if mapped.isdisjoint(found):  # else a rank still lives, and the next agent looks again
                say(str(folder))
                _delete(folder)
        finally:
            os.close(lock)


def scratch(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that have a rank's libraries put their temporary files into the agent's folder: a
    killed vLLM leaves sockets and files, which go with it."""
    if len(str(folder)) > _LONGEST:
        return {}
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.geteuid()}"
    return {
        "TMPDIR": str(folder),
        # Worth more than one agent's life.
        "TORCHINDUCTOR_CACHE_DIR": environment.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }


def _delete(folder: Path) -> None:
    """The lock last: without it nobody would know the rest for a dead agent's."""
    with suppress(OSError):
        for each in folder.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != _LOCK:
                each.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_mine(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether it is of this user, and neither a link nor of another kind."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return kind(found.st_mode) and found.st_uid == os.geteuid()
