"""Runs one batch script of the local adapter, detached, and writes down how it ended.

``python -m plexrl_slurm.slurm.local_runner FOLDER``; started by ``LocalSlurm.release`` with the
uid of the job's owner. Plays slurmstepd: working directory, output files, time limit, TERM then
KILL on cancel, exit code.
"""

import contextlib
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


def main(folder: Path) -> int:
    """Fork away, run the script, write ``exit``."""
    if os.fork():
        return 0
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    _write(folder / "runner", f"{os.getpid()} {fields[19]}\n")
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
    why = "CANCELLED" if (folder / "cancelled").exists() else ""

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
        signal.setitimer(signal.ITIMER_REAL, facts["time_limit_us"] / 1e6)
    if why:
        _kill(child.pid, signal.SIGTERM)
    code = child.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    _kill(child.pid, signal.SIGKILL)  # whatever the script left behind
    code = 128 - code if code < 0 else code
    return why or ("COMPLETED" if code == 0 else "FAILED"), code


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
