"""What every part of the service works with."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from plexrl_slurm import wire
from plexrl_slurm.api.service import Principal
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import Denied, NotFound
from plexrl_slurm.core.explain import Asker
from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import Call, FunctionKind, Pool
from plexrl_slurm.daemons.accounting import Accounting
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.entries import Entry
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.daemons.spool import Spool
from plexrl_slurm.daemons.state import LiveDeployment, LiveJob, LiveSession, Sampler, State
from plexrl_slurm.daemons.watch import SlurmWatch
from plexrl_slurm.daemons.writer import Writer
from plexrl_slurm.db import queue
from plexrl_slurm.db.store import Store
from plexrl_slurm.settings import Settings
from plexrl_slurm.slurm.port import SlurmPort

if TYPE_CHECKING:
    from plexrl_slurm.daemons.holds import HoldKeeper
    from plexrl_slurm.daemons.learning import HabitBook

T = TypeVar("T")


@dataclass(slots=True)
class Parts:
    """The daemon's organs; made once, by ``partitiond``."""

    settings: Settings
    epoch: int
    store: Store
    writer: Writer
    spool: Spool
    books: Accounting
    shell: Shell
    placer: Placer
    port: SlurmPort
    state: State
    #: What Slurm said last.
    watch: SlurmWatch
    #: Set when the link to the agents is up.
    hub: AgentHub | None = None
    #: The partition's holds; set when the link to the agents is up.
    holds: "HoldKeeper | None" = None
    #: What is known of jobs; set when the core exists.
    habits: "HabitBook | None" = None
    #: URL of the API, for controllers.
    url: str = ""
    #: Raised by ``plexrl partition down``.
    release: asyncio.Event = field(default_factory=asyncio.Event)
    #: Raised when a job was bound: intake looks at once.
    wake_intake: asyncio.Event = field(default_factory=asyncio.Event)


class ServiceBase:
    """Look-ups that check the owner, and calls that are accepted once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.settings, self.state, self.store = parts.settings, parts.state, parts.store
        self.writer, self.spool, self.books = parts.writer, parts.spool, parts.books
        self.shell, self.placer, self.port = parts.shell, parts.placer, parts.port
        self.models = parts.settings.models
        self._accepting: dict[str, asyncio.Task[Any]] = {}

    # -- look-ups ----------------------------------------------------------------------------
    def job_of(self, who: Principal) -> LiveJob:
        """The caller's job, which has to live."""
        if who.job is None:
            raise Denied("this route is for a job's controller: use its API key")
        job = self.state.jobs.get(who.job)
        if job is None or job.ended:
            raise NotFound("running job", self.state.number(who.job))
        return job

    def session_of(self, who: Principal, session_id: str) -> LiveSession:
        """An open session of the caller's job."""
        session = self.state.sessions.get(session_id)
        if session is None or session.job != who.job:
            raise NotFound("session", session_id)
        return session

    def deployment_of(self, who: Principal, model_id: str) -> LiveDeployment:
        """A training deployment of the caller's job."""
        deployment = self.state.deployments.get(DeploymentId(model_id))
        if deployment is None or deployment.job != who.job:
            raise NotFound("model", model_id)
        return deployment

    def sampler_of(self, who: Principal, sampler_id: str) -> Sampler:
        """A sampling session of the caller's job."""
        sampler = self.state.samplers.get(sampler_id)
        if sampler is None or sampler.job != who.job:
            raise NotFound("sampling session", sampler_id)
        return sampler

    def model_named(self, name: str | None) -> ModelSpec | None:
        """The catalogue entry; a ``:suffix`` of the name is ignored, as Tinker's clients do."""
        if name is None:
            return None
        return self.models.get(name) or self.models.get(name.partition(":")[0])

    def home_of(self, job: LiveJob, pool: Pool, model: ModelSpec) -> WpgId:
        """The job's WPG in ``pool``, chosen now if it has none. Raises ``BadInput`` and
        ``ModelTooLarge`` where there is no place."""
        known = job.homes.get(pool)
        home = self.placer.home(job, pool, model)
        if known is None:
            homes = {str(where): str(wpg) for where, wpg in job.homes.items()}
            self.writer.add(queue.set_homes, job.id, homes, lazy=True)
        return home

    def asker(self) -> Asker:
        """Whoever asks now, in whose words a job has Slurm's number."""
        return Asker(self.now_us(), self.state.number)

    # -- accepting ---------------------------------------------------------------------------
    async def once(self, key: str, accept: Callable[[], Awaitable[T]]) -> T:
        """Run ``accept`` once for ``key``, however many requests ask for it at the same time."""
        task = self._accepting.get(key)
        if task is None:
            task = asyncio.ensure_future(accept())
            self._accepting[key] = task
            task.add_done_callback(lambda _: self._accepting.pop(key, None))
        return await asyncio.shield(task)

    def failed_at_once(self, job: JobId, call_id: CallId, message: str) -> CallId:
        """A future that has failed already, for something no deployment stands behind."""
        call = Call(
            id=call_id,
            deployment=DeploymentId(""),
            job=job,
            kind=FunctionKind.CREATE,
            seq=0,
            doomed=True,
        )
        entry = Entry(call=call, forgotten=True)
        entry.resolve(wire.Failed(message, "user"))
        self.shell.entries[call_id] = entry
        return call_id

    @staticmethod
    def now_us() -> int:
        """The daemon's clock."""
        return now_us()


def file_name(name: str) -> str:
    """A Tinker id as part of a file name and of an id of ours."""
    return name.replace(":", ".").replace("/", "_")
