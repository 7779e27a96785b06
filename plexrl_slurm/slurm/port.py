"""What the rest of PlexRL needs of Slurm, and the words for it.

Adapters: ``local`` (this machine, no Slurm), ``commands`` (Slurm's own programs) and
``pyslurm``. Everything foreign is translated in the adapter: what leaves it is a value of this
module, ``SlurmUnavailable`` (nobody answered; nothing is known) or ``SlurmRejected`` (Slurm said
no, in its own words). No answer is never an end.

A job's id is Slurm's raw number; of an array task it is ``N_k`` (array's number, task's index),
pending or not; of a heterogeneous job it is the leader's number, and components have their own.
"""

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
    #: Its processes are being ended; it still has its nodes.
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    #: FAILED, and every other bad end: NODE_FAIL, OUT_OF_MEMORY, BOOT_FAIL, DEADLINE, PREEMPTED,
    #: REVOKED; the word itself is in :attr:`JobStatus.word`.
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    #: A word this version does not know, or no answer; never treated as an end.
    UNSURE = "UNSURE"


#: States that a job never leaves (unless somebody requeues it).
ENDED = frozenset(
    {SlurmState.COMPLETED, SlurmState.FAILED, SlurmState.CANCELLED, SlurmState.TIMEOUT}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What Slurm says of one job, or of one component of a heterogeneous job."""

    state: SlurmState
    #: Exit code of the batch script; 128 + n if signal n ended it.
    exit_code: int | None = None
    #: Slurm's Reason.
    reason: str = ""
    #: Whose job it is; ``None`` where the adapter cannot tell.
    uid: int | None = field(default=None, compare=False)
    #: Slurm's own word for the state, such as ``NODE_FAIL``.
    word: str = field(default="", compare=False)
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    comment: str = ""
    #: Only an administrator or ``job_submit.lua`` can write it.
    admin_comment: str = ""
    #: Of a job that waits: what of its dependency has not come true, as far as Slurm has looked.
    dependency: str = field(default="", compare=False)
    #: Of a job that waits: when it is to begin; ``None``: as soon as it can.
    eligible_us: int | None = field(default=None, compare=False)
    #: Its time limit; ``None``: not known, or none.
    limit_us: int | None = field(default=None, compare=False)
    #: ``JobHeldUser`` or ``JobHeldAdmin``: it waits for a release.
    held: bool = False
    #: Nodes that it has (of this component), in Slurm's order.
    nodes: tuple[str, ...] = ()
    #: Where its batch script runs; "" if it does not run.
    batch_node: str = ""
    #: GPUs it has, or asks for, on all its nodes.
    gpus: int = 0
    submit_us: int | None = None
    start_us: int | None = None
    #: When its time limit ends it, or when it ended; ``None``: not known, or no limit.
    end_us: int | None = None
    #: How often Slurm has requeued it.
    restarts: int = 0
    #: Of a heterogeneous job: raw id of each component, in order of their offsets, itself first.
    components: tuple[SlurmId, ...] = ()
    #: Of a component that is not the leader: the leader's id.
    leader: SlurmId | None = field(default=None, compare=False)
    #: Of an array task: the array's id and the task's index.
    array_id: SlurmId | None = None
    array_task: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What Slurm says of one node."""

    #: Slurm's base state, upper case, without flags: ``IDLE``, ``MIXED``, ``DOWN``, ...
    state: str
    #: DOWN, DRAIN, FAIL, or not responding: it gets no new work now.
    usable: bool
    reason: str = ""
    #: GPUs it has, and how many of them are allocated.
    gpus: int = 0
    gpus_used: int = 0
    #: ``""`` or the GPU type that its GRES names.
    gpu_type: str = ""
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    #: ``NodeAddr``: where other nodes reach it.
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """One incarnation of a job (or component) in Slurm's accounting, as sacct gives it."""

    id: SlurmId
    state: SlurmState
    word: str
    user: str
    account: str
    start_us: int | None
    end_us: int | None
    #: Whole seconds, as Slurm counts.
    elapsed_us: int
    #: ``gres/gpu`` of AllocTRES.
    gpus: int
    nodes: tuple[str, ...]
    exit_code: int | None
    comment: str
    admin_comment: str
    system_comment: str = ""


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
    #: More options for ``sbatch``, as they are given to it; the local adapter ignores them.
    options: tuple[str, ...] = ()


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

    def poll(self) -> Mapping[SlurmId, JobStatus]:
        """Every job that is known now, in one query; ended ones for a while too."""


class ClusterPort(SlurmPort, Protocol):
    """What only a real Slurm has."""

    def queued(self, job: SlurmId) -> Mapping[SlurmId, JobStatus]:
        """A job that was submitted just now, or every task of the array; empty: there is none.

        Quick, because a user waits for it; it says who, account, name, state, dependency and when
        it is to begin, and no more.
        """

    def hold(self, job: SlurmId) -> None:
        """Hold a pending job, as an operator: its owner cannot release it."""

    def set_time_limit(self, job: SlurmId, *, limit_us: int) -> None:
        """New absolute limit (from the start), of all components; rounded up to whole minutes."""

    def set_comment(self, job: SlurmId, text: str) -> None:
        """Replace the comment of a job."""

    def start_now(self, job: SlurmId) -> None:
        """Take away the delay that a requeued job waits for."""

    def nodes(self) -> Mapping[str, NodeStatus]:
        """All nodes, in one query."""

    def past(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, tuple[PastJob, ...]]:
        """Accounting records by raw id, one for each incarnation, oldest first (``sacct -D``).

        Components of a heterogeneous job have ids of their own. A job without a record is left
        out.
        """

    def annotate(self, job: SlurmId, text: str) -> None:
        """Write ``text`` where ``sacct`` shows it after the job's end (AdminComment)."""

    def configuration(self) -> Mapping[str, str]:
        """``scontrol show config``."""
