"""One pass along the queue: its order, who is held, who is tried, and who waits for whom. Pure.

Whether there is a place for a job is somebody else's to say: that is a fact, which this is told.
With the same facts it says the same again, word for word.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from plexrl_slurm.core.dues import Dues, DuesNews
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import Held, HeldKind, Subject, Tally
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.priority import (
    Factors,
    Owner,
    Priority,
    factors,
    fair_shares,
    in_order,
    weighted,
)
from plexrl_slurm.core.queue_rules import QueueRules
from plexrl_slurm.core.turns import End, Walk

#: Why a job waits: for room, or for its turn.
Wait: TypeAlias = Obstacle | Held
Waits: TypeAlias = tuple[Wait, ...]
#: A job, and a word of what was said of it, or happened to it.
Said: TypeAlias = tuple[JobId, str]

#: Facts: it got its place; there is one, on an empty WPG; it was gone when it was to get it; no
#: place will ever do; it is one that has a place, and lost its claim for a moment.
PLACED: Final = "placed"
LATER: Final = "later"
GONE: Final = "gone"
UNFIT: Final = "unfit"
AGAIN: Final = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A job as order and limits see it."""

    job: JobId
    #: As people know it.
    label: str
    user: str
    account: str
    qos: str
    since_us: int
    #: Its own.
    priority: int
    models: tuple[str, ...]
    #: Of these.
    host_bytes: int
    #: The slowdown that it asks for, as it was given.
    promise: str | None = None
    #: It waits no more.
    placed: bool = False
    #: Why Slurm would not start it now, if it had a place.
    in_slurm: Held | None = None

    @property
    def subject(self) -> Subject:
        """As limits see it."""
        return Subject(
            job=self.job,
            user=self.user,
            account=self.account,
            qos=self.qos,
            host_bytes=self.host_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueNews:
    """What is other than when a pass was told of the last time."""

    jobs: tuple[Queued, ...] = ()
    gone: tuple[JobId, ...] = ()
    dues: DuesNews = field(default_factory=DuesNews)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A job that was over a limit when it came; ``submitted``: what others had, by ``keys_of``."""

    subject: Subject
    submitted: tuple[int, ...]
    kind: HeldKind

    def again(self, rules: QueueRules) -> HeldKind | None:
        """Why it is refused, if it is decided now."""
        tally = Tally(rules.limits)
        tally.assume(self.subject, self.submitted)
        held = tally.refusal(self.subject)
        return None if held is None else held.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One waiting job."""

    of: Queued
    factors: Factors
    priority: Priority


def standings(
    rules: QueueRules, jobs: Iterable[Queued], dues: Dues, at_us: int
) -> dict[JobId, Standing]:
    """How urgent each is."""
    every = list(jobs)
    owners = [Owner(each.account, each.user) for each in every]
    fair = fair_shares(dues.usage(at_us), rules.shares, owners)
    most_qos, found = rules.most_qos, {}
    for each, owner in zip(every, owners, strict=True):
        of_job = factors(
            waited_us=at_us - each.since_us,
            fairshare=fair[owner],
            qos=rules.qos(each.qos).priority,
            most_qos=most_qos,
            priority=each.priority,
            weights=rules.weights,
        )
        found[each.job] = Standing(
            of=each, factors=of_job, priority=weighted(of_job, rules.weights)
        )
    return found


def ordered(rules: QueueRules, found: Iterable[Standing], at_us: int) -> list[Standing]:
    """Who is next."""
    return in_order(
        found,
        at_us=at_us,
        guard_us=rules.turns.guard_us,
        priority=lambda each: each.priority.total,
        since_us=lambda each: each.of.since_us,
        number=lambda each: each.of.job,
    )


class QueuePass:
    """As far as it has come."""

    def __init__(
        self, rules: QueueRules, *, at_us: int, jobs: Sequence[Queued], dues: Dues
    ) -> None:
        self._rules, self._at_us = rules, at_us
        self._walk: Walk[Waits] = Walk(rules.turns, at_us)
        self.tally = Tally(rules.limits, dues.today(at_us))
        for each in jobs:
            self.tally.submit(each.subject)
            if each.placed:
                self.tally.enter(each.subject)
        waiting = [each for each in jobs if not each.placed]
        found = standings(rules, waiting, dues, at_us)
        self.order = [each.of for each in ordered(rules, found.values(), at_us)]
        #: Those that would take an empty WPG.
        self.later: list[Queued] = []
        self.oldest_us: int | None = None
        #: What it was told, and what it said of each, in their order.
        self.told: list[Said] = []
        self.said: list[Said] = []
        self._stopper, self._behind = "", Waits()

    # -- what it decides -------------------------------------------------------------------
    def looks_at(self, each: Queued) -> Waits | None:
        """What keeps it from being tried; ``None``: try it."""
        if held := self._holds(each):
            return self._says(each, str(held[0].kind), held)
        ended = self._walk.ended
        if ended is not None and not self._passes(each, ended):
            if not self._behind:
                self._behind = (self._told_behind(ended),)
            return self._says(each, f"behind {ended}", self._behind)
        return self._known(each)

    def looks_again(self, each: Queued) -> Waits | None:
        """At one that would take an empty WPG, when all others have had their turn."""
        if held := self._holds(each):
            return self._says(each, str(held[0].kind), held)  # by another of them
        return self._known(each)

    def alone(self, each: Queued) -> bool:
        """Whether an empty training WPG will do now."""
        overdue = self._at_us - each.since_us >= self._rules.turns.guard_us
        return overdue or not self._rules.joins_first

    def _known(self, each: Queued) -> Waits | None:
        known = self._walk.look(self._shape(each))
        if known is None:
            self.said.append((each.job, "try"))
            return None
        self._failed(each, known)
        return self._says(each, f"like another: {known[0].kind}", known)

    def _holds(self, each: Queued) -> tuple[Held, ...]:
        if (wrong := self._rules.wrong_qos(each.qos, each.user, each.account)) is not None:
            return (Held(kind=HeldKind.INVALID_QOS, sentence=wrong),)
        if each.in_slurm is not None:
            return (each.in_slurm,)
        return self.tally.holding(each.subject)

    def _passes(self, each: Queued, end: End) -> bool:
        """Room was set aside for some, and they wait for nobody else's."""
        reserved = self._rules.qos(each.qos).reserved
        return reserved and self._rules.reservation.any and end is not End.DEPTH

    def _shape(self, each: Queued) -> Hashable:
        """Jobs of one shape find a place, or none, together."""
        qos = self._rules.qos(each.qos)
        return (each.models, qos.reserved, each.promise, each.priority * qos.weight)

    def _says(self, each: Queued, word: str, waits: Waits) -> Waits:
        self.said.append((each.job, word))
        return waits

    def _told_behind(self, end: End) -> Held:
        if end is End.DEPTH:
            sentence = (
                f"{self._rules.turns.depth} jobs that go first were looked at, and a "
                f"pass looks at no more"
            )
        elif end is End.GUARD:
            sentence = f"job {self._stopper} has waited so long that nobody goes before it"
        else:
            sentence = f"job {self._stopper} goes first, and finds no place yet"
        return Held(kind=HeldKind.PRIORITY, sentence=sentence)

    # -- what it is told -------------------------------------------------------------------
    def hears(self, each: Queued, what: str) -> None:
        """What came of a job that was tried, but for :meth:`finds_none`."""
        self.told.append((each.job, what))
        if what == PLACED:
            self.tally.enter(each.subject)
        elif what == LATER:
            self.later.append(each)

    def finds_none(self, each: Queued, obstacles: Waits) -> None:
        """There is no place for it."""
        self.told.append((each.job, str(obstacles[0].kind)))
        self._failed(each, obstacles)

    def _failed(self, each: Queued, obstacles: Waits) -> None:
        self.oldest_us = min(self.oldest_us or each.since_us, each.since_us)
        if obstacles[0].kind is ObstacleKind.RESERVATION:
            return  # there is room, and it is not for this one: nobody waits behind it
        if self._walk.ended is None or self._walk.ended is End.DEPTH:
            self._stopper = each.label
        self._walk.fails(obstacles, since_us=each.since_us, shape=self._shape(each))


def decide_again(made: QueuePass, told: Iterable[Said]) -> list[Said]:
    """What a pass says when it is told the same. Raises ``BadInput`` if the facts are not those of
    the jobs that it tries."""
    facts = deque(told)

    def tried(each: Queued, *, alone: bool) -> None:
        job, what = facts.popleft() if facts else (None, "nothing")
        if job != each.job:
            raise BadInput(f"job {each.job} is tried next, and what is told is of job {job}")
        if what == LATER and alone:
            raise BadInput(f"job {job} is left for later, and an empty WPG would do for it now")
        if what in (PLACED, LATER, GONE, UNFIT):
            made.hears(each, what)
        else:
            made.finds_none(each, (Obstacle(kind=ObstacleKind(what), sentence=""),))

    for each in made.order:
        if facts and facts[0] == (each.job, AGAIN):
            facts.popleft()
            made.hears(each, AGAIN)
        elif made.looks_at(each) is None:
            tried(each, alone=made.alone(each))
    for each in list(made.later):
        if made.looks_again(each) is None:
            tried(each, alone=True)
    if facts:
        raise BadInput(f"something is told of job {facts[0][0]}, which is not tried")
    return made.said
