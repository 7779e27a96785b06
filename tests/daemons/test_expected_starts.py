"""Jobs are expected to start when, and in the order in which, the queue lets them in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.dues import Dues
from plexrl_slurm.core.expected_start import Candidate, Expected, Unknown, expected_starts
from plexrl_slurm.core.ground import Ground, News, Wish
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import Held, HeldKind, LimitRules, Limits, Qos, Tally
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.priority import Weights
from plexrl_slurm.core.queue_pass import LATER, PLACED, Queued, QueuePass, standings
from plexrl_slurm.core.queue_rules import QueueRules
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.sites import Applicant, Partition, Settled
from plexrl_slurm.core.turns import TurnRules
from plexrl_slurm.daemons.dry_run import DryRun
from tests.core.effort import effort
from tests.core.test_admission import ALONE, FIT, GIB, at, job, site, uses

NOW = 1_000
SITES = [site(f"{pool}-{n}", pool, host=5 * GIB) for pool in Pool for n in range(2)]
LIMITS = LimitRules(
    qos={
        "fast": Qos(name="fast", priority=9, reserved=True),
        "slow": Qos(name="slow", limits=Limits(max_jobs=1)),
    }
)


TOMORROW = Held(kind=HeldKind.BEGIN_TIME, sentence="it begins tomorrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class One:
    """A job of a story."""

    number: int
    since_us: int
    priority: int
    qos: str
    share: int
    image: int
    length_us: int | None
    held: bool = False

    @property
    def end_us(self) -> int | None:
        """Of one that lives already; some should have ended."""
        return None if self.length_us is None else NOW - 50 + self.length_us

    @property
    def who(self) -> Applicant:
        habits = uses(train=self.share, sample=self.share // 3)
        return job(self.number, habits, image=self.image * GIB)

    def queued(self, *, placed: bool) -> Queued:
        return Queued(
            job=JobId(self.number), label=str(self.number), user="ada", account="lab",
            qos=self.qos, since_us=self.since_us, priority=self.priority,
            models=(f"m{self.share}-{self.image}",), host_bytes=1, placed=placed,
            in_slurm=TOMORROW if self.held else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Who lives where, who waits, and by which rules."""

    living: Sequence[tuple[One, int, int]]
    waiting: Sequence[One]
    rules: QueueRules
    alone: bool

    @property
    def placement(self) -> Any:
        return ALONE if self.alone else FIT

    def settled(self, one: One, train: int, rollout: int) -> Settled:
        homes = at(one.who, f"train-{train}", f"rollout-{rollout}").homes
        return Settled(who=one.who, homes=homes, reserved=one.qos == "fast")


def jobs(first: int, *, held: bool) -> st.SearchStrategy[One]:
    return st.builds(
        One,
        number=st.just(first), since_us=st.integers(0, NOW), priority=st.integers(0, 3),
        qos=st.sampled_from(["normal", "normal", "normal", "fast", "slow", "gone"]),
        share=st.sampled_from([5, 60, 60]), image=st.sampled_from([1, 2]),
        length_us=st.integers(0, 300).map(lambda us: us or None),
        held=st.sampled_from([False, False, False, True]) if held else st.just(False),
    )  # fmt: skip


def numbered(found: Sequence[Any], first: int) -> list[Any]:
    return [
        (replace(each[0], number=first + n), *each[1:])
        if isinstance(each, tuple)
        else replace(each, number=first + n)
        for n, each in enumerate(found)
    ]


STORIES = st.builds(
    lambda living, waiting, rules, alone: Story(
        living=numbered(living, 1), waiting=numbered(waiting, 100), rules=rules, alone=alone
    ),
    st.lists(
        st.tuples(jobs(0, held=False), st.integers(0, 1), st.integers(0, 1)), max_size=4
    ),
    st.lists(jobs(0, held=True), min_size=3, max_size=9),
    st.builds(
        QueueRules,
        weights=st.just(Weights(fairshare=0, job=1_000, qos=500, age=100, max_age_us=400)),
        limits=st.just(LIMITS),
        turns=st.builds(
            TurnRules, backfill=st.booleans(), guard_us=st.sampled_from([0, 600, 1_300, 10**9]),
            depth=st.sampled_from([1, 2, 64]),
        ),
        reservation=st.sampled_from(
            [Reservation(), Reservation(wpgs=1), Reservation(wpgs=2), Reservation(host_bytes=GIB)]
        ),
        joins_first=st.booleans(),
    ),
    st.booleans(),
)  # fmt: skip


