"""One walk along the queue: who is looked at, where it ends, and that nobody starves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl_slurm.core.backlog import Backlog, Waiting
from plexrl_slurm.core.grouping import Home, Member, Why
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.core.turns import End, TurnRules, Walk

PROFILE = Profile(step_us=100, phase_us=10, function_us=10, switch_us=1, overlaps=False)


def test_a_walk_ends_behind_the_last_that_it_may_look_at() -> None:
    walk: Walk[str] = Walk(TurnRules(depth=2), 0)
    assert walk.look("a") is None
    ends = [walk.ended]
    walk.fails("no room", since_us=0, shape="a")
    assert walk.look("a") == "no room"
    assert [*ends, walk.ended] == [None, End.DEPTH]


def test_whoever_has_waited_too_long_ends_the_walk_and_others_do_not() -> None:
    walk: Walk[str] = Walk(TurnRules(guard_us=10), 15)
    ends = []
    for since_us in (6, 5):
        assert walk.look("a") is None
        walk.fails("no room", since_us=since_us)
        ends.append(walk.ended)
    assert ends == [None, End.GUARD]
    strict: Walk[str] = Walk(TurnRules(backfill=False), 0)
    strict.fails("no room", since_us=0)
    assert strict.ended is End.ORDER


GPUS, GUARD, LONGEST = 8, 50, 30
arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # after the one before
        st.integers(1, GPUS),
        st.integers(1, LONGEST),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=40,
)


def member(job: int, gpus: int) -> Member:
    return Member(
        job=JobId(job), train_gpus=gpus, rollout_gpus=0, image_bytes=0, profile=PROFILE,
        max_slowdown=1.1,
    )  # fmt: skip


@settings(deadline=None)
@given(arrivals, st.booleans(), st.integers(1, 8))
def test_nobody_waits_longer_than_the_guard_and_what_ran_before_it(
    jobs: list[tuple[int, int, int, int]], backfill: bool, depth: int
) -> None:
    """However urgent, small and many the others are."""
    backlog = Backlog(backfill=backfill, guard_us=GUARD, depth=depth)
    coming: dict[int, list[int]] = {}
    at = 0
    for number, (after, _, _, _) in enumerate(jobs):
        at += after
        coming.setdefault(at, []).append(number)
    since = {number: at for at, numbers in coming.items() for number in numbers}
    running: dict[int, int] = {}
    started: dict[int, int] = {}
    now = 0

    def free() -> int:
        return GPUS - sum(jobs[number][1] for number in running)

    def place(wanted: Member) -> Home | Why:
        return Home(group=None) if wanted.train_gpus <= free() else Why.TRAIN_GPUS

    def take(wanted: Member, _: Home) -> None:
        running[wanted.job] = now + jobs[wanted.job][2]
        started[wanted.job] = now

    while len(started) < len(jobs):
        for number in [number for number, end in running.items() if end <= now]:
            del running[number]
        for number in coming.get(now, ()):
            _, gpus, _, priority = jobs[number]
            backlog.arrive(Waiting(member=member(number, gpus), priority=priority, since_us=now))
        backlog.run(now, place, take)
        now += 1
    for number, began in started.items():
        # Those that were late before it have their turns first, one after another at worst.
        earlier = sum(1 for other, at in since.items() if (at, other) < (since[number], number))
        assert began - since[number] <= GUARD + LONGEST * (earlier + 1)
