"""When waiting jobs are expected to start: the queue pass, again at every end that is known. Pure.

It is as honest as its facts: a job whose end nobody knows never ends here, so that whoever waits
for its place is "unknown", and an instant is told only where the known ends make the room. Jobs
that come later and go first are not foreseen.
"""

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.priority import in_order
from plexrl_slurm.core.turns import TurnRules, Walk

#: Most ends that are looked at.
MOST_PASSES: Final = 500


class Room(Protocol):
    """A dry run of the partition: nothing that happens to it is real."""

    def holds(self, job: JobId) -> bool:
        """Whether a limit keeps it out, whatever room there is; it stands in nobody's way then."""

    def enter(self, job: JobId) -> bool:
        """Give the job its place; false if there is none."""

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
    #: Its owner has to let it go first.
    held: bool = False


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


def expected_starts(
    waiting: Sequence[Candidate],
    *,
    ends_us: Mapping[JobId, int | None],
    now_us: int,
    rules: TurnRules,
    priority: Callable[[JobId, int], float],
    room: Room,
) -> dict[JobId, Expected]:
    """For each of ``waiting``; ``ends_us`` are the expected ends of jobs that have a place.

    ``priority`` is a job's at an instant. An end that should have come already comes now.
    """
    left = {each.job: each for each in waiting}
    found: dict[JobId, Expected] = {}
    endless = any(end is None for end in ends_us.values())
    ends = [(max(end, now_us), job) for job, end in ends_us.items() if end is not None]
    heapq.heapify(ends)
    at_us, held = now_us, set[JobId]()
    for _ in range(MOST_PASSES):
        held = set()
        walk: Walk[bool] = Walk(rules, at_us)
        order = in_order(
            left.values(),
            at_us=at_us,
            guard_us=rules.guard_us,
            priority=lambda each, at=at_us: priority(each.job, at),  # type: ignore[misc]
            since_us=lambda each: each.since_us,
            number=lambda each: each.job,
        )
        for each in order:
            if each.held or room.holds(each.job):
                held.add(each.job)
            elif walk.ended is not None:
                continue
            elif walk.look(each.shape) or not room.enter(each.job):
                walk.fails(True, since_us=each.since_us, shape=each.shape)
            else:
                del left[each.job]
                found[each.job] = Expected(at_us=at_us)
                if each.length_us is None:
                    endless = True
                else:
                    heapq.heappush(ends, (at_us + each.length_us, each.job))
        if not left or not ends:
            break
        at_us = ends[0][0]
        while ends and ends[0][0] <= at_us:
            room.leave(heapq.heappop(ends)[1])
    for each in left.values():
        why = Unknown.NO_PLACE
        if ends:
            why = Unknown.FAR
        elif each.held:
            why = Unknown.HELD
        elif endless:
            why = Unknown.ENDS
        elif each.job in held:
            why = Unknown.HELD
        found[each.job] = Expected(at_us=None, unknown=why)
    return found
