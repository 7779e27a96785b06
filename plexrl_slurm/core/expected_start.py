"""When waiting jobs are expected to start: the queue pass, again at every end that is known. Pure.

It goes as :mod:`plexrl_slurm.core.queue_pass` does, in the same order and past the same jobs. It is
as honest as its facts: a job whose end nobody knows never ends here, so that whoever waits for its
place is "unknown", and an instant is told only where the known ends make the room. Jobs that come
later and go first are not foreseen.
"""

import heapq
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.priority import in_order
from plexrl_slurm.core.turns import End, TurnRules, Walk

#: Most passes that are made.
MOST_PASSES: Final = 500


class Entry(StrEnum):
    """What comes of a job that looks for a place."""

    PLACED = "placed"
    #: There is one, on an empty WPG, and others are to join those that are not empty first.
    LATER = "later"
    #: There is room, and it is kept free for others.
    KEPT = "kept"
    NONE = "none"


class Room(Protocol):
    """A dry run of the partition: nothing that happens to it is real."""

    def holds(self, job: JobId) -> bool:
        """Whether a limit keeps it out, whatever room there is; it stands in nobody's way then."""

    def enter(self, job: JobId, *, alone: bool) -> Entry:
        """Give the job its place; ``alone``: an empty WPG will do now."""

    def leave(self, job: JobId) -> None:
        """It has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A waiting job."""

    job: JobId
    since_us: int
    #: Jobs of one shape find room, or none, together; ``None``: it is like no other.
    shape: Hashable
    #: How long it will run at most, or ran before; ``None``: nobody knows.
    length_us: int | None
    #: It gets no place, whatever room there is.
    held: bool = False
    #: It waits for nobody but those for whom room is kept free as well.
    reserved: bool = False


class Unknown(StrEnum):
    """Why nobody can tell when a job starts."""

    #: Some running or earlier job has no known end.
    ENDS = "ends"
    #: Even when all have ended it has no place.
    NO_PLACE = "no_place"
    #: A limit of GPU time, or its owner, keeps it.
    HELD = "held"
    #: Too much happens before.
    FAR = "far"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is known of a job's start."""

    at_us: int | None
    #: Set where there is no instant.
    unknown: Unknown | None = None


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass, as :class:`plexrl_slurm.core.queue_pass.QueuePass` makes it."""

    walk: Walk[bool]
    room: Room
    rules: TurnRules
    joins_first: bool
    at_us: int
    placed: list[Candidate] = field(default_factory=list)
    later: list[Candidate] = field(default_factory=list)
    held: set[JobId] = field(default_factory=set)

    def go(self, order: Sequence[Candidate]) -> None:
        """Along the queue, and again along those that would take an empty WPG."""
        for each in order:
            if not self._is_held(each) and not self._is_behind(each):
                known = self.walk.look(each.shape)
                overdue = self.at_us - each.since_us >= self.rules.guard_us
                self._try(each, known, alone=overdue or not self.joins_first)
        for each in list(self.later):
            if not self._is_held(each):
                self._try(each, self.walk.known(each.shape), alone=True)

    def _is_held(self, each: Candidate) -> bool:
        if held := each.held or self.room.holds(each.job):
            self.held.add(each.job)
        return held

    def _is_behind(self, each: Candidate) -> bool:
        ended = self.walk.ended
        return ended is not None and not (each.reserved and ended is not End.DEPTH)

    def _try(self, each: Candidate, known: bool | None, *, alone: bool) -> None:
        entry = Entry.NONE if known else self.room.enter(each.job, alone=alone)
        if entry is Entry.PLACED:
            self.placed.append(each)
        elif entry is Entry.LATER:
            self.later.append(each)
        elif entry is Entry.NONE:
            self.walk.fails(True, since_us=each.since_us, shape=each.shape)


def expected_starts(
    waiting: Sequence[Candidate],
    *,
    ends_us: Mapping[JobId, int | None],
    now_us: int,
    rules: TurnRules,
    priority: Callable[[JobId, int], float],
    room: Room,
    joins_first: bool = False,
) -> dict[JobId, Expected]:
    """For each of ``waiting``, as they are expected to start; those of which nobody can tell are
    the last ones. ``ends_us`` are the expected ends of jobs that have a place.

    ``priority`` is a job's at an instant. An end that should have come already comes now.
    """
    left = {each.job: each for each in waiting}
    found: dict[JobId, Expected] = {}
    endless = any(end is None for end in ends_us.values())
    ends = [(max(end, now_us), job) for job, end in ends_us.items() if end is not None]
    heapq.heapify(ends)
    at_us, held, far = now_us, set[JobId](), True
    order: Sequence[Candidate] = ()
    for _ in range(MOST_PASSES):
        order = in_order(
            left.values(),
            at_us=at_us,
            guard_us=rules.guard_us,
            priority=lambda each, at=at_us: priority(each.job, at),  # type: ignore[misc]
            since_us=lambda each: each.since_us,
            number=lambda each: each.job,
        )
        this = _Pass(
            walk=Walk(rules, at_us), room=room, rules=rules, joins_first=joins_first, at_us=at_us
        )
        this.go(order)
        held = this.held
        for each in this.placed:
            del left[each.job]
            found[each.job] = Expected(at_us=at_us)
            if each.length_us is None:
                endless = True
            else:
                heapq.heappush(ends, (at_us + each.length_us, each.job))
        if this.placed and this.walk.ended is End.DEPTH:
            continue  # the next pass looks at others
        next_us = _next_us(left.values(), ends, at_us, rules)
        if next_us is None:
            far = False
            break
        at_us = next_us
        while ends and ends[0][0] <= at_us:
            room.leave(heapq.heappop(ends)[1])
    for each in order:
        if each.job in left:
            why = Unknown.NO_PLACE
            if far:
                why = Unknown.FAR
            elif each.held:
                why = Unknown.HELD
            elif endless:
                why = Unknown.ENDS
            elif each.job in held:
                why = Unknown.HELD
            found[each.job] = Expected(at_us=None, unknown=why)
    return dict(sorted(found.items(), key=lambda each: each[1].at_us is None))


def _next_us(
    left: Collection[Candidate], ends: Sequence[tuple[int, JobId]], at_us: int, rules: TurnRules
) -> int | None:
    """When the queue is looked along again: at an end, or when the guard changes the order, where
    that lets somebody in whom others kept out. ``None``: nothing more happens."""
    if not left:
        return None
    marks = [ends[0][0]] if ends else []
    if not rules.backfill or len(left) > rules.depth:
        marks += [at for each in left if (at := each.since_us + rules.guard_us) > at_us]
    return min(marks, default=None)
