"""What the daemon keeps in memory of live jobs. Only it writes the rows behind, so this is true."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, SlurmId, WpgId
from plexrl_slurm.core.limits import Held
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle

#: Why a job waits: for room, or for its turn.
Wait: TypeAlias = Obstacle | Held

_PAST: Final = 1000


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job that is claimed or runs."""

    id: JobId
    uid: int
    user: str
    name: str
    seed: int
    #: The scheduler's weight: its own priority times its QOS's weight.
    priority: int
    slurm_id: SlurmId
    #: Its controller runs now.
    running: bool
    #: It has run.
    started: bool = False
    #: Home WPGs, by pool; fixed at admission.
    homes: dict[Pool, WpgId] = field(default_factory=dict)
    #: ``(pool, image bytes)`` of what it said it would create.
    declared: list[tuple[Pool, int]] = field(default_factory=list)
    sessions: int = 0
    #: It is over; what is being accepted for it comes too late.
    ended: bool = False
    #: Its owner holds it in Slurm: only the owner releases it.
    user_held: bool = False
    #: Slurm was told that it may start; who holds it from then on means it.
    released: bool = False
    #: How often Slurm has requeued its controller, as far as is known here.
    restarts: int = 0
    #: It may have what the reservation keeps free.
    reserved: bool = False
    #: What it said it would use, and has used.
    models: tuple[str, ...] = ()
    #: How much slower than alone it may become; ``None``: what the partition promises.
    max_slowdown: float | None = None
    started_us: int | None = None
    #: Of its controller; and when Slurm says that it ends it.
    time_limit_us: int | None = None
    limit_end_us: int | None = None
    #: Why it cannot go on under the partition's present configuration.
    unfit: str = ""


@dataclass(slots=True, eq=False)
class LiveSession:
    """A Tinker session of a live job."""

    id: str
    job: JobId
    heartbeat_us: int
    finished: bool = False
    opened_us: int = 0


@dataclass(slots=True, eq=False)
class LiveDeployment:
    """A training deployment of a live job."""

    id: DeploymentId
    job: JobId
    session: str
    model: str
    rank: int
    wpg: WpgId
    user_metadata: Mapping[str, Any]
    last_used_us: int
    #: ``seq -> call`` of every accepted call: a repeat gets the first's id.
    calls: dict[int, CallId] = field(default_factory=dict)
    dropped: bool = False


@dataclass(slots=True, eq=False)
class LiveSnapshot:
    """A snapshot that somebody can sample from."""

    id: DeploymentId
    job: JobId
    model: str
    uri: str | None
    #: "" while it is only in the host tier.
    path: str
    wpg: WpgId
    content: str
    bytes: int
    deployment: DeploymentId | None
    ready: bool
    #: Open sampling sessions that pin it.
    samplers: set[str] = field(default_factory=set)
    #: Named ones stay though nobody samples.
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Sampler:
    """A sampling session."""

    id: str
    session: str
    job: JobId
    snapshot: DeploymentId
    #: Names the session in seeds: the same in every run of the same controller.
    seed_name: str
    last_used_us: int
    #: Calls that have not ended.
    waiting: int = 0
    #: ``seq -> call`` of every accepted call.
    calls: dict[int, CallId] = field(default_factory=dict)
    closed: bool = False


@dataclass(slots=True)
class State:
    """Everything, by id."""

    jobs: dict[JobId, LiveJob] = field(default_factory=dict)
    #: SHA-256 of the token, in hex.
    tokens: dict[str, JobId] = field(default_factory=dict)
    sessions: dict[str, LiveSession] = field(default_factory=dict)
    deployments: dict[DeploymentId, LiveDeployment] = field(default_factory=dict)
    snapshots: dict[DeploymentId, LiveSnapshot] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    draining: bool = False
    #: Of jobs that found no place when they were last looked at.
    obstacles: dict[JobId, tuple[Wait, ...]] = field(default_factory=dict)
    #: Since when the oldest job has waited that found no place; ``None``: nobody waits so.
    waiting_since_us: int | None = None
    #: Why nobody is let in or out now; "" if all is well.
    trouble: str = ""
    #: What the last jobs that ended were called.
    past: dict[JobId, str] = field(default_factory=dict)

    def number(self, job: JobId) -> str:
        """What its user calls a job."""
        live = self.jobs.get(job)
        return (live.slurm_id if live is not None else self.past.get(job)) or f"(row {job})"

    def remember(self, job: LiveJob) -> None:
        """It ends, and may still be spoken of."""
        self.past[job.id] = job.slurm_id
        if len(self.past) > _PAST:
            del self.past[next(iter(self.past))]
