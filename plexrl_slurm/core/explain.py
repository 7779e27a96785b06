"""What something does or waits for: typed reasons with a sentence each, and a view of a WPG."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.lane import Lane, Tenant
from plexrl_slurm.core.messages import Activity, FunctionKind, Pool, SaveImage
from plexrl_slurm.core.ordering import Entry
from plexrl_slurm.core.planner import Planner
from plexrl_slurm.core.policy import Rule


class ReasonKind(StrEnum):
    """What a reason is about, for programs."""

    RUNNING = "running"
    #: An earlier seq has not arrived; only the client can help.
    GAP = "gap"
    #: An earlier call of the same deployment comes first.
    EARLIER_CALL = "earlier_call"
    #: Calls run again, because the device was lost.
    REPLAY = "replay"
    NOT_HELD = "not_held"
    #: Its WPG is being given back.
    DRAINING = "draining"
    DOWN = "down"
    BUSY = "busy"
    SWITCHING = "switching"
    #: The WPG waits for the resident's next call.
    KEPT = "kept"
    #: A tier has no room for the image of what is resident.
    NO_ROOM = "no_room"
    #: It sleeps: another WPG has the GPUs that they share.
    SHARED = "shared"
    #: Another job is to go first.
    AHEAD = "ahead"
    #: New samples do not join: somebody else is to follow.
    LEAVING = "leaving"
    #: It is a tail's, which was paused for somebody else.
    PAUSED = "paused"
    #: It is next.
    NEXT = "next"
    #: A rollout that has no call now, and has paused like this before.
    TOOLS = "tools"
    #: It has nothing to do.
    IDLE = "idle"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One thing that something waits for."""

    kind: ReasonKind
    sentence: str
    wpg: WpgId | None = None
    #: The other job, if it is about one.
    job: JobId | None = None
    seq: int | None = None
    #: When it ends, where that is known.
    until_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All that there is to say about one thing."""

    subject: str
    reasons: tuple[Reason, ...]

    @property
    def sentence(self) -> str:
        """The reasons in one line."""
        return "; ".join(reason.sentence for reason in self.reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgView:
    """What one WPG does now."""

    wpg: WpgId
    pool: Pool
    gpus: int
    activity: Activity
    #: Who pays for it; several share by sampling.
    jobs: tuple[JobId, ...]
    #: The running training call, or ``None``.
    call: CallId | None
    #: What is in its device memory (one of several of equal content).
    resident: DeploymentId | None
    running: int
    #: Calls that wait, and the jobs they belong to.
    queue_length: int
    waiting_jobs: tuple[JobId, ...]
    since_us: int
    #: End of the anticipatory hold.
    kept_until_us: int | None
    #: Why it is down; "" if it is up.
    reason: str
    #: It is being given back.
    draining: bool = False
    #: WPGs on the same GPUs; it is awake while they sleep.
    shares_with: tuple[WpgId, ...] = ()
    asleep: bool = False
    #: The one of them that the GPUs are booked on; "" if it is this one.
    shares: WpgId | None = None
    #: Whose tail runs on in its second engine slot, and the jobs it is of.
    beside: DeploymentId | None = None
    beside_jobs: tuple[JobId, ...] = ()


@dataclass(frozen=True, slots=True)
class Asker:
    """When it is asked, and what people call a job."""

    #: 0: as of what the core heard last.
    now_us: int = 0
    name: Callable[[JobId], str] = str

    def until(self, lane: Lane, at_us: int) -> str:
        """``in 4.8 s``: the core hears nothing while time passes."""
        left_us = at_us - max(self.now_us, lane.now_us)
        return f"in {left_us / 1e6:.1f} s" if left_us >= 100_000 else "at once"

    def jobs(self, jobs: Sequence[JobId]) -> str:
        """``jobs 3, 4``."""
        return f"job{'s' * (len(jobs) > 1)} " + ", ".join(map(self.name, jobs))


def explain(planner: Planner, subject: str, asker: Asker) -> Explanation:
    """What a call, a deployment or a WPG does or waits for."""
    books = planner.books
    entry = books.entries.get(CallId(subject))
    home = books.homes.get(DeploymentId(subject))
    lane = books.lanes.get(WpgId(subject))
    if entry is not None:
        reasons = tuple(_of_call(planner, entry, asker))
    elif home is not None:
        reasons = tuple(_of_deployment(planner, *home, asker))
    elif lane is not None:
        reasons = (*_of_return(lane), *_of_lane(lane, asker))
    else:
        sentence = f"{subject} is not here: it has ended, or it never came"
        reasons = (Reason(kind=ReasonKind.UNKNOWN, sentence=sentence),)
    return Explanation(subject=subject, reasons=reasons)


def explain_job(planner: Planner, job: JobId, asker: Asker) -> Sequence[Explanation]:
    """One explanation for every deployment of the job."""
    return tuple(
        explain(planner, name, asker)
        for name, (_, tenant) in planner.books.homes.items()
        if tenant.members[name].job == job
    )


def view(planner: Planner, lane: Lane) -> WpgView:
    """What one held WPG does."""
    if lane.wpg is None or lane.meter is None:
        raise ValueError(f"{lane.id} is not held")
    use, group = lane.own_use(), lane.group
    waiting = [tenant for tenant in lane.tenants.values() if tenant.queue_length()]
    busy = {run.call for run in lane.running.values()}
    queued = sum(t.queue_length() for t in waiting)
    queued -= sum(
        run.tenant is not None and run.tenant.program is not None and not run.entry.answered
        for run in lane.running.values()
        if run.entry is not None
    )
    return WpgView(
        wpg=lane.id,
        pool=lane.wpg.pool,
        gpus=lane.wpg.gpus,
        activity=use.activity,
        jobs=tuple(sorted(use.jobs)),
        call=use.call,
        resident=None if lane.resident is None else lane.resident.name,
        running=len(busy),
        queue_length=queued,
        waiting_jobs=tuple(sorted({m.job for t in waiting for m in t.members.values()})),
        since_us=lane.meter.since_us,
        kept_until_us=lane.kept_until_us,
        reason=lane.reason,
        draining=lane.draining,
        shares_with=() if group is None else tuple(other.id for other in group.others(lane)),
        asleep=group is not None and group.turn is not lane,
        shares=lane.wpg.shares,
        beside=None if lane.beside is None else lane.beside.name,
        beside_jobs=tuple(_tail_jobs(lane)),
    )


def _of_call(planner: Planner, entry: Entry, asker: Asker) -> Iterator[Reason]:
    call = entry.call
    lane, tenant = planner.books.homes[call.deployment]
    what = _what(entry)
    if call.id in lane.running:
        sentence = f"{what} runs on {lane.id}{_beside(lane, asker, tail=tenant is lane.beside)}"
        yield Reason(kind=ReasonKind.RUNNING, sentence=sentence, wpg=lane.id)
        return
    if entry.pauses:
        sentence = f"{what} was paused after {entry.sampled} tokens and goes on there"
        yield Reason(kind=ReasonKind.PAUSED, sentence=sentence, wpg=lane.id)
    program = tenant.program
    if program is not None and not entry.answered:
        first = program.frontier[0]
        if first < call.seq:
            kind = ReasonKind.EARLIER_CALL if first in program.calls else ReasonKind.GAP
            ahead = f"{what} waits for seq {first}"
            if first in program.calls:
                ahead += f" ({program.calls[first].call.kind})"
            else:
                ahead += ", which has not arrived"
            yield Reason(kind=kind, sentence=ahead, seq=first, wpg=lane.id)
            if first not in program.calls:
                return
    yield from _of_deployment(planner, lane, tenant, asker)


def _of_deployment(planner: Planner, lane: Lane, tenant: Tenant, asker: Asker) -> Iterator[Reason]:
    program = tenant.program
    if program is not None and program.head() is None:
        later = [seq for seq, entry in program.calls.items() if not entry.answered]
        if later:
            missing = program.frontier[0]
            sentence = f"seq {min(later)} waits for seq {missing}, which has not arrived"
            yield Reason(kind=ReasonKind.GAP, sentence=sentence, seq=missing, wpg=lane.id)
            return
    if any(run.tenant is tenant for run in lane.running.values()):
        yield from _running(lane, asker)
    elif tenant.key not in lane.waiting:
        if lane.wpg is None or lane.draining:
            yield from _of_home(planner, lane, tenant, asker)
            return
        if (stalled := _stalled(planner, lane, tenant, asker)) is not None:
            yield stalled
            return
        sentence = f"{lane.id} has no call of it to run"
        yield Reason(kind=ReasonKind.IDLE, sentence=sentence, wpg=lane.id)
        return
    if program is not None and program.replaying:
        count = program.to_replay()
        sentence = f"its state is being rebuilt: {count} earlier calls run again first"
        yield Reason(kind=ReasonKind.REPLAY, sentence=sentence, wpg=lane.id)
    if tenant.key in lane.waiting:
        yield from _of_wait(planner, lane, tenant, asker)


def _stalled(planner: Planner, lane: Lane, tenant: Tenant, asker: Asker) -> Reason | None:
    """What to say of a rollout in the middle of which nothing runs or waits."""
    job, stalls = tenant.last_job, planner.books.estimates.stalls
    phase, usual_us = planner.books.rollouts.get(job), stalls.stall_us(job)
    if phase is None or phase.last_key != tenant.key or phase.last_end_us is None:
        return None
    since_us = max(asker.now_us, lane.now_us) - phase.last_end_us
    if phase.running or usual_us is None or since_us > 2 * stalls.longest_us(job):
        return None
    sentence = (
        f"its sequences wait for their tools: job {asker.name(job)} asks again after "
        f"{usual_us / 1e6:.1f} s as a rule, and {lane.id} is free for others until then"
    )
    return Reason(kind=ReasonKind.TOOLS, sentence=sentence, wpg=lane.id, job=job)


def _of_wait(planner: Planner, lane: Lane, tenant: Tenant, asker: Asker) -> Iterator[Reason]:
    if lane.wpg is None or lane.draining:
        yield from _of_home(planner, lane, tenant, asker)
        return
    if lane.group is not None and lane.group.turn is not lane:
        yield from _of_sleep(lane, asker)
        return
    if lane.resident is not tenant or not lane.running:
        busy = list(_of_lane(lane, asker))
        yield from (reason for reason in busy if reason.kind is not ReasonKind.IDLE)
        stuck = lane.room_us is not None and lane.resident is not tenant
        if not lane.up or lane.kept_until_us is not None or stuck:
            return
    elif lane.leaving:
        others = sorted(
            {t.last_job if (h := t.head()) is None else h.call.job
             for t in lane.waiting.values() if t is not tenant}
        )  # fmt: skip
        sentence = f"{lane.id} admits no more samples: {asker.jobs(others)} waits for it"
        yield Reason(kind=ReasonKind.LEAVING, sentence=sentence, wpg=lane.id)
    chosen = planner.choose(lane)
    if chosen is None or chosen[1] is tenant or lane.owed is tenant:
        sentence = f"it is next on {lane.id}"
        yield Reason(kind=ReasonKind.NEXT, sentence=sentence, wpg=lane.id)
    else:
        choice = chosen[0]
        why = "" if choice.rule is Rule.INDEX else f" ({choice.rule})"
        sentence = f"job {asker.name(choice.winner.job)} is ahead{why}"
        yield Reason(kind=ReasonKind.AHEAD, sentence=sentence, wpg=lane.id, job=choice.winner.job)


def _of_home(planner: Planner, lane: Lane, tenant: Tenant, asker: Asker) -> Iterator[Reason]:
    """Of one whose WPG is gone, not there yet, or about to go."""
    program, wpg = tenant.program, lane.id
    if lane.wpg is None:
        sentence = f"its WPG is not there yet ({wpg})"
        if lane.gone:
            sentence = f"its WPG {wpg} is gone ({lane.gone}); it waits for another WPG"
        yield Reason(kind=ReasonKind.NOT_HELD, sentence=sentence, wpg=wpg)
        return
    sentence = f"WPG {wpg} is being given back; the deployment moves"
    if lane.relief:
        sentence = f"WPG {wpg} is drained for a moment {lane.relief}; this goes on"
    if program is not None:
        durable = planner.books.durable_every is not None
        sentence += f" when its state is {'durable' if durable else 'saved'}"
    yield Reason(kind=ReasonKind.DRAINING, sentence=sentence, wpg=wpg)
    if not lane.up:
        yield from _of_lane(lane, asker)
    if tenant.refusals:
        what = "saving its state" if tenant.dirty else "copying its state to the durable tier"
        again = asker.until(lane, tenant.retry_us)
        sentence = f"{what} has failed ({tenant.refusals} in a row) and is tried again {again}"
        yield Reason(kind=ReasonKind.DRAINING, sentence=sentence, wpg=wpg, until_us=tenant.retry_us)


def _of_return(lane: Lane) -> Iterator[Reason]:
    if lane.draining:
        sentence = f"{lane.id} is being given back"
        if lane.relief:
            sentence = f"{lane.id} is drained for a moment {lane.relief}"
        yield Reason(kind=ReasonKind.DRAINING, sentence=sentence, wpg=lane.id)


def _of_lane(lane: Lane, asker: Asker) -> Iterator[Reason]:
    if lane.wpg is None:
        sentence = f"{lane.id} is not held by the partition now"
        if lane.gone:
            sentence = f"{lane.id} is gone ({lane.gone})"
        yield Reason(kind=ReasonKind.NOT_HELD, sentence=sentence, wpg=lane.id)
    elif not lane.up:
        sentence = f"{lane.id} is down: restarting ({lane.reason})"
        yield Reason(kind=ReasonKind.DOWN, sentence=sentence, wpg=lane.id)
    elif lane.move is not None:
        job = lane.move.payer
        saves = isinstance(lane.move.order, SaveImage)
        what = "saving an image" if saves else "switching"
        sentence = f"{lane.id} is {what} for job {asker.name(job)}{_beside(lane, asker)}"
        yield Reason(kind=ReasonKind.SWITCHING, sentence=sentence, wpg=lane.id, job=job)
    elif lane.group is not None and lane.group.turn is not lane:
        yield from _of_sleep(lane, asker)
    elif lane.running:
        yield from _running(lane, asker)
    elif lane.room_us is not None:
        why = f" ({lane.room_reason})" if lane.room_reason else ""
        again = asker.until(lane, lane.room_us)
        sentence = f"{lane.id} waits for room for an image{why}; it tries again {again}"
        yield Reason(kind=ReasonKind.NO_ROOM, sentence=sentence, wpg=lane.id, until_us=lane.room_us)
    elif lane.kept_until_us is not None and lane.resident is not None:
        job = lane.resident.last_job
        left_us = max(0, lane.kept_until_us - max(asker.now_us, lane.now_us))
        sentence = f"{lane.id} is kept for job {asker.name(job)} for at most {left_us / 1e6:.1f} s"
        yield Reason(
            kind=ReasonKind.KEPT,
            sentence=sentence,
            wpg=lane.id,
            job=job,
            until_us=lane.kept_until_us,
        )
    else:
        yield Reason(kind=ReasonKind.IDLE, sentence=f"{lane.id} is idle", wpg=lane.id)


def _of_sleep(lane: Lane, asker: Asker) -> Iterator[Reason]:
    """Of one that shares its GPUs and does not have them."""
    group = lane.group
    if group is None:
        return
    names = " and ".join(each.id for each in group.lanes)
    if not lane.up:
        yield from _of_lane(lane, asker)
    if group.retry_us is not None and group.refused is lane:
        again = asker.until(lane, group.retry_us)
        sentence = (
            f"{lane.id} could not have the GPUs that {names} share ({group.reason}); it is tried "
            f"again {again}"
        )
        yield Reason(
            kind=ReasonKind.SHARED, sentence=sentence, wpg=lane.id, until_us=group.retry_us
        )
    elif group.grant is not None:
        job, who = group.grant.payer, group.grant.lane.id
        sentence = f"{who} is getting the GPUs that {names} share, for job {asker.name(job)}"
        yield Reason(kind=ReasonKind.SWITCHING, sentence=sentence, wpg=who, job=job)
    elif group.turn is not None:
        what = "; ".join(reason.sentence for reason in _of_lane(group.turn, asker))
        sentence = f"{lane.id} waits for the GPUs that {names} share: {what}"
        yield Reason(kind=ReasonKind.SHARED, sentence=sentence, wpg=lane.id)
    else:
        sentence = f"{lane.id} sleeps, and nobody has the GPUs that {names} share"
        yield Reason(kind=ReasonKind.SHARED, sentence=sentence, wpg=lane.id)


def _running(lane: Lane, asker: Asker) -> Iterator[Reason]:
    working = lane.working() or lane.running
    runs = [run.entry.call for run in working.values() if run.entry is not None]
    jobs = sorted({call.job for call in runs})
    if not runs:
        sentence = f"{lane.id} is running a call from before the restart"
    elif runs[0].kind is FunctionKind.SAMPLE:
        does = "pausing the last" if lane.pausing else "running"
        sentence = f"{lane.id} is {does} {len(runs)} samples of {asker.jobs(jobs)}"
        sentence += "" if working is lane.running else _beside(lane, asker)
    else:
        sentence = f"{lane.id} is running {runs[0].kind} of {asker.jobs(jobs)}"
    job = jobs[0] if len(jobs) == 1 else None
    yield Reason(kind=ReasonKind.BUSY, sentence=sentence, wpg=lane.id, job=job)


def _tail_jobs(lane: Lane) -> list[JobId]:
    """Whose last samples run on beside the resident's."""
    runs = lane.running.values()
    tail = [r.entry for r in runs if r.entry is not None and r.tenant is lane.beside]
    return sorted({entry.call.job for entry in tail}) if lane.beside is not None else []


def _beside(lane: Lane, asker: Asker, *, tail: bool = False) -> str:
    """What else runs there; ``tail``: it is the tail that is spoken of."""
    if lane.beside is None:
        return ""
    if not tail:
        return f" beside a tail of {asker.jobs(_tail_jobs(lane))}" if _tail_jobs(lane) else ""
    entries = [run.entry for run in lane.working().values() if run.entry is not None]
    jobs = sorted({entry.call.job for entry in entries})
    return f" as a tail beside {asker.jobs(jobs)}" if jobs else " as a tail"


def _what(entry: Entry) -> str:
    if entry.call.kind is FunctionKind.SAMPLE:
        return f"sample {entry.call.id}"
    return f"seq {entry.call.seq}"
