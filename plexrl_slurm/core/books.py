"""What the scheduler knows, and the verbs that keep it consistent.

Nothing is decided here (``planner`` does) and no event is read here (``facts`` does).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from plexrl_slurm.core.costs import Prefills, SwitchCosts
from plexrl_slurm.core.estimates import Estimates
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.lane import Lane, Running, Tenant
from plexrl_slurm.core.messages import AnyInstruction, Deployment, Finish, Forget, FunctionKind
from plexrl_slurm.core.ordering import Entry, Position
from plexrl_slurm.core.phase import Phase
from plexrl_slurm.core.residency import Residency

#: A call that runs again after a loss may lose its ranks so many times as often in a row.
_AGAIN: Final = 3


@dataclass(slots=True, eq=False, kw_only=True)
class Books:
    """All state of the core."""

    hold_us: int
    max_attempts: int
    costs: SwitchCosts
    #: Optimizer steps between two durable images; ``None``: a host image is enough.
    durable_every: int | None = None
    #: Calls are kept until the durable image before the newest has them.
    spare_images: bool = False
    estimates: Estimates = field(default_factory=Estimates)
    #: What it costs to go on with samples that were paused.
    prefills: Prefills = field(default_factory=Prefills)
    lanes: dict[WpgId, Lane] = field(default_factory=dict)
    #: Where each deployment lives.
    homes: dict[DeploymentId, tuple[Lane, Tenant]] = field(default_factory=dict)
    #: Calls that are not over: without an answer, or needed should a state be rebuilt.
    entries: dict[CallId, Entry] = field(default_factory=dict)
    #: Lanes that changed since the last plan.
    stale: dict[WpgId, Lane] = field(default_factory=dict)
    #: When lanes want to be planned though nothing happens.
    alarms_us: dict[WpgId, int] = field(default_factory=dict)
    #: No stretch becomes too long before this instant, if nothing is booked before ``beat_us``,
    #: the last one at which all were looked at.
    due_us: int = 0
    beat_us: int = 0
    #: Deployments of each job.
    placed: dict[JobId, int] = field(default_factory=dict)
    #: The newest sampling phase of each job, wherever it is.
    rollouts: dict[JobId, Phase] = field(default_factory=dict)
    #: Busy time of each job on each WPG.
    attained_us: dict[tuple[WpgId, JobId], int] = field(default_factory=dict)
    #: Counts runs, for the order of turns.
    turn: int = 0

    def lane(self, wpg: WpgId) -> Lane:
        """The lane of a WPG; a WPG may be somebody's home before it is held."""
        lane = self.lanes.get(wpg)
        if lane is None:
            lane = self.lanes[wpg] = Lane(id=wpg)
        return lane

    def touch(self, lane: Lane) -> None:
        """Something changed: the lane wants to be planned, and whoever waits for its GPUs."""
        self.stale[lane.id] = lane
        if lane.now_us < self.beat_us:
            self.due_us = 0
        if lane.group is not None:
            self.stale.update({other.id: other for other in lane.group.lanes})

    def tidy(self, lane: Lane) -> None:
        """Forget a lane that is nobody's home and not held."""
        if lane.wpg is None and not lane.tenants and self.lanes.get(lane.id) is lane:
            del self.lanes[lane.id]

    # -- calls ----------------------------------------------------------------------------

    def finish(
        self, entry: Entry, *, ok: bool, reason: str, cause: CauseId, out: list[AnyInstruction]
    ) -> None:
        """Answer a call, once."""
        if entry.answered:
            return
        entry.answered = True
        if entry.call.kind is FunctionKind.SAMPLE:
            self.entries.pop(entry.call.id, None)
        out.append(Finish(call=entry.call.id, ok=ok, reason=reason, cause=cause))

    def settle(self, lane: Lane, tenant: Tenant, cause: CauseId, out: list[AnyInstruction]) -> None:
        """Pass what needs no GPU, then see whether the head waits."""
        program, tenant.weighed = tenant.program, None
        if program is None or tenant.gone:
            return
        for entry in program.settle():
            complete = not entry.doom
            self.finish(entry, ok=complete, reason=entry.doom, cause=cause, out=out)
        for run in lane.running.values():
            if run.tenant is tenant:
                return
        head = program.head()
        if head is not None and tenant.ready_us is None:
            tenant.ready_us = lane.now_us
            phase = lane.phase(tenant, head.call.job)
            phase.wait(head.call.kind, lane.now_us, self.estimates, self.hold_us)
            lane.waiting[tenant.key] = tenant
        elif head is None and tenant.ready_us is not None:
            self.stop_waiting(lane, tenant)

    def stop_waiting(self, lane: Lane, tenant: Tenant) -> None:
        """The head of a program has gone without running."""
        tenant.ready_us = tenant.weighed = None
        lane.phase(tenant, tenant.last_job).give_up(1)
        lane.waiting.pop(tenant.key, None)

    def enqueue_sample(self, lane: Lane, tenant: Tenant, entry: Entry) -> None:
        """A sample waits."""
        tenant.samples[entry.call.id] = entry
        phase = self.rollouts[entry.call.job] = lane.phase(tenant, entry.call.job)
        phase.wait(entry.call.kind, entry.ready_us, self.estimates, self.hold_us, tenant.key)
        lane.waiting[tenant.key] = tenant

    def drop_sample(self, lane: Lane, tenant: Tenant, entry: Entry) -> None:
        """A waiting sample waits no more."""
        if tenant.samples.pop(entry.call.id, None) is not None:
            lane.phase(tenant, entry.call.job).give_up(1)
        if not tenant.samples:
            lane.waiting.pop(tenant.key, None)

    # -- runs -----------------------------------------------------------------------------

    def begin(self, lane: Lane, tenant: Tenant, run: Running, entry: Entry) -> None:
        """``run`` occupies the WPG from now on."""
        if tenant.program is None:
            # What an agent says it runs may not have been heard of as waiting.
            if tenant.samples.pop(entry.call.id, None) is None:
                lane.phase(tenant, entry.call.job).join(lane.now_us)
            if not tenant.samples:
                lane.waiting.pop(tenant.key, None)
            owner = entry.call.job
        else:
            owner = tenant.last_job
            if tenant.ready_us is None:
                lane.phase(tenant, owner).join(lane.now_us)
            tenant.ready_us = tenant.weighed = None
            lane.waiting.pop(tenant.key, None)
        lane.phase(tenant, owner).begin(lane.now_us, self.estimates)
        entry.begun[run.part] = entry.begun.get(run.part, 0) + 1
        run.entry, run.tenant = entry, tenant
        lane.running[run.call] = run
        lane.jobs[owner] = lane.jobs.get(owner, 0) + 1
        self.turn += 1
        tenant.turn, tenant.last_job = self.turn, owner
        if lane.owed is tenant:
            lane.owed = None

    def end(
        self,
        lane: Lane,
        run: Running,
        *,
        ok: bool,
        cause: CauseId,
        out: list[AnyInstruction],
        why: str = "",
    ) -> None:
        """``run``, taken off the lane, has ended; badly because of ``why``."""
        entry, tenant = run.entry, run.tenant
        if entry is None or tenant is None:
            return
        job, kind = entry.call.job, entry.call.kind
        lane.jobs[job] -= 1
        if not lane.jobs[job]:
            del lane.jobs[job]
        if ok:
            spent_us = lane.now_us - run.start_us + entry.spent_us
            self.estimates.saw_function(job, kind, spent_us)
            if kind is FunctionKind.SAMPLE:
                self.estimates.lengths.saw(job, spent_us)
        else:
            self.estimates.learned(job)
        had = self.attained_us.get((lane.id, job), 0)
        self.attained_us[lane.id, job] = had + lane.now_us - run.start_us
        phase = lane.phase(tenant, job)
        if tenant.program is None:
            phase.last_key = tenant.key
            phase.end(kind, lane.now_us, self.estimates, self.hold_us)
            entry.deaths = entry.spent_us = 0
            entry.part = run.part + 1
            if ok and entry.part < entry.call.parts and not entry.answered:
                entry.ready_us = lane.now_us
                self.enqueue_sample(lane, tenant, entry)
            else:
                self.finish(entry, ok=ok, reason="", cause=cause, out=out)
        else:
            again = tenant.program.replaying
            answer = tenant.program.ended(entry, run.part, ok=ok, why=why)
            phase.open_step = tenant.program.open_step
            phase.end(kind, lane.now_us, self.estimates, self.hold_us)
            if kind is FunctionKind.OPTIM_STEP and ok and not again:
                self.estimates.saw_step(job, lane.now_us)
            if answer and not tenant.gone:
                self.finish(entry, ok=ok, reason="", cause=cause, out=out)
            if kind is FunctionKind.CREATE and not ok:
                lane.resident = None
                tenant.lose(cause)
            elif tenant.where.at is Residency.CREATING:
                tenant.step(Residency.RESIDENT, cause)
        self.settle(lane, tenant, cause, out)
        self.bury(lane, tenant)

    # -- images and losses ----------------------------------------------------------------

    def saved(
        self, tenant: Tenant, progress: Position, cause: CauseId, out: list[AnyInstruction]
    ) -> None:
        """A complete image of ``tenant`` exists; calls below ``progress`` are over."""
        program, tenant.weighed = tenant.program, None
        if program is None or tenant.gone:
            return
        floor = program.floor
        self.forget(tenant, program.saved(progress), floor, cause, out)
        if self.durable_every is not None:
            self.homes[tenant.name][0].granted(tenant)

    def forget(
        self,
        tenant: Tenant,
        entries: Sequence[Entry],
        floor: Position,
        cause: CauseId,
        out: list[AnyInstruction],
    ) -> None:
        """``entries`` never run again; before, all from ``floor`` on could."""
        for entry in entries:
            self.entries.pop(entry.call.id, None)
        if tenant.program is not None and tenant.program.floor > floor:
            forget = Forget(deployment=tenant.name, progress=tenant.program.floor, cause=cause)
            out.append(forget)

    def lose(self, lane: Lane, cause: CauseId, out: list[AnyInstruction], *, blame: bool) -> None:
        """The WPG's memory is gone: states go back to their images, runs are put back."""
        runs, move = list(lane.running.values()), lane.move
        touched = [lane.resident, lane.beside, *(run.tenant for run in runs)]
        if move is not None:
            touched += [move.outgoing, move.incoming]
        tenants = {tenant.key: tenant for tenant in touched if tenant is not None}
        again = {key: t.program is not None and t.program.replaying for key, t in tenants.items()}
        lane.running, lane.jobs, lane.early = {}, {}, {}
        lane.resident = lane.beside = lane.move = lane.owed = lane.kept_until_us = None
        lane.leaving = lane.pausing = False
        lane.most, lane.tail_us = 0, None
        for tenant in tenants.values():
            tenant.lose(cause)
        back: list[tuple[Tenant, Entry]] = []
        for run in runs:
            entry, run_tenant = run.entry, run.tenant
            if entry is None or run_tenant is None:
                continue
            phase = lane.phase(run_tenant, entry.call.job)
            phase.lose(1, lane.now_us)
            entry.deaths += blame
            reason = f"its ranks died {entry.deaths} times while it ran"
            program = run_tenant.program
            # What runs again has run well before: it is likely not what kills them.
            tries = self.max_attempts * (_AGAIN if again[run_tenant.key] else 1)
            given_up = blame and entry.deaths >= tries
            if program is None:
                if given_up or entry.answered:
                    self.finish(entry, ok=False, reason=reason, cause=cause, out=out)
                else:
                    back.append((run_tenant, entry))
            elif given_up and again[run_tenant.key]:
                seq = entry.call.seq
                program.broken = (
                    f"its state cannot be rebuilt: its ranks died {entry.deaths} times "
                    f"while seq {seq} ran again"
                )
            elif given_up:
                program.fail(entry, run.part)
                self.finish(entry, ok=False, reason=reason, cause=cause, out=out)
        self._put_back(lane, back)
        for tenant in tenants.values():
            if tenant.program is not None:
                lane.phase(tenant, tenant.last_job).open_step = tenant.program.open_step
            self.settle(lane, tenant, cause, out)
            self.bury(lane, tenant)

    def _put_back(self, lane: Lane, lost: Sequence[tuple[Tenant, Entry]]) -> None:
        """Samples that were lost wait again, before those that came later."""
        for tenant in {t.key: t for t, _ in lost}.values():
            mine = {entry.call.id: entry for t, entry in lost if t is tenant}
            later, tenant.samples = tenant.samples, {}
            for entry in mine.values():
                entry.ready_us = lane.now_us
                self.enqueue_sample(lane, tenant, entry)
            tenant.samples.update(later)

    def break_off(
        self, lane: Lane, tenant: Tenant, reason: str, cause: CauseId, out: list[AnyInstruction]
    ) -> None:
        """Nothing that waits for ``tenant`` can run."""
        if tenant.program is not None:
            tenant.program.broken = reason
        for entry in list(tenant.samples.values()):
            self.drop_sample(lane, tenant, entry)
            self.finish(entry, ok=False, reason=reason, cause=cause, out=out)
        self.settle(lane, tenant, cause, out)

    # -- coming and going -----------------------------------------------------------------

    def bury(self, lane: Lane, tenant: Tenant) -> None:
        """Forget a dropped tenant once nothing of it runs or moves."""
        move = lane.move
        if (
            not tenant.gone
            or any(run.tenant is tenant for run in lane.running.values())
            or (move is not None and tenant in (move.outgoing, move.incoming))
        ):
            return
        if lane.resident is tenant:
            lane.resident = None
            lane.kept_until_us = None
        if lane.beside is tenant:
            lane.beside = None
        if lane.owed is tenant:
            lane.owed = None
        if lane.tenants.get(tenant.key) is tenant:
            del lane.tenants[tenant.key]

    def count(self, deployment: Deployment, change: int) -> None:
        """A deployment came (1) or went (-1); what is known of a job goes with its last one."""
        left = self.placed.get(deployment.job, 0) + change
        self.placed[deployment.job] = left
        if left <= 0:
            del self.placed[deployment.job]
            self.estimates.forget(deployment.job)
            self.rollouts.pop(deployment.job, None)
            for key in [key for key in self.attained_us if key[1] == deployment.job]:
                del self.attained_us[key]
