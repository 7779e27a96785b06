"""The Slurm port on one machine without Slurm: batch scripts as detached processes.

Every job is a folder; everything that is known of it is in files there, so that the CLI (which
submits, as the user) and the daemon (which releases, watches and cancels) need no link between
them, and neither's end or restart touches a running job. A job runs as the uid that submitted
it: if that is not the daemon's own, only root can release it.

A job's folder belongs to its user, who may put anything there. So nothing in it is believed
further than it can hurt that user: no link is followed, no file is read whole, and only a process
of the folder's owner is signalled.
"""

import contextlib
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plexrl_slurm.core.errors import SlurmRejected
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.port import ENDED, BatchJob, JobStatus, SlurmState

#: No file that the runner writes is longer.
_SHORT = 200
_ENDS = frozenset(map(str, ENDED))


class LocalSlurm:
    """Jobs under ``folder`` (one per partition)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def submit(self, job: BatchJob, *, hold: bool) -> SlurmId:
        """Write the job's folder; start it at once unless ``hold``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            self._folder.chmod(0o1777)
        number, folder = self._new_folder()
        script = folder / "script"
        script.write_text(job.script, encoding="utf-8")
        script.chmod(0o700)
        facts = {
            "name": job.name,
            "arguments": list(job.arguments),
            "workdir": str(job.workdir),
            "environment": dict(job.environment),
            "output": _fill(job.output, number, job.name),
            "error": None if job.error is None else _fill(job.error, number, job.name),
            "time_limit_us": job.time_limit_us,
        }
        _write(folder / "job.json", json.dumps(facts))
        if not hold:
            self.release(SlurmId(str(number)))
        return SlurmId(str(number))

    def release(self, job: SlurmId) -> None:
        """Start the job; another release does nothing, unless the first one was cut short."""
        folder = self._of(job)
        if os.path.lexists(folder / "cancelled") or os.path.lexists(folder / "runner"):
            return
        owner = folder.lstat()
        user: dict[str, Any] = {}
        if owner.st_uid != os.geteuid():
            if os.geteuid() != 0:
                raise SlurmRejected(
                    ("local release", job),
                    f"job {job} belongs to uid {owner.st_uid}; a daemon that is not root can "
                    f"only run its own user's jobs",
                )
            user = _as_user(owner.st_uid, owner.st_gid)
        try:
            _mark(folder / "released")
            process = subprocess.run(
                [sys.executable, "-m", "plexrl_slurm.slurm.local_runner", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                check=False,
                **user,
            )
        except OSError as error:
            raise SlurmRejected(
                ("local release", job),
                f"uid {owner.st_uid} cannot run {error.filename or folder} "
                f"({error.strerror}): let that user read and run it",
            ) from error
        # The runner forks and its parent half ends at once, so nothing is left to reap.
        if process.returncode != 0:
            raise SlurmRejected(
                ("local release", job),
                f"the runner of job {job} did not start (exit code {process.returncode}): "
                f"see whether uid {owner.st_uid} can import plexrl_slurm and write in {folder}",
            )

    def cancel(self, job: SlurmId) -> None:
        """TERM the job's processes, KILL what is left after a moment (the runner sees to that)."""
        folder = self._of(job)
        try:
            _mark(folder / "cancelled")
        except OSError as error:
            raise SlurmRejected(
                ("local cancel", job), f"{error.filename}: {error.strerror}"
            ) from error
        if (pid := self._runner(folder)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def states(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """Read off the folders."""
        return {job: self._state(self._folder / job) for job in jobs if self._exists(job)}

    def poll(self) -> Mapping[SlurmId, JobStatus]:
        """Every job folder there is."""
        try:
            names = sorted(path.name for path in self._folder.iterdir())
        except FileNotFoundError:
            return {}
        return self.states(SlurmId(name) for name in names)

    def _exists(self, job: SlurmId) -> bool:
        return job.isascii() and job.isdigit() and _is_folder(self._folder / job)

    def _of(self, job: SlurmId) -> Path:
        if not self._exists(job):
            raise SlurmRejected(("local", job), f"Invalid job id specified: {job}")
        return self._folder / job

    def _state(self, folder: Path) -> JobStatus:
        try:
            uid = folder.lstat().st_uid
            # In this order: a runner that is seen to be gone has written its exit before.
            begun = os.path.lexists(folder / "runner")
            alive = self._runner(folder) is not None
            ended = _short(folder / "exit")
            cancelled = os.path.lexists(folder / "cancelled")
            held = not os.path.lexists(folder / "released")
        except OSError as error:
            return JobStatus(state=SlurmState.UNSURE, reason=error.strerror or "")
        if ended is not None:
            word, _, code = ended.strip().partition(" ")
            if word in _ENDS and code.isascii() and code.isdigit():
                return JobStatus(state=SlurmState(word), exit_code=int(code), uid=uid)
            return JobStatus(state=SlurmState.FAILED, exit_code=137, reason="BadExit", uid=uid)
        if alive:
            return JobStatus(state=SlurmState.RUNNING, uid=uid)
        # A runner that was cancelled may be gone without a word: the disk was full.
        if begun and not cancelled:
            return JobStatus(state=SlurmState.FAILED, exit_code=137, reason="NodeFail", uid=uid)
        if cancelled:
            return JobStatus(state=SlurmState.CANCELLED, exit_code=0, uid=uid)
        reason = "JobHeldUser" if held else "None"
        return JobStatus(state=SlurmState.PENDING, reason=reason, uid=uid)

    def _runner(self, folder: Path) -> int | None:
        """Pid of the living runner."""
        try:
            pid, started = (_short(folder / "runner") or "").split()
            process = Path("/proc") / str(int(pid))
            fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
            owned = process.stat().st_uid == folder.lstat().st_uid
        except (OSError, ValueError):
            return None
        alive = fields[19] == started and fields[0] != "Z"
        return int(pid) if alive and owned else None

    def _new_folder(self) -> tuple[int, Path]:
        taken = [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]
        number = max(taken, default=0) + 1
        while True:
            folder = self._folder / str(number)
            try:
                folder.mkdir(mode=0o711)
            except FileExistsError:
                number += 1
            else:
                return number, folder


def _as_user(uid: int, gid: int) -> dict[str, Any]:
    """Nothing of root's stays with a user's process: neither groups nor environment."""
    try:
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        groups = [gid]
    keep = ("PATH", "LANG", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    return {"user": uid, "group": gid, "extra_groups": groups, "env": environment}


def _fill(pattern: str, number: int, name: str) -> str:
    return pattern.replace("%j", str(number)).replace("%x", name).replace("%%", "%")


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode) and os.path.lexists(path / "job.json")
    except OSError:
        return False


def _mark(path: Path) -> None:
    """Make an empty file, unless there is one."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def _short(path: Path) -> str | None:
    """The text of a small regular file; ``None`` if there is none."""
    try:
        end = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return ""
    try:
        return os.read(end, _SHORT).decode(errors="replace") if _is_file(end) else ""
    finally:
        os.close(end)


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)
