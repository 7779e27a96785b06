"""Decides what an idle WPG does next: run, switch, save an image, or wait a moment."""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl_slurm.core import beside, copies, shared
from plexrl_slurm.core.books import Books
from plexrl_slurm.core.expect import expected
from plexrl_slurm.core.ids import CauseId, JobId
from plexrl_slurm.core.lane import Lane, Move, Running, Tenant
from plexrl_slurm.core.messages import (
    AnyInstruction,
    Expect,
    Run,
    SaveImage,
    Switch,
)
from plexrl_slurm.core.ordering import Entry
from plexrl_slurm.core.pausing import as_waiter, find_tail, pause
from plexrl_slurm.core.policy import Choice, Policy
from plexrl_slurm.core.residency import Residency
from plexrl_slurm.core.scales import Scales
from plexrl_slurm.core.tails import TailRules, pays_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The decisions; what they read and change is in the books."""

    books: Books
    scales: Scales
    policy: Policy
    hysteresis: float
    image_every: int
    #: Say who is expected next.
    hints: bool = False
    #: ``None``: tails run to their end.
    tails: TailRules | None = None

    def plan(self, lane: Lane, cause: CauseId) -> list[AnyInstruction]:
        """What ``lane`` does from now on; nothing if it does it already."""
        out: list[AnyInstruction] = []
        lane.kept_until_us = lane.tail_us = None
        beside.leave(lane, cause)
        if lane.room_us is not None and lane.room_us <= lane.now_us:
            lane.room_us = None
        if lane.group is not None:
            lane.group.look(lane.now_us)
        if lane.up and lane.move is None:
            if lane.group is not None and not self._has_turn(lane, cause, out):
                pass
            elif lane.draining:
                self._drain(lane, cause, out)
                self._pass_on(lane, cause, out)
            elif lane.working():
                self._join(lane, cause, out)
            else:
                lane.leaving = lane.pausing = False
                lane.most = 0
                self._decide(lane, cause, out)
        if lane.up:
            if lane.copies:
                copies.copy(self.books, lane, cause, out)
            if lane.draining:
                copies.say_drained(lane, cause, out)
            if self.hints:
                self._hint(lane, cause, out)
        out[:0] = lane.account(cause)
        if lane.meter is not None:
            for run in lane.running.values():
                if run.entry is not None:
                    lane.meter.count(run.entry.call)
            if lane.group is not None:
                lane.group.count()
        return out

    def choose(self, lane: Lane) -> tuple[Choice, Tenant] | None:
        """Who is next, without doing anything about it."""
        candidates = self.scales.candidates(lane)
        if not candidates:
            return None
        choice = self.policy.choose(candidates, hysteresis=self.hysteresis)
        return choice, shared.find(lane, choice.winner.key)

    # -- decisions ------------------------------------------------------------------------

    def _decide(self, lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> None:
        if lane.owed is not None and lane.owed.key in lane.waiting:
            self._serve(lane, lane.owed, cause, out)
            return
        lane.owed = None
        if lane.room_us is not None:  # nobody else can come in now
            if lane.resident is not None and lane.resident.key in lane.waiting:
                self._serve(lane, lane.resident, cause, out)
            else:
                self._pass_on(lane, cause, out)
            return
        rivals = lane.group is not None and bool(shared.rivals(lane))
        if not lane.waiting and not rivals:
            self._save_if_due(lane, self.image_every, cause, out)
            return
        if lane.resident is not None and not rivals and self._alone_in_line(lane, lane.resident):
            self._serve(lane, lane.resident, cause, out)
            return
        chosen = self.choose(lane)
        if chosen is None:
            return
        choice, tenant = chosen
        if choice.winner.virtual:
            lane.kept_until_us = self.scales.held_until_us(lane)
            if lane.resident is not None:
                self.books.keepers[lane.resident.last_job] = lane
        elif rivals and lane.tenants.get(tenant.key) is not tenant:
            self._give_way(lane, tenant, cause, out)
        else:
            self._serve(lane, tenant, cause, out)

    def _join(self, lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> None:
        """Samples run: let new ones of the resident join, unless somebody else is to follow."""
        resident = lane.resident
        if resident is None or lane.trains():
            return
        alone = not lane.waiting or self._alone_in_line(lane, resident)
        if lane.group is not None and shared.rivals(lane):
            alone = False
        lane.leaving = lane.leaving and not alone
        lane.pausing = lane.pausing and not alone
        if not alone and not lane.pausing:
            self._look_at_tail(lane, resident, cause, out)
        if lane.leaving or lane.move is not None or not resident.samples:
            return
        if alone:
            self._admit(lane, resident, cause, out)
            return
        chosen = self.choose(lane)
        if chosen is not None and chosen[1] is not resident:
            lane.leaving = True
            return
        self._admit(lane, resident, cause, out)

    def _look_at_tail(
        self, lane: Lane, resident: Tenant, cause: CauseId, out: list[AnyInstruction]
    ) -> None:
        """If what runs is a tail that others had better not wait for, pause it, or let the first of
        them in beside it."""
        if self.tails is None or resident.gone:
            return
        if (tail := find_tail(self.books, lane, self.tails)) is not None:
            others = [t for t in lane.waiting.values() if t is not resident]
            if not others:  # who shares the GPUs waits for the whole of it
                return
            candidates = self.scales.weigh(lane, others)
            choice = self.policy.choose(candidates, hysteresis=self.hysteresis)
            if beside.may(lane, self.tails) and pays_beside(self.tails, tail, as_waiter(choice)):
                beside.begin(lane)
                self._make_room(lane, lane.tenants[choice.winner.key], cause, out)
            else:
                pause(lane, self.tails, tail, choice, cause, out)

    @staticmethod
    def _alone_in_line(lane: Lane, tenant: Tenant) -> bool:
        """Nobody else waits: the usual case, in which nothing is to be weighed."""
        return len(lane.waiting) == 1 and tenant.key in lane.waiting

    def _serve(self, lane: Lane, tenant: Tenant, cause: CauseId, out: list[AnyInstruction]) -> None:
        resident, program = lane.resident, tenant.program
        if tenant is not resident:
            self._make_room(lane, tenant, cause, out)
        elif program is None:
            self._admit(lane, tenant, cause, out)
        elif not self._save_if_due(lane, 2 * self.image_every, cause, out):
            upcoming = program.upcoming()
            if upcoming is not None:
                entry, part = upcoming
                self._run(lane, tenant, entry, part, program.replaying, cause, out)

    def _make_room(
        self, lane: Lane, tenant: Tenant, cause: CauseId, out: list[AnyInstruction]
    ) -> None:
        """Bring ``tenant`` in; one that is created has nothing to bring."""
        resident, program = lane.resident, tenant.program
        head = tenant.head()
        payer = tenant.last_job if head is None else head.call.job
        dirty = resident if resident is not None and resident.dirty else None
        if program is not None and _is_created_here(tenant):
            upcoming = program.upcoming()
            if upcoming is None:
                return
            if dirty is not None:
                lane.owed = tenant
                self._save(lane, dirty, payer, cause, out)
                return
            if resident is not None:
                resident.lose(cause)
            lane.resident = tenant
            tenant.step(Residency.CREATING, cause)
            self._run(lane, tenant, *upcoming, program.replaying, cause, out)
            return
        progress = (0, 0)
        if resident is not None:
            if dirty is not None and resident.program is not None:
                progress = resident.program.position
                resident.step(Residency.OFFLOADING, cause)
            else:
                resident.lose(cause)
        lane.resident = dirty
        lane.owed = tenant
        beside.loads(lane, tenant, cause)
        order = Switch(
            wpg=lane.id,
            outgoing=None if dirty is None else dirty.name,
            outgoing_progress=progress,
            incoming=tenant.name if head is None else head.call.deployment,
            beside=beside.whose(lane, tenant),
            cause=cause,
        )
        out.append(order)
        lane.move = Move(
            order=order, start_us=lane.now_us, payer=payer, outgoing=dirty, incoming=tenant
        )

    # -- GPUs that are shared -------------------------------------------------------------

    def _has_turn(self, lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> bool:
        """Whether ``lane`` is awake; if nobody is, and it should be, it will."""
        group = lane.group
        if group is None or group.turn is lane:
            return True
        if group.turn is None and group.grant is None and lane.waiting and group.allows(lane):
            chosen = self.choose(lane)
            if chosen is not None:
                self._give_way(lane, chosen[1], cause, out)
        return False

    def _pass_on(self, lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> None:
        """The best of those that wait for the GPUs of ``lane``, which has nothing to do there."""
        resident = lane.resident
        if lane.group is None or lane.running or lane.move is not None:
            return
        if resident is not None and resident.dirty:
            return
        if found := self.scales.rivals(lane):
            choice = self.policy.choose(tuple(found), hysteresis=self.hysteresis)
            self._give_way(lane, shared.find(lane, choice.winner.key), cause, out)

    def _give_way(
        self, lane: Lane, tenant: Tenant, cause: CauseId, out: list[AnyInstruction]
    ) -> None:
        """The GPUs go to ``tenant``, which lives on another WPG of the group, or on this one."""
        head, resident = tenant.head(), lane.resident
        payer = tenant.last_job if head is None else head.call.job
        if resident is not None and resident.dirty:
            lane.owed = tenant
            self._save(lane, resident, payer, cause, out)
        elif lane.group is not None:
            if resident is not None:
                resident.lose(cause)
            lane.resident = lane.owed = None
            out.append(shared.take(lane.group, tenant, payer, lane.now_us, cause))

    def _save_if_due(
        self, lane: Lane, every: int, cause: CauseId, out: list[AnyInstruction]
    ) -> bool:
        """Save the resident's image if ``every`` steps are in no image; at a step's end only."""
        resident = lane.resident
        if (
            resident is None
            or resident.program is None
            or not resident.dirty
            or resident.gone
            or resident.program.open_step
            or resident.program.steps < every
        ):
            return False
        self._save(lane, resident, resident.last_job, cause, out)
        return True

    def _save(
        self,
        lane: Lane,
        tenant: Tenant,
        payer: JobId,
        cause: CauseId,
        out: list[AnyInstruction],
    ) -> None:
        if tenant.program is None:
            return
        tenant.step(Residency.SAVING, cause)
        order = SaveImage(
            wpg=lane.id, deployment=tenant.name, progress=tenant.program.position, cause=cause
        )
        out.append(order)
        lane.move = Move(
            order=order, start_us=lane.now_us, payer=payer, outgoing=tenant, incoming=None
        )

    def _drain(self, lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> None:
        """Begin nothing; save what is in no image, though a step be open."""
        resident = lane.resident
        if (
            not lane.running
            and resident is not None
            and resident.dirty
            and not resident.gone
            and resident.retry_us <= lane.now_us
        ):
            self._save(lane, resident, resident.last_job, cause, out)

    def _hint(self, lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> None:
        name = expected(lane, self.books.estimates, lambda found: self._best(lane, found))
        if name != lane.expected:
            lane.expected = name
            out.append(Expect(wpg=lane.id, deployment=name, cause=cause))

    def _best(self, lane: Lane, tenants: Sequence[Tenant]) -> Tenant:
        choice = self.policy.choose(self.scales.weigh(lane, tenants), hysteresis=self.hysteresis)
        return lane.tenants[choice.winner.key]

    def _admit(self, lane: Lane, tenant: Tenant, cause: CauseId, out: list[AnyInstruction]) -> None:
        """All waiting samples run together; one more death would fail some: those run alone."""
        waiting = list(tenant.samples.values())
        last_chance = [e for e in waiting if 0 < self.books.max_attempts - 1 <= e.deaths]
        if last_chance or self._alone(lane):
            waiting = [] if lane.running else last_chance[:1]
        for entry in waiting:
            self._run(lane, tenant, entry, entry.part, False, cause, out)

    def _alone(self, lane: Lane) -> bool:
        return any(
            run.entry is not None and 0 < self.books.max_attempts - 1 <= run.entry.deaths
            for run in list(lane.running.values())[:1]
        )

    def _run(
        self,
        lane: Lane,
        tenant: Tenant,
        entry: Entry,
        part: int,
        replay: bool,
        cause: CauseId,
        out: list[AnyInstruction],
    ) -> None:
        call = entry.call
        run = Running(call=call.id, part=part, start_us=lane.now_us)
        self.books.begin(lane, tenant, run, entry)
        lane.most = max(lane.most, len(lane.working()))
        out.append(
            Run(
                wpg=lane.id,
                call=call.id,
                deployment=call.deployment,
                part=part,
                attempt=entry.begun[part],
                replay=replay,
                cause=cause,
            )
        )


def _is_created_here(tenant: Tenant) -> bool:
    """Whether it has no image, so that ``create`` makes it on the device."""
    return tenant.program is not None and tenant.program.image is None