def lived(story: Story) -> dict[int, int]:
    """What comes of it, as the daemon walks along the queue again and again."""
    ground, dues = Ground(story.rules.reservation), Dues(0)
    ground.hear(News(sites=tuple(SITES), settled=tuple(story.settled(*e) for e in story.living)))
    inside = {each.number: each for each, *_ in story.living}
    ends = {n: max(NOW, end) for n, e in inside.items() if (end := e.end_us) is not None}
    left, started, now = {each.number: each for each in story.waiting}, dict[int, int](), NOW
    while True:
        while came := _pass(story, ground, dues, inside, left, now):
            for each in came:
                started[each.number], inside[each.number] = now, left.pop(each.number)
                if each.length_us is not None:
                    ends[each.number] = now + each.length_us
        guard = (each.since_us + story.rules.turns.guard_us for each in left.values())
        marks = [*ends.values(), *(mark for mark in guard if mark > now)]
        if not left or not marks:
            return started
        now = min(marks)
        for number in [number for number, end in ends.items() if end <= now]:
            del ends[number], inside[number]
            ground.hear(News(left=(JobId(number),)))


def _pass(
    story: Story, ground: Ground, dues: Dues, inside: dict[int, One], left: dict[int, One], now: int
) -> list[One]:
    """Whoever gets a place in one pass."""
    queue = [each.queued(placed=True) for each in inside.values()]
    queue += [each.queued(placed=False) for each in left.values()]
    passing, came = QueuePass(story.rules, at_us=now, jobs=queue, dues=dues), list[One]()

    def tried(each: Queued, waits: Any, *, last: bool = False) -> None:
        if waits is not None:
            return
        one, reserved = left[each.job], story.rules.qos(each.qos).reserved
        wish = Wish(who=one.who, rules=story.placement, pools=tuple(Pool), reserved=reserved)
        found = ground.answer(wish)
        if not isinstance(found, Placement):
            passing.finds_none(each, found)
            return
        empty = not ground.whole.members[found.homes[Pool.TRAIN]]
        if empty and not (last or passing.alone(each)):
            passing.hears(each, LATER)
            return
        settled = Settled(who=one.who, homes=found.homes, reserved=reserved)
        ground.hear(News(settled=(settled,)))
        passing.hears(each, PLACED)
        came.append(one)

    for each in passing.order:
        tried(each, passing.looks_at(each))
    for each in list(passing.later):
        tried(each, passing.looks_again(each), last=True)
    return came


def foretold(story: Story) -> Mapping[JobId, Expected]:
    """The same as ``plexrl squeue --start`` asks for it."""
    rules, dues = story.rules, Dues(0)
    living = [each for each, *_ in story.living]
    queued = {each.number: each.queued(placed=False) for each in (*living, *story.waiting)}
    tally = Tally(rules.limits)
    for each in living:
        tally.enter(queued[each.number].subject)
    room = DryRun(
        Partition(sites=SITES, settled=[story.settled(*each) for each in story.living]),
        story.placement,
        applicants={JobId(each.number): each.who for each in story.waiting},
        subjects={JobId(number): each.subject for number, each in queued.items()},
        tally=tally,
        reservation=rules.reservation,
        reserved=frozenset(JobId(n) for n, each in queued.items() if rules.qos(each.qos).reserved),
    )

    def priority(job: JobId, at_us: int) -> float:
        return standings(rules, [queued[job]], dues, at_us)[job].priority.total

    return expected_starts(
        [
            Candidate(
                job=JobId(each.number),
                since_us=each.since_us,
                shape=(queued[each.number].models, rules.qos(each.qos).reserved, None),
                length_us=each.length_us,
                held=each.held or rules.wrong_qos(each.qos, "ada", "lab") is not None,
                reserved=rules.qos(each.qos).reserved and rules.reservation.any,
            )
            for each in story.waiting
        ],
        ends_us={JobId(each.number): each.end_us for each in living},
        now_us=NOW,
        rules=rules.turns,
        priority=priority,
        room=room,
        joins_first=rules.joins_first,
    )


@effort(200)
@given(STORIES)
def test_jobs_start_when_and_as_the_queue_lets_them_in(story: Story) -> None:
    found, started = foretold(story), lived(story)
    held = {each.number for each in story.waiting if each.held}
    expected = {int(job): each.at_us for job, each in found.items() if each.at_us is not None}
    assert expected == started
    assert list(expected) == list(started), "in this order"
    assert all(at_us >= NOW for at_us in expected.values())
    assert list(expected.values()) == sorted(expected.values())
    assert set(found) == {each.number for each in story.waiting}
    for number in held:
        assert found[JobId(number)].unknown is Unknown.HELD
    event(f"{len(set(expected.values()))} instants")


@effort(60)
@given(STORIES)
def test_where_every_end_is_known_nobody_waits_for_an_end(story: Story) -> None:
    known = [replace(each, length_us=each.length_us or 7, held=False)
             for each in story.waiting]  # fmt: skip
    living = [(replace(one, length_us=one.length_us or 7), t, r) for one, t, r in story.living]
    found = foretold(replace(story, waiting=known, living=living))
    assert Unknown.ENDS not in {each.unknown for each in found.values()}
