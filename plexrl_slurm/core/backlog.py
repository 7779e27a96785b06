"""The queue of jobs before placement: priority, then age; backfill that nobody starves from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from plexrl_slurm.core.grouping import Home, Member, Why
from plexrl_slurm.core.ids import JobId

HOUR_US: Final = 3_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job that has no home yet."""

    member: Member
    priority: float
    since_us: int


@dataclass(slots=True, kw_only=True)
class Backlog:
    """Jobs without a home, and one pass over them."""

    #: Whether a later job may go before an earlier one that does not fit.
    backfill: bool = True
    #: Nobody goes before a job that has waited so long.
    guard_us: int = 72 * HOUR_US
    #: Most jobs that one pass looks at.
    depth: int = 64
    #: With backfill: those that join a group before those that need a new one.
    joins_first: bool = False
    jobs: dict[JobId, Waiting] = field(default_factory=dict)
    #: What stood in the way when a job was last looked at.
    why: dict[JobId, Why] = field(default_factory=dict)

    def arrive(self, waiting: Waiting) -> None:
        """It waits from now on."""
        self.jobs[waiting.member.job] = waiting

    def leave(self, job: JobId) -> None:
        """It was cancelled."""
        self.jobs.pop(job, None)
        self.why.pop(job, None)

    def run(
        self,
        at_us: int,
        place: Callable[[Member], Home | Why],
        take: Callable[[Member, Home], None],
    ) -> None:
        """Give homes to all that have one, in order; ``take`` makes each fact at once.

        A shape that found no GPUs finds none later in the pass either: nothing is given back
        while it lasts.
        """
        order = sorted(self.jobs.values(), key=lambda w: (-w.priority, w.since_us, w.member.job))
        failed: dict[tuple[int, int], Why] = {}
        later: list[Waiting] = []
        for waiting in order[: self.depth]:
            overdue = at_us - waiting.since_us >= self.guard_us
            answer = self._look(waiting.member, failed, place)
            if isinstance(answer, Home):
                if answer.group is None and self.joins_first and self.backfill and not overdue:
                    later.append(waiting)
                else:
                    self._take(waiting.member, answer, take)
            elif not self.backfill or overdue:
                break
        for waiting in later:
            answer = self._look(waiting.member, failed, place)
            if isinstance(answer, Home):
                self._take(waiting.member, answer, take)

    def _look(
        self,
        member: Member,
        failed: dict[tuple[int, int], Why],
        place: Callable[[Member], Home | Why],
    ) -> Home | Why:
        shape = (member.train_gpus, member.rollout_gpus)
        answer = failed.get(shape) or place(member)
        if not isinstance(answer, Home):
            self.why[member.job] = answer
            if answer in (Why.TRAIN_GPUS, Why.ROLLOUT_GPUS):
                failed[shape] = answer
        return answer

    def _take(self, member: Member, home: Home, take: Callable[[Member, Home], None]) -> None:
        del self.jobs[member.job]
        self.why.pop(member.job, None)
        take(member, home)
