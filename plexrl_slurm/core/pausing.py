"""Tails in the books: what a tail is like, who would follow, and what a pause changes."""

from dataclasses import replace

from plexrl_slurm.core import beside
from plexrl_slurm.core.books import Books
from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.lane import Lane, Running, Tenant
from plexrl_slurm.core.messages import AnyInstruction, Pause, Paused
from plexrl_slurm.core.policy import Candidate, Choice, Rule
from plexrl_slurm.core.tails import LOOK_US, Tail, TailRules, Waiter, few_left, is_tail, pays


def find_tail(books: Books, lane: Lane, rules: TailRules) -> Tail | None:
    """What runs on ``lane`` as a tail; ``None`` if it is none of which something could be done."""
    working = lane.working()
    running = len(working)
    if running > rules.running and 100 * running > rules.share * lane.most:
        return None  # the usual case, cheaply
    runs = [run for run in working.values() if run.entry is not None]
    resident = lane.resident
    if resident is None or len(runs) < running:
        return None
    members = resident.members.values()
    entries = [run.entry for run in runs if run.entry is not None]
    tail = Tail(
        running=len(runs),
        most=lane.most,
        pauses=max((entry.pauses for entry in entries), default=0),
        fewest=min((entry.pauses for entry in entries), default=0),
        ran_us=lane.now_us - max((run.start_us for run in runs), default=lane.now_us),
        rest_us=None,
        back_us=0,
        weight=max((member.priority for member in members), default=1),
        step_us=min((books.estimates.step_us(entry.call.job) for entry in entries), default=1),
    )
    if not (is_tail(rules, tail) or (beside.may(lane, rules) and few_left(rules, tail))):
        return None
    tokens, longest_us = 0, 0
    for run in runs:
        if run.entry is None:
            continue
        call, age_us = run.entry.call, lane.now_us - run.start_us + run.entry.spent_us
        rest_us = books.estimates.lengths.rest_us(call.job, age_us)
        if rest_us is None:
            return None
        longest_us = max(longest_us, rest_us)
        tokens += call.tokens * age_us // max(1, age_us + rest_us)
    back_us = books.costs.estimate_us(lane.id, resident.image_bytes)
    back_us += books.prefills.estimate_us(lane.id, tokens)
    return replace(tail, rest_us=longest_us, back_us=back_us)


def as_waiter(choice: Choice) -> Waiter:
    """Whom the policy would take next."""
    winner: Candidate = choice.winner
    return Waiter(
        work_us=winner.switch_us + winner.remaining_us,
        weight=winner.weight,
        step_us=winner.step_us,
        overdue=choice.rule in (Rule.OVERDUE, Rule.LONG_OVERDUE),
        switch_us=winner.switch_us,
    )


def pause(
    lane: Lane,
    rules: TailRules,
    tail: Tail,
    choice: Choice,
    cause: CauseId,
    out: list[AnyInstruction],
) -> None:
    """Pause the tail for whom the policy has chosen, if that pays; else look again in a while."""
    if not (is_tail(rules, tail) and pays(rules, tail, as_waiter(choice))):
        lane.tail_us = lane.now_us + LOOK_US
        return
    lane.pausing = lane.leaving = True
    lane.owed = lane.tenants[choice.winner.key]
    out.append(Pause(wpg=lane.id, calls=tuple(lane.working()), cause=cause))


def paused(
    books: Books, lane: Lane, run: Running, event: Paused, out: list[AnyInstruction]
) -> None:
    """``run``, taken off the lane, has stopped between two tokens; it waits before the others."""
    entry, tenant = run.entry, run.tenant
    if entry is None or tenant is None:
        return
    job, spent_us = entry.call.job, lane.now_us - run.start_us
    lane.jobs[job] -= 1
    if not lane.jobs[job]:
        del lane.jobs[job]
    books.attained_us[lane.id, job] = books.attained_us.get((lane.id, job), 0) + spent_us
    lane.phase(tenant, job).lose(1, lane.now_us)
    entry.pauses, entry.sampled = entry.pauses + 1, event.tokens
    entry.spent_us += spent_us
    if entry.cancelled:
        books.finish(entry, ok=False, reason="cancelled", cause=event.cause, out=out)
    elif not entry.answered and not tenant.gone:
        _wait_first(books, lane, tenant, run)
    books.bury(lane, tenant)


def _wait_first(books: Books, lane: Lane, tenant: Tenant, run: Running) -> None:
    entry, waiting = run.entry, tenant.samples
    if entry is None:
        return
    tenant.samples = {call: other for call, other in waiting.items() if other.pauses}
    entry.ready_us = lane.now_us
    books.enqueue_sample(lane, tenant, entry)
    tenant.samples.update(waiting)
