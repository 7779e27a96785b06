"""The port through pyslurm (API of 25.11), in a child process that may be killed.

What pyslurm cannot do goes through Slurm's programs: submission (real sbatch reads the script's
head, and there is no heterogeneous submission), whatever names one array task (its calls take
raw numbers only), every incarnation of a past job, and notes in accounting.
pyslurm takes 128 off exit codes from 128 on.
"""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm import invoke, parse
from plexrl_slurm.slurm.commands import CommandsSlurm, whole_minutes
from plexrl_slurm.slurm.port import BatchJob, JobStatus, NodeStatus, PastJob

_OPTIONS = re.compile(r"(SLURM|SBATCH|SQUEUE|SACCT|SINFO|SCANCEL|PYSLURM)_")


class PyslurmSlurm:
    """As :class:`CommandsSlurm`, which it is given; ``module`` is what the child imports."""

    def __init__(
        self, commands: CommandsSlurm, timeout_s: float = 20.0, *, module: str = "pyslurm"
    ) -> None:
        self._commands = commands
        self._child = Child(module, child_environment(commands), timeout_s)

    def close(self) -> None:
        """End the child; the next call starts another."""
        self._child.close()

    def version(self) -> str:
        """pyslurm's; raises ``SlurmUnavailable`` if it cannot be used here."""
        return str(self._child.ask("version"))

    def submit(self, job: BatchJob, *, hold: bool) -> SlurmId:
        """``sbatch``."""
        return self._commands.submit(job, hold=hold)

    def queued(self, job: SlurmId) -> Mapping[SlurmId, JobStatus]:
        """``squeue``: it needs no child."""
        return self._commands.queued(job)

    def release(self, job: SlurmId) -> None:
        """``Job.release``."""
        if not job.isdecimal():
            self._commands.release(job)
            return
        try:
            self._child.ask("release", job=int(job))
        except SlurmRejected as error:
            if not re.search(r"already (has )?finish", error.stderr, re.IGNORECASE):
                raise

    def hold(self, job: SlurmId) -> None:
        """``Job.hold``, in its administrator's mode."""
        if job.isdecimal():
            self._child.ask("hold", job=int(job))
        else:
            self._commands.hold(job)

    def cancel(self, job: SlurmId) -> None:
        """``Job.cancel``, which is content with a job that has ended."""
        if job.isdecimal():
            self._child.ask("cancel", job=int(job))
        else:
            self._commands.cancel(job)

    def set_time_limit(self, job: SlurmId, *, limit_us: int) -> None:
        """``Job.modify``."""
        if job.isdecimal():
            self._child.ask("time_limit", job=int(job), minutes=whole_minutes(limit_us))
        else:
            self._commands.set_time_limit(job, limit_us=limit_us)

    def set_comment(self, job: SlurmId, text: str) -> None:
        """``Job.modify``."""
        if job.isdecimal():
            self._child.ask("comment", job=int(job), text=text)
        else:
            self._commands.set_comment(job, text)

    def start_now(self, job: SlurmId) -> None:
        """``Job.modify``."""
        if job.isdecimal():
            self._child.ask("start_now", job=int(job))
        else:
            self._commands.start_now(job)

    def poll(self) -> Mapping[SlurmId, JobStatus]:
        """``Jobs.load``."""
        return parse.jobs(_document(self._child.ask("jobs")), "pyslurm")

    def states(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """Asks ``db.Jobs`` for those that slurmctld has forgotten."""
        wanted = list(dict.fromkeys(jobs))
        if not wanted:
            return {}
        return parse.with_forgotten(wanted, self.poll(), self._ended)

    def _ended(self, jobs: list[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        numbers = sorted({int(job.partition("_")[0]) for job in jobs})
        try:
            records = self._child.ask("ended", jobs=numbers)
        except SlurmRejected:
            # Where Slurm keeps no accounts pyslurm just fails; sacct says so.
            return self._commands.ended(jobs)
        found = parse.jobs(_document(records), "pyslurm")
        return {job: parse.forgotten(status) for job, status in found.items()}

    def nodes(self) -> Mapping[str, NodeStatus]:
        """``Nodes.load``."""
        found = parse.nodes(_document(self._child.ask("nodes")), "pyslurm")
        return found or {}

    def past(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, tuple[PastJob, ...]]:
        """``sacct``: pyslurm keeps one record of each number."""
        return self._commands.past(jobs)

    def annotate(self, job: SlurmId, text: str) -> None:
        """``sacctmgr``."""
        self._commands.annotate(job, text)

    def configuration(self) -> Mapping[str, str]:
        """``scontrol show config``: pyslurm has names of its own for it."""
        return self._commands.configuration()


def _document(value: Any) -> bytes:
    return json.dumps(value).encode()


def child_environment(commands: CommandsSlurm) -> dict[str, str]:
    """Ours, with nothing that would change what Slurm's library does."""
    kept = {name: value for name, value in os.environ.items() if not _OPTIONS.match(name)}
    # Long task lists are cut without it.
    return kept | {"SLURM_BITSTR_LEN": "0"} | invoke.configured(commands.conf)


class Child:
    """One child process, started when it is needed, killed when it does not answer in time."""

    def __init__(self, module: str, env: dict[str, str], timeout_s: float) -> None:
        self._argv = [sys.executable, "-m", "plexrl_slurm.slurm.pyslurm_child", module]
        self._env, self._timeout_s = env, timeout_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def ask(self, verb: str, **more: Any) -> Any:
        """The value that the child answers, within the time limit, queueing included."""
        deadline = time.monotonic() + self._timeout_s
        if not self._turn.acquire(timeout=self._timeout_s):
            raise SlurmUnavailable(self._late(verb))
        try:
            line = self._exchange({"do": verb} | more, deadline, verb)
        finally:
            self._turn.release()
        reply = json.loads(line)
        words = reply.get("error")
        if words is None:
            return reply["value"]
        if cause := invoke.cause_of(words):
            raise SlurmUnavailable(f"pyslurm got no answer: {cause}")
        raise SlurmRejected(("pyslurm", verb, str(more.get("job", ""))), words)

    def close(self) -> None:
        """Kill it."""
        with self._turn:
            self._kill()

    def _exchange(self, question: Mapping[str, Any], deadline: float, verb: str) -> bytes:
        try:
            process = self._alive()
            assert process.stdin is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            return self._line(process, deadline, verb)
        except OSError:
            raise SlurmUnavailable(self._gone()) from None
        except BaseException:
            self._kill()
            raise

    def _line(self, process: subprocess.Popen[bytes], deadline: float, verb: str) -> bytes:
        assert process.stdout is not None
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise SlurmUnavailable(self._late(verb))
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                raise SlurmUnavailable(self._gone())
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._env,
                start_new_session=True,
            )
        return self._process

    def _kill(self) -> None:
        process, self._process, self._rest = self._process, None, b""
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(BrokenPipeError), process:
                pass

    def _late(self, verb: str) -> str:
        return f"pyslurm's `{verb}` took more than {self._timeout_s:g} s: slurmctld does not answer"

    def _gone(self) -> str:
        process = self._process
        code = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1)
        self._kill()
        return (
            f"pyslurm's process ended by itself (exit code {code}): see that pyslurm can be "
            f'imported and that it finds slurm.conf (`python -c "import pyslurm"`)'
        )
