"""State of one WPG and of what may be resident on it. Plain records; ``books`` keeps them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.ledger import DOWN, IDLE, Meter, Use
from plexrl_slurm.core.messages import (
    Activity,
    Call,
    Charge,
    Deployment,
    FunctionKind,
    Pool,
    SaveImage,
    Switch,
    Wpg,
)
from plexrl_slurm.core.ordering import Entry, Program
from plexrl_slurm.core.phase import Phase
from plexrl_slurm.core.policy import Candidate
from plexrl_slurm.core.residency import Residency, Whereabouts

if TYPE_CHECKING:
    from plexrl_slurm.core.shared import Group

#: What a switch costs whoever it is for: bytes that leave first, the rate, and to get the GPUs.
Fare: TypeAlias = tuple[int, int, int]
#: Moves in a row that find a tier full; then what is resident, and cannot be saved, makes room: its
#: calls rebuild it.
ROOM_WAITS: Final = 12


@dataclass(slots=True, eq=False, kw_only=True)
class Tenant:
    """What can be resident: one training deployment, or all sampled ones of equal content."""

    key: str
    members: dict[DeploymentId, Deployment] = field(default_factory=dict)
    #: Bytes that one way of a switch moves.
    image_bytes: int = 0
    #: Order of calls of a training deployment; ``None`` for a sampled one.
    program: Program | None
    #: Waiting samples, oldest first.
    samples: dict[CallId, Entry] = field(default_factory=dict)
    where: Whereabouts
    #: Since when the head of the program waits.
    ready_us: int | None = None
    #: Turn at which it last ran.
    turn: int = 0
    #: The job that last used it.
    last_job: JobId
    #: Switches towards it that failed in a row.
    failures: int = 0
    #: Its deployments were dropped; it goes when nothing of it runs.
    gone: bool = False
    #: Its image is being copied to the durable tier.
    copying: bool = False
    #: Copies, and saves of a drain, that failed in a row; the next is tried at this instant.
    refusals: int = 0
    retry_us: int = 0
    #: How often its home has changed.
    moves: int = 0
    #: What it was last weighed as while it was away and waited; ``None`` if it has changed since,
    #: which ``Books.settle`` and ``Books.begin`` see to.
    weighed: Candidate | None = None
    #: What had been learned of its job by then, and what a switch to it was reckoned from.
    version: int | None = None
    fare: Fare = (0, 0, 0)

    @property
    def name(self) -> DeploymentId:
        """A deployment that stands for it in instructions."""
        return next(iter(self.members))

    @property
    def dirty(self) -> bool:
        """Whether its device state is in no image."""
        return self.program is not None and self.program.dirty and not self.program.broken

    def head(self) -> Entry | None:
        """The call that has waited longest."""
        if self.program is not None:
            return self.program.head() if self.ready_us is not None else None
        for entry in self.samples.values():
            return entry
        return None

    def queue_length(self) -> int:
        """Calls without an answer that do not run."""
        if self.program is None:
            return len(self.samples)
        return sum(not entry.answered for entry in self.program.calls.values())

    def step(self, to: Residency, cause: CauseId) -> None:
        self.where = self.where.step(to, cause=cause)

    def lose(self, cause: CauseId) -> None:
        """Its device state is gone."""
        if self.program is not None:
            self.program.rewind()
        has_image = self.program is None or self.program.image is not None
        to = Residency.HOST if has_image else Residency.ABSENT
        if self.where.at is not to:
            self.step(to, cause)


@dataclass(slots=True, eq=False, kw_only=True)
class Running:
    """A part of a call that a WPG works on."""

    call: CallId
    part: int
    start_us: int
    #: ``None`` while the call behind it has not been heard of (after a restart).
    entry: Entry | None = None
    tenant: Tenant | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Move:
    """A switch or a save that has not ended."""

    order: Switch | SaveImage
    start_us: int
    #: Whose call, or whose image, it is for.
    payer: JobId
    outgoing: Tenant | None
    incoming: Tenant | None


@dataclass(slots=True, eq=False, kw_only=True)
class Lane:
    """One WPG."""

    id: WpgId
    #: ``None`` unless it is held.
    wpg: Wpg | None = None
    #: With whom it takes turns on its GPUs; ``None``: it has them for itself.
    group: "Group | None" = None
    meter: Meter | None = None
    up: bool = False
    #: Why it is down.
    reason: str = "its ranks start"
    #: The latest instant that it has heard of; never goes back.
    now_us: int = 0
    tenants: dict[str, Tenant] = field(default_factory=dict)
    #: Those with a call that could run.
    waiting: dict[str, Tenant] = field(default_factory=dict)
    #: Sampling phases; a training tenant has one of its own.
    phases: dict[tuple[str, JobId], Phase] = field(default_factory=dict)
    resident: Tenant | None = None
    #: Whose tail runs on in the second engine slot; nothing of it is admitted there any more.
    beside: Tenant | None = None
    move: Move | None = None
    running: dict[CallId, Running] = field(default_factory=dict)
    #: Jobs of the running calls, and how many each has.
    jobs: dict[JobId, int] = field(default_factory=dict)
    #: Ends of runs whose call has not been heard of: ``(part, ok)``.
    early: dict[CallId, tuple[int, bool]] = field(default_factory=dict)
    #: For whom room was made: it runs next, whatever the index says.
    owed: Tenant | None = None
    #: Samples of the resident are no longer admitted: somebody else is to follow.
    leaving: bool = False
    #: A :class:`Pause` was said for what runs.
    pausing: bool = False
    #: The most calls of the resident that ran at once since none did.
    most: int = 0
    #: When to look at its tail again.
    tail_us: int | None = None
    fare: Fare = (0, 0, 0)
    #: Who was last said to be expected next.
    expected: DeploymentId | None = None
    #: Until when the WPG is kept for the resident while others wait.
    kept_until_us: int | None = None
    #: A tier had no room for a move: the next is tried at this instant; why, how often in a row.
    room_us: int | None = None
    room_reason: str = ""
    room_waits: int = 0
    #: Tenants of which nobody has looked whether a durable copy is due.
    copies: dict[str, Tenant] = field(default_factory=dict)
    #: It is to be given back: nothing new begins.
    draining: bool = False
    #: Why some jobs leave it, while it is drained for that and not given back.
    relief: str = ""
    #: ``Drained`` was said.
    drained: bool = False
    #: Why it is held no more; "" if it is, or never was.
    gone: str = ""

    def clamp(self, at_us: int) -> int:
        """The instant to book an event at: time never goes back."""
        if at_us > self.now_us:
            self.now_us = at_us
        return self.now_us

    def phase(self, tenant: Tenant, job: JobId) -> Phase:
        """The phase that a call of ``job`` on ``tenant`` belongs to."""
        key = (tenant.key if tenant.program is not None else "", job)
        phase = self.phases.get(key)
        if phase is None:
            pool = Pool.ROLLOUT if tenant.program is None else Pool.TRAIN
            phase = self.phases[key] = Phase(job=job, pool=pool)
        return phase

    def forget_phases(self) -> None:
        """Drop the phases of jobs that have no deployment here any more."""
        jobs = {member.job for t in self.tenants.values() for member in t.members.values()}
        keys = {("", job) for job in jobs}
        keys |= {(t.key, job) for t in self.tenants.values() for job in jobs}
        for key in [key for key in self.phases if key not in keys]:
            if not self.phases[key].running:
                del self.phases[key]

    def refused(self, tenant: Tenant, retry_us: int) -> None:
        """A copy, or a save of a drain, has failed; it is tried again in a while."""
        tenant.refusals += 1
        tenant.retry_us = self.now_us + retry_us
        self.copies[tenant.key] = tenant

    def granted(self, tenant: Tenant) -> None:
        """There is something new to copy, or it was copied: see whether more is to do."""
        tenant.refusals = tenant.retry_us = 0
        self.copies[tenant.key] = tenant

    def alarm_us(self) -> int | None:
        """When it wants to be planned though nothing happens."""
        if not self.up or not (
            self.copies
            or self.room_us is not None
            or self.tail_us is not None
            or self.group is not None
        ):
            return self.kept_until_us
        times = (self.kept_until_us, self.room_us, self.tail_us)
        alarms = [at for at in times if at is not None]
        if self.group is not None and self.group.retry_us is not None:
            alarms.append(self.group.retry_us)
        return min([*alarms, *(tenant.retry_us for tenant in self.copies.values())], default=None)

    def no_room(self, reason: str, retry_us: int) -> bool:
        """A move found a tier full; whether that is to be waited out."""
        self.room_us, self.room_reason = self.now_us + retry_us, reason
        self.room_waits += 1
        return self.room_waits < ROOM_WAITS

    def working(self) -> Mapping[CallId, Running]:
        """What runs, without the tail beside it."""
        if self.beside is None:
            return self.running
        return {call: run for call, run in self.running.items() if run.tenant is not self.beside}

    def trains(self) -> bool:
        """Whether what runs is not sampling (or is unknown): it does not share the WPG."""
        for run in self.running.values():
            return run.entry is None or run.entry.call.kind is not FunctionKind.SAMPLE
        return False

    def calls(self) -> Iterator[Call]:
        """The running calls."""
        return (run.entry.call for run in self.running.values() if run.entry is not None)

    def use(self) -> Use:
        """What it does now, for the ledger; of shared GPUs, what they do."""
        if self.group is not None and self.group.leader is self:
            return self.group.use()
        return self.own_use()

    def charged(self) -> Iterator[Call]:
        """The calls that bear a share of what the ledger says."""
        if self.group is not None and self.group.leader is self:
            return self.group.calls()
        return self.calls()

    def own_use(self) -> Use:
        """What it does now."""
        if not self.up:
            return DOWN
        if self.move is not None and not self.running:  # beside a tail it costs nobody anything
            return Use(activity=Activity.SWITCH, jobs=frozenset((self.move.payer,)))
        if self.running:
            first, trains = next(iter(self.running.values())), self.trains()
            if (
                trains
                and self.meter is not None
                and (last := self.meter.use).began_us == first.start_us
                and last.call == first.call
                and last.jobs == self.jobs.keys()
            ):
                return last  # it still does what it did: the usual case
            jobs = frozenset(self.jobs)
            if not jobs and self.resident is not None:
                jobs = frozenset((self.resident.last_job,))
            if trains:
                return Use(
                    activity=Activity.BUSY, jobs=jobs, call=first.call, began_us=first.start_us
                )
            return Use(activity=Activity.BUSY, jobs=jobs)
        others = self.waiting or self.group is not None
        if self.kept_until_us is not None and self.resident is not None and others:
            return Use(activity=Activity.KEPT, jobs=frozenset((self.resident.last_job,)))
        return IDLE

    def account(self, cause: CauseId) -> list[Charge]:
        """Close the open stretch if the WPG now does something else."""
        if self.group is not None:
            return self.group.account(cause)
        if self.meter is None:
            return []
        use = self.use()
        if use is self.meter.use:
            return []
        return self.meter.turn(use, self.now_us, self.calls(), cause)
