"""Runs one batch script of the local adapter, detached, and writes down how it ended.

``python -m plexrl_slurm.slurm.local_runner FOLDER``; started by ``LocalSlurm.release`` with the
uid of the job's owner. Plays slurmstepd: working directory, output files, time limit, TERM then
KILL on cancel, exit code.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

#: Between TERM and KILL of a cancelled job, as Slurm's KillWait.
KILL_WAIT_S = 10.0
#: Longer limits than the timer can hold are none.
LONGEST_S = 1e9
#: prctl: orphans of the script become the runner's children.
_SET_CHILD_SUBREAPER = 36


def main(folder: Path) -> int:
    """Fork away, run the script, write ``exit``. A second runner of a job does nothing."""
    log = os.open(folder / "runner.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.fork():
        return 0
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A cancel leaves its mark before it signals; `run` looks at the mark when it can act on it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    mine = folder / f"runner.{os.getpid()}"
    mine.write_text(f"{os.getpid()} {fields[19]}\n", encoding="utf-8")
    try:
        (folder / "runner").hardlink_to(mine)
    except FileExistsError:
        return 0
    finally:
        mine.unlink()
    facts = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    state, code = run(folder, facts)
    _write(folder / "exit", f"{state} {code}\n")
    return 0


def run(folder: Path, facts: dict[str, Any]) -> tuple[str, int]:
    """``(Slurm's state word, exit code)`` of the script."""
    number = folder.name
    environment = facts["environment"] | {
        "SLURM_JOB_ID": number,
        "SLURM_JOBID": number,
        "SLURM_JOB_NAME": facts["name"],
        "SLURM_SUBMIT_DIR": facts["workdir"],
    }
    workdir = Path(facts["workdir"])
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        output = (workdir / facts["output"]).open("wb", buffering=0)
        error = output if facts["error"] is None else (workdir / facts["error"]).open("wb")
        child = subprocess.Popen(
            [str(folder / "script"), *facts["arguments"]],
            cwd=workdir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            start_new_session=True,
        )
    except OSError as problem:
        sys.stderr.write(f"cannot start the script: {problem}\n")
        return "FAILED", 127
    why = ""

    def cancelled(_number: int, _frame: FrameType | None) -> None:
        nonlocal why
        why = why or "CANCELLED"
        _kill(child.pid, signal.SIGTERM)
        signal.signal(signal.SIGALRM, lambda *_: _kill(child.pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, KILL_WAIT_S)

    def timed_out(_number: int, frame: FrameType | None) -> None:
        nonlocal why
        why = "TIMEOUT"
        cancelled(_number, frame)

    signal.signal(signal.SIGTERM, cancelled)
    if facts["time_limit_us"] is not None:
        signal.signal(signal.SIGALRM, timed_out)
        signal.setitimer(signal.ITIMER_REAL, min(facts["time_limit_us"] / 1e6, LONGEST_S))
    if os.path.lexists(folder / "cancelled"):
        cancelled(signal.SIGTERM, None)
    code = child.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    _kill(child.pid, signal.SIGKILL)
    _reap()
    code = 128 - code if code < 0 else code
    return why or ("COMPLETED" if code == 0 else "FAILED"), code


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _reap() -> None:
    """End whatever the script left behind, in sessions of its own too."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
