"""Processes of this machine, as /proc shows them: who they are, who began them, their end.

Only the standard library: the cluster also runs where nothing else is installed.
"""

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


class ClusterError(RuntimeError):
    """The private Slurm cluster did not do what it should."""


class CommandFailed(ClusterError):
    """A command ended badly or not in time; ``status`` is ``None`` if it was not in time."""

    def __init__(self, argv: Sequence[str], status: int | None, stdout: str, stderr: str) -> None:
        super().__init__(argv, status, stdout, stderr)
        self.argv, self.status, self.stdout, self.stderr = argv, status, stdout, stderr

    def __str__(self) -> str:
        how = "did not end in time" if self.status is None else f"exit status {self.status}"
        return f"{' '.join(self.argv)}: {how}\n{self.stdout}{self.stderr}"


@dataclass(frozen=True, slots=True)
class Process:
    """One process, not just its number: numbers are used again."""

    pid: int
    #: Clock ticks after boot, from /proc/PID/stat.
    started: int

    def alive(self) -> bool:
        found = look(self.pid)
        return found is not None and found[0] == self

    def send(self, what: signal.Signals) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, what)


def look(pid: int) -> tuple[Process, int] | None:
    """The process and its parent's number; ``None`` if it is gone or only waits to be reaped."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return Process(pid, int(fields[19])), int(fields[1])


def everybody() -> dict[int, tuple[Process, int]]:
    """All that live now: number, process, parent's number."""
    numbers = (int(path.name) for path in PROC.iterdir() if path.name.isdigit())
    return {pid: found for pid in numbers if (found := look(pid)) is not None}


def below(roots: Iterable[Process]) -> set[Process]:
    """The roots that live, and everything that descends from them."""
    table = everybody()
    children: dict[int, list[int]] = {}
    for pid, (_, parent) in table.items():
        children.setdefault(parent, []).append(pid)
    todo = [root.pid for root in roots if root.pid in table and table[root.pid][0] == root]
    found: set[Process] = set()
    while todo:
        pid = todo.pop()
        if table[pid][0] not in found:
            found.add(table[pid][0])
            todo += children.get(pid, ())
    return found


def with_environment(wanted: Mapping[str, str]) -> set[Process]:
    """Processes that were started with all of these variables; never this one."""
    needles = [f"{name}={value}".encode() for name, value in wanted.items()]
    found = set()
    for pid, (process, _) in everybody().items():
        try:
            variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if pid != os.getpid() and all(needle in variables for needle in needles):
            found.add(process)
    return found


def working_in(folder: Path, program: str) -> set[Process]:
    """Processes of a program (as /proc says it) whose working folder is ``folder``."""
    found = set()
    for pid, (process, _) in everybody().items():
        try:
            name = (PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace")
            if name.startswith(program):
                where = str((PROC / str(pid) / "cwd").readlink())
                if where.removesuffix(" (deleted)") == str(folder):
                    found.add(process)
        except OSError:
            continue
    return found


def wait_for(
    check: Callable[[], object], what: str | Callable[[], str], *, seconds: float = 30
) -> None:
    """Return as soon as ``check()`` is true; a complaint about ``what`` when the time is over."""
    end = time.monotonic() + seconds
    pause = 0.01
    while not check():
        if time.monotonic() > end:
            text = what if isinstance(what, str) else what()
            raise ClusterError(f"{text}: waited {seconds:g} s")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def describe(process: Process) -> str:
    """Number, state, what it waits for in the kernel, and the start of its command line."""
    folder = PROC / str(process.pid)
    try:
        state = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        waits = (folder / "wchan").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{process.pid} (gone)"
    return f"{process.pid} {state.rpartition(')')[2].split()[0]} in {waits}: {words[:120].strip()}"


def end(processes: Iterable[Process], *, patience: float) -> None:
    """TERM to all at once, KILL to those that live after ``patience`` seconds; wait for the end."""
    left = {process for process in processes if process.alive()}
    for process in left:
        process.send(signal.SIGTERM)
    with contextlib.suppress(ClusterError):
        wait_for(lambda: not any(one.alive() for one in left), "end", seconds=patience)
    kill(left)


def freeze(processes: Iterable[Process]) -> None:
    """STOP, parents before the children whose end they would notice."""
    for process in sorted(processes, key=_age):
        process.send(signal.SIGSTOP)


def kill(processes: Iterable[Process]) -> None:
    """KILL, and wait until they are gone.

    Children before their parents: the kernel lets a frozen process go on, with SIGHUP, when the
    last parent outside its group is gone.
    """
    left = set(processes)
    for process in sorted(left, key=_age, reverse=True):
        process.send(signal.SIGKILL)
    wait_for(lambda: not any(one.alive() for one in left), f"end of {left}", seconds=10)


def _age(process: Process) -> tuple[int, int]:
    """The kernel counts starts in hundredths of a second."""
    return process.started, process.pid


def identity(user: str) -> dict[str, int | list[int]]:
    """What ``subprocess`` needs to become ``user``; nothing if we are that user already."""
    entry = pwd.getpwnam(user)
    if entry.pw_uid == os.geteuid():
        return {}
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


def run(
    argv: Sequence[str],
    *,
    user: str,
    env: Mapping[str, str],
    cwd: Path,
    seconds: float,
    stdin: str = "",
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run to the end as ``user``; what is not done in time is killed with all of its group."""
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
        **identity(user),  # type: ignore[call-overload]  # user, group and extra_groups
    ) as child:
        try:
            out, err = child.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate(timeout=10)
            raise CommandFailed(argv, None, out, err) from None
    if check and child.returncode:
        raise CommandFailed(argv, child.returncode, out, err)
    return subprocess.CompletedProcess(argv, child.returncode, out, err)
