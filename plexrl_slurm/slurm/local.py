"""The Slurm port on one machine without Slurm: batch scripts as detached processes.

Every job is a folder; everything that is known of it is in files there, so that the CLI (which
submits, as the user) and the daemon (which releases, watches and cancels) need no link between
them, and neither's end or restart touches a running job. A job runs as the uid that submitted
it: if that is not the daemon's own, only root can release it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from plexrl_slurm.core.errors import SlurmRejected
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.port import BatchJob, JobStatus, SlurmState


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
        """Start the job; a second release does nothing."""
        folder = self._of(job)
        if (folder / "cancelled").exists():
            return
        try:
            (folder / "released").touch(exist_ok=False)
        except FileExistsError:
            return
        owner = folder.stat()
        user: dict[str, int] = {}
        if owner.st_uid != os.geteuid():
            if os.geteuid() != 0:
                (folder / "released").unlink()
                raise SlurmRejected(
                    ("local release", job),
                    f"job {job} belongs to uid {owner.st_uid}; a daemon that is not root can "
                    f"only run its own user's jobs",
                )
            user = {"user": owner.st_uid, "group": owner.st_gid}
        with (folder / "runner.log").open("ab") as log:
            if user:
                os.fchown(log.fileno(), owner.st_uid, owner.st_gid)
            process = subprocess.Popen(
                [sys.executable, "-m", "plexrl_slurm.slurm.local_runner", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                **user,  # type: ignore[call-overload]
            )
        # The runner forks and its parent half ends at once, so nothing is left to reap.
        process.wait()

    def cancel(self, job: SlurmId) -> None:
        """TERM the job's processes, KILL what is left after a moment (the runner sees to that)."""
        folder = self._of(job)
        (folder / "cancelled").touch()
        if (pid := self._runner(folder)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def states(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """Read off the folders."""
        return {job: self._state(self._folder / job) for job in jobs if self._exists(job)}

    def _exists(self, job: SlurmId) -> bool:
        return job.isdigit() and (self._folder / job / "job.json").exists()

    def _of(self, job: SlurmId) -> Path:
        if not self._exists(job):
            raise SlurmRejected(("local", job), f"Invalid job id specified: {job}")
        return self._folder / job

    def _state(self, folder: Path) -> JobStatus:
        if (folder / "exit").exists():
            word, _, code = (folder / "exit").read_text().partition(" ")
            return JobStatus(state=SlurmState(word), exit_code=int(code))
        if self._runner(folder) is not None:
            return JobStatus(state=SlurmState.RUNNING)
        if (folder / "exit").exists():  # it ended between the two looks
            return self._state(folder)
        if (folder / "runner").exists():
            return JobStatus(state=SlurmState.FAILED, exit_code=137, reason="NodeFail")
        if (folder / "cancelled").exists():
            return JobStatus(state=SlurmState.CANCELLED, exit_code=0)
        held = not (folder / "released").exists()
        return JobStatus(state=SlurmState.PENDING, reason="JobHeldUser" if held else "None")

    def _runner(self, folder: Path) -> int | None:
        """Pid of the living runner."""
        try:
            pid, started = (folder / "runner").read_text().split()
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (OSError, ValueError):
            return None
        fields = stat.rsplit(")", 1)[1].split()
        alive = fields[19] == started and fields[0] != "Z"
        return int(pid) if alive else None

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


def _fill(pattern: str, number: int, name: str) -> str:
    return pattern.replace("%j", str(number)).replace("%x", name).replace("%%", "%")


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(text, encoding="utf-8")
    part.rename(path)
