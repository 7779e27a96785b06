"""A folder for the temporary files of each run, and what a run leaves behind.

Processes that tests kill cannot clean up. What they leave is removed when the run ends, and told.
"""

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

#: Of a run that is under way: its folder.
RUN = "PLEXRL_TESTS_TEMPORARY"
SHARED_MEMORY = Path("/dev/shm")
#: Libraries keep what they compile here, for later processes of the run.
_KEPT = "torchinductor_"
#: What ends processes that serve the whole run.
AT_END: list[Callable[[], None]] = []


def begin() -> Path | None:
    """Have this process and those it starts use a folder of the run's; none if one is under way."""
    if RUN in os.environ:
        return None
    top = Path(tempfile.gettempdir())
    # Short: a socket's path may have 107 characters. Other users' processes are tested, too.
    folder = top / f"plx{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o1777)
    # Where pytest keeps what failed tests left in their tmp_path.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(top))
    os.environ[RUN] = os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    return folder


def top() -> Path:
    """Where folders may lie that another run should find."""
    return Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()))


def end(folder: Path, *, patience_s: float = 3.0) -> list[str]:
    """Remove what the run left, and say what that was."""
    for close in AT_END:
        close()
    deadline = time.monotonic() + patience_s
    while (left := dict(processes(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    told = [f"process {pid}: {what}" for pid, what in left.items()]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in SHARED_MEMORY.glob("plexrl-test-*"):
        if not Path("/proc", path.name.split("-")[2]).exists():
            told.append(str(path))
            shutil.rmtree(path, ignore_errors=True)
    names = Counter(_kind(path.name) for path in folder.iterdir())
    told += [f"{number} {kind} in the folder for temporary files" for kind, number in names.items()]
    shutil.rmtree(folder, ignore_errors=True)
    return [each for each in told if _KEPT not in each]


def processes(folder: Path) -> Iterator[tuple[int, str]]:
    """Those that still live of all that use the folder, but for this one."""
    mark = re.compile(rf"(?:^|\0)TMPDIR={re.escape(str(folder))}[/\0]".encode())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and mark.search((process / "environ").read_bytes()):
                words = (process / "cmdline").read_bytes().split(b"\0")
                said = b" ".join(words).decode(errors="replace").strip()
                if "resource_tracker" not in said:  # it ends with this process
                    yield int(process.name), said


def _kind(name: str) -> str:
    """``plexrl-agent-*`` of ``plexrl-agent-k3j2h1g0``."""
    if len(name) == 36 and name.count("-") == 4:
        return "of the name of a UUID"
    return re.sub(r"[^-_]{8,}$", "*", name)
