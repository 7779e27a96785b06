"""The port through Slurm's own programs, as the user who runs this process."""

import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm import invoke, parse, parse_records
from plexrl_slurm.slurm.port import BatchJob, JobStatus, NodeStatus, PastJob
from plexrl_slurm.slurm.queued import queued_format, queued_jobs

_FINISHED = re.compile(r"already (has )?(finished|completing)|has already finished", re.IGNORECASE)
_NO_ACCOUNTING = re.compile(
    r"accounting storage is disabled|supported accounting_storage plugin", re.IGNORECASE
)
#: Time that is left to ask after a job whose sbatch gave no answer.
_LOOK_S = 5.0
#: Most jobs in one question to sacct.
_BATCH = 1000


class CommandsSlurm:
    """Blocking; every program ends within ``timeout_s``. Safe to use from several threads."""

    def __init__(self, conf: Path | None = None, timeout_s: float = 20.0) -> None:
        self.conf, self._timeout_s = conf, timeout_s
        #: ``sinfo --json`` of later versions has no nodes in it.
        self._newer_nodes = False

    def submit(self, job: BatchJob, *, hold: bool) -> SlurmId:
        """``sbatch``. Its time limit is not the job's end: then Slurm is asked for the job.

        Nobody else has a script at that path, which is how it is known again.
        """
        folder = Path(tempfile.mkdtemp(prefix="plexrl-sbatch-"))
        try:
            script, variables = folder / "script", folder / "environment"
            script.write_text(job.script, encoding="utf-8")
            script.chmod(0o700)
            variables.touch(mode=0o600)
            # slurmstepd takes %x from there, and with --export-file sbatch does not set it.
            environment = {"SLURM_JOB_NAME": job.name} | dict(job.environment)
            variables.write_bytes(
                b"\0".join(f"{name}={value}".encode() for name, value in environment.items())
            )
            argv = [*_sbatch(job, hold=hold, variables=variables), str(script), *job.arguments]
            try:
                # sbatch gives its own variables to the job too, so it has hardly any.
                env = invoke.configured(self.conf)
                answer = invoke.checked(invoke.run(argv, env=env, timeout_s=self._timeout_s))
            except SlurmUnavailable as error:
                return self._queued_after_all(str(script), error)
            return _number(answer)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _queued_after_all(self, script: str, error: SlurmUnavailable) -> SlurmId:
        """sbatch got no answer; Slurm may have the job all the same."""
        try:
            answer = self._ask("squeue", "--json", "--all", "--states=all", timeout_s=_LOOK_S)
            found = parse.with_command(answer.out, script)
        except SlurmUnavailable:
            found = None
        if found is None:
            raise SlurmUnavailable(
                f"{error.sentence}; Slurm may have queued the job all the same: look with squeue "
                f"before you submit it again"
            ) from error
        return found

    def release(self, job: SlurmId) -> None:
        """``scontrol release``."""
        self._control("release", _checked_id(job), harmless=_FINISHED)

    def hold(self, job: SlurmId) -> None:
        """``scontrol hold``: an administrator's hold, if the caller is one."""
        self._control("hold", _checked_id(job))

    def cancel(self, job: SlurmId) -> None:
        """``scancel``; it says nothing of a job that Slurm does not know."""
        number = _checked_id(job)
        try:
            self._run("scancel", number)
        except SlurmRejected as error:
            if not re.search(r"already|invalid job id", error.stderr, re.IGNORECASE):
                raise

    def set_time_limit(self, job: SlurmId, *, limit_us: int) -> None:
        """Absolute; by the leader's number it is of all components."""
        self._control("update", f"JobId={_checked_id(job)}", f"TimeLimit={whole_minutes(limit_us)}")

    def set_comment(self, job: SlurmId, text: str) -> None:
        """``scontrol update Comment=``."""
        self._control("update", f"JobId={_checked_id(job)}", f"Comment={text}")

    def start_now(self, job: SlurmId) -> None:
        """A requeued job waits two minutes otherwise."""
        self._control("update", f"JobId={_checked_id(job)}", "StartTime=now")

    def queued(self, job: SlurmId) -> Mapping[SlurmId, JobStatus]:
        """``squeue --jobs``: a JSON answer takes ten times as long."""
        argv = ["squeue", "--noheader", "--array", "--all", "--states=all"]
        argv += [f"--jobs={_checked_id(job)}"]
        separator = secrets.token_hex(8)
        try:
            answer = self._ask(*argv, f"--Format={queued_format(separator)}")
        except SlurmRejected as error:
            if re.search(r"invalid job id", error.stderr, re.IGNORECASE):
                return {}
            raise
        return queued_jobs(answer.out, separator)

    def poll(self) -> Mapping[SlurmId, JobStatus]:
        """``squeue --json``: everything that slurmctld knows, in one question."""
        return parse.jobs(self._ask("squeue", "--json", "--all", "--states=all").out)

    def states(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """Asks accounting for those that slurmctld has forgotten.

        A job is left out only if both answered and neither knows it.
        """
        wanted = list(dict.fromkeys(jobs))
        if not wanted:
            return {}
        return parse.with_forgotten(wanted, self.poll(), self.ended)

    def nodes(self) -> Mapping[str, NodeStatus]:
        """``sinfo --json``, or ``scontrol show nodes --json`` where that prints sums only."""
        if not self._newer_nodes:
            found = parse.nodes(self._ask("sinfo", "--json", "--all").out)
            if found is not None:
                return found
            self._newer_nodes = True
        found = parse.nodes(self._ask("scontrol", "show", "nodes", "--json").out, "scontrol")
        if found is None:
            raise SlurmUnavailable("`scontrol show nodes --json` printed no nodes: run it by hand")
        return found

    def past(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, tuple[PastJob, ...]]:
        """``sacct --duplicates``."""
        found: dict[SlurmId, tuple[PastJob, ...]] = {}
        wanted = [job for job in dict.fromkeys(jobs) if parse.ID.fullmatch(job)]
        for start in range(0, len(wanted), _BATCH):
            separator = secrets.token_hex(8)
            some = wanted[start : start + _BATCH]
            answer = self._sacct(some, separator, "--duplicates")
            found |= {} if answer is None else parse_records.past(answer.out, separator)
        return found

    def ended(self, jobs: list[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """Those of them that accounting knows; nothing where Slurm keeps no accounts."""
        found: dict[SlurmId, JobStatus] = {}
        for start in range(0, len(jobs), _BATCH):
            separator = secrets.token_hex(8)
            answer = self._sacct(jobs[start : start + _BATCH], separator)
            found |= {} if answer is None else parse_records.ended(answer.out, separator)
        return found

    def _sacct(self, jobs: list[SlurmId], separator: str, *options: str) -> invoke.Answer | None:
        """``None`` where Slurm keeps no accounts."""
        argv = ["sacct", "--parsable2", f"--delimiter={separator}", "--noheader", "--allocations"]
        argv += ["--allusers", f"--format={','.join(parse_records.FIELDS)}"]
        try:
            return self._run(*argv, *options, f"--jobs={','.join(jobs)}")
        except SlurmRejected as error:
            if _NO_ACCOUNTING.search(error.stderr):
                return None
            raise

    def annotate(self, job: SlurmId, text: str) -> None:
        """AdminComment of the accounting record, alive or ended; all components, all tasks.

        An Operator may write that. slurmctld's own AdminComment, which only an Administrator or
        job_submit.lua may write, replaces it at the job's end, so a job that has one is to be
        annotated after that. sacctmgr makes all letters small and quotes backticks. A job that
        was requeued has it in its last record.
        """
        argv = ["sacctmgr", "--immediate", "modify", "job", "where", f"jobid={_checked_id(job)}"]
        try:
            self._run(*argv, "set", f"AdminComment={text}")
        except SlurmRejected as error:
            if not _NO_ACCOUNTING.search(error.stderr):
                raise
            self._control("update", f"JobId={job}", f"AdminComment={text}")

    def configuration(self) -> Mapping[str, str]:
        """``scontrol show config``."""
        return parse.configuration(self._run("scontrol", "show", "config").out)

    def _control(self, *arguments: str, harmless: re.Pattern[str] | None = None) -> None:
        try:
            self._run("scontrol", *arguments)
        except SlurmRejected as error:
            if harmless is None or not harmless.search(error.stderr):
                raise

    def _run(self, *argv: str, timeout_s: float | None = None) -> invoke.Answer:
        env = invoke.environment(self.conf)
        limit = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        return invoke.checked(invoke.run(argv, env=env, timeout_s=limit))

    def _ask(self, *argv: str, timeout_s: float | None = None) -> invoke.Answer:
        """A question that may end with 0 and an empty answer when nobody answered it."""
        answer = self._run(*argv, timeout_s=timeout_s)
        if cause := invoke.cause_of(answer.err):
            raise SlurmUnavailable(f"{argv[0]} got no answer: {cause}")
        return answer


def _sbatch(job: BatchJob, *, hold: bool, variables: Path) -> list[str]:
    argv = [shutil.which("sbatch") or "sbatch", "--parsable", f"--job-name={job.name}"]
    argv += [f"--chdir={job.workdir}", f"--output={job.output}", f"--export-file={variables}"]
    if job.error is not None:
        argv.append(f"--error={job.error}")
    if job.time_limit_us is not None:
        argv.append(f"--time={whole_minutes(job.time_limit_us)}")
    return [*argv, *(("--hold",) if hold else ()), *job.options]


def whole_minutes(limit_us: int) -> int:
    """What Slurm counts; never 0, which is no limit."""
    return max(1, -(-limit_us // 60_000_000))


def _number(answer: invoke.Answer) -> SlurmId:
    """Of ``--parsable``'s ``number[;cluster]``; a plugin may print lines before it."""
    lines = answer.out.decode(errors="replace").split()
    number = lines[-1].partition(";")[0] if lines else ""
    if not number.isdecimal():
        raise SlurmUnavailable(
            f"sbatch printed no job number ({answer.out[:80]!r}): look with squeue whether the job "
            f"is there"
        )
    return SlurmId(number)


def _checked_id(job: SlurmId) -> SlurmId:
    """Nothing that could be an option or several jobs reaches a command line."""
    if not parse.ID.fullmatch(job):
        raise SlurmRejected(("slurm", job), f"Invalid job id specified: {job}")
    return job
