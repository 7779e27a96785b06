"""What the rest of PlexRL needs of Slurm. Adapters: ``local`` (this machine, no Slurm)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from plexrl_slurm.core.ids import SlurmId


class SlurmState(StrEnum):
    """Slurm's words, as far as they matter here."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    #: A word this version does not know, or no answer; never treated as an end.
    UNSURE = "UNSURE"


#: States that a job never leaves.
ENDED = frozenset(
    {SlurmState.COMPLETED, SlurmState.FAILED, SlurmState.CANCELLED, SlurmState.TIMEOUT}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What Slurm says of one job."""

    state: SlurmState
    exit_code: int | None = None
    #: Slurm's Reason of a pending job.
    reason: str = ""
    #: Whose job it is; ``None`` where the adapter cannot tell.
    uid: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A batch script and what ``sbatch`` needs to know besides."""

    name: str
    script: str
    #: Arguments of the script.
    arguments: tuple[str, ...] = ()
    workdir: Path
    #: Whole environment of the script.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Patterns as ``sbatch`` takes them; ``%j`` is the job's number, ``%x`` its name.
    output: str = "slurm-%j.out"
    error: str | None = None
    #: Limit in microseconds; ``None``: none.
    time_limit_us: int | None = None


class SlurmPort(Protocol):
    """Submit, release, cancel, ask. Raises ``SlurmUnavailable`` and ``SlurmRejected``."""

    def submit(self, job: BatchJob, *, hold: bool) -> SlurmId:
        """Queue ``job`` as the calling user; with ``hold`` it waits for :meth:`release`."""

    def release(self, job: SlurmId) -> None:
        """Let a held job start; harmless if it has started."""

    def cancel(self, job: SlurmId) -> None:
        """End it, whatever it does; harmless if it has ended."""

    def states(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """One answer for many jobs; a job that nobody knows is left out."""
