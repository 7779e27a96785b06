"""The queue of jobs before placement: priority, then age; backfill that nobody starves from."""

from collections.abc import Callable
from dataclasses import dataclass, field

from plexrl_slurm.core.grouping import Home, Member, Why
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.priority import in_order
from plexrl_slurm.core.turns import HOUR_US as HOUR_US
from plexrl_slurm.core.turns import TurnRules, Walk


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
        order = in_order(
            self.jobs.values(),
            at_us=at_us,
            guard_us=self.guard_us,
            priority=lambda waiting: waiting.priority,
            since_us=lambda waiting: waiting.since_us,
            number=lambda waiting: waiting.member.job,
        )
        rules = TurnRules(backfill=self.backfill, guard_us=self.guard_us, depth=self.depth)
        walk: Walk[Why] = Walk(rules, at_us)
        later: list[Waiting] = []
        for waiting in order:
            if walk.ended is not None:
                break
            overdue = at_us - waiting.since_us >= self.guard_us
            answer = self._look(waiting, walk, place)
            if isinstance(answer, Home):
                if answer.group is None and self.joins_first and self.backfill and not overdue:
                    later.append(waiting)
                else:
                    self._take(waiting.member, answer, take)
        for waiting in later:
            answer = self._look(waiting, walk, place)
            if isinstance(answer, Home):
                self._take(waiting.member, answer, take)

    def _look(
        self, waiting: Waiting, walk: Walk[Why], place: Callable[[Member], Home | Why]
    ) -> Home | Why:
        member = waiting.member
        shape = (member.train_gpus, member.rollout_gpus)
        answer = walk.look(shape) or place(member)
        if not isinstance(answer, Home):
            self.why[member.job] = answer
            lasts = answer in (Why.TRAIN_GPUS, Why.ROLLOUT_GPUS)
            walk.fails(answer, since_us=waiting.since_us, shape=shape if lasts else None)
        return answer

    def _take(self, member: Member, home: Home, take: Callable[[Member, Home], None]) -> None:
        del self.jobs[member.job]
        self.why.pop(member.job, None)
        take(member, home)
