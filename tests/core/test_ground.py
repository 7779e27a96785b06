"""The ground that placement keeps is the one that it would make anew."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.ground import Ground, News, Wish
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.sites import Settled
from tests.core.effort import effort
from tests.core.test_admission import FIT, GIB, job, site, uses

SITES = [
    *(site(f"train-{n}", host=6 * GIB, nodes=(f"n{n // 2}", "x")[: n + 1]) for n in range(3)),
    *(site(f"rollout-{number}", Pool.ROLLOUT) for number in range(2)),
]
HOMES = st.fixed_dictionaries(
    {
        Pool.TRAIN: st.sampled_from([WpgId(f"train-{number}") for number in range(4)]),
        Pool.ROLLOUT: st.sampled_from([WpgId(f"rollout-{number}") for number in range(2)]),
    }
)
SETTLED = st.builds(
    lambda number, load, homes, reserved: Settled(
        who=job(number, uses(train=load, sample=load // 3), ends_us=load),
        homes=homes,
        reserved=reserved,
    ),
    st.integers(1, 6), st.integers(1, 30), HOMES, st.booleans(),
)  # fmt: skip
NEWS = st.builds(
    News,
    sites=st.lists(st.sampled_from(SITES), max_size=1).map(tuple),
    gone=st.lists(st.sampled_from([each.wpg.id for each in SITES]), max_size=1).map(tuple),
    settled=st.lists(SETTLED, max_size=3, unique_by=lambda each: each.who.job).map(tuple),
    left=st.lists(st.integers(1, 6).map(JobId), max_size=1).map(tuple),
)
ENDS = st.tuples(st.integers(1, 6).map(JobId), st.integers(50, 90))
WISH = st.builds(
    lambda number, load, reserved, pools: Wish(
        who=job(number, uses(train=load)), rules=FIT, pools=pools, reserved=reserved
    ),
    st.integers(5, 9), st.integers(1, 40), st.booleans(),
    st.sampled_from([tuple(Pool), (Pool.TRAIN,), (Pool.ROLLOUT,)]),
)  # fmt: skip


@effort(60)
@given(
    st.lists(st.tuples(NEWS, ENDS, WISH), max_size=8),
    st.sampled_from([Reservation(), Reservation(wpgs=1), Reservation(host_bytes=GIB)]),
)
def test_what_is_kept_answers_as_what_is_made_anew(
    story: list[tuple[News, tuple[JobId, int], Wish]], reservation: Reservation
) -> None:
    kept = Ground(reservation)
    kept.hear(News(sites=tuple(SITES)))
    for news, (name, ends_us), wish in story:
        kept.hear(news)
        if (there := kept.whole.of(name)) is not None:
            kept.hear(News(ends=((name, ends_us),)))
            assert kept.whole.of(name) == replace(there, who=replace(there.who, ends_us=ends_us))
        anew = kept.without(())
        assert kept.answer(wish) == anew.answer(wish)
        assert kept.answer(wish) == kept.answer(wish)
        for mine, other in ((kept.whole, anew.whole), (kept.open, anew.open)):
            assert list(mine.sites) == list(other.sites)
            assert mine.members == other.members
            assert mine.homes == other.homes
            assert mine._taken == other._taken
            assert mine._stock == other._stock


def test_a_job_is_gone_when_it_left_and_so_are_wpgs() -> None:
    ground = Ground(Reservation())
    homes = {Pool.TRAIN: WpgId("train-0"), Pool.ROLLOUT: WpgId("rollout-0")}
    ground.hear(News(sites=tuple(SITES), settled=(Settled(who=job(1, uses()), homes=homes),)))
    assert [who.job for who in ground.whole.members[WpgId("train-0")]] == [1]
    assert ground.without([JobId(1)]).whole.settled == ()
    ground.hear(News(left=(JobId(1),), gone=(WpgId("train-1"),)))
    assert ground.whole.members[WpgId("train-0")] == []
    assert WpgId("train-1") not in ground.whole.members
