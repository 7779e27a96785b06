"""A reservation is one obstacle among the others that hold, and each has its facts."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.ground import Ground, News, Wish
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.sites import Applicant, Settled, Site
from tests.core.effort import effort
from tests.core.test_admission import ALONE, FIT, GIB, S, at, job, site, uses

KEPT = ObstacleKind.RESERVATION
WPGS = Reservation(wpgs=1)
TWO = [site(f"{pool}-{number}", pool) for pool in Pool for number in range(2)]


def ask(
    who: Applicant, *settled: Settled, kept: Reservation = WPGS, sites: Sequence[Site] = TWO,
    rules: Rules = FIT, reserved: bool = False,
) -> tuple[Obstacle, ...]:  # fmt: skip
    ground = Ground(kept)
    ground.hear(News(sites=tuple(sites), settled=settled))
    wish = Wish(who=who, rules=rules, pools=tuple(Pool), reserved=reserved)
    found = ground.answer(wish)
    return () if isinstance(found, Placement) else found


def kinds(found: Sequence[Obstacle]) -> list[tuple[ObstacleKind, Pool | None]]:
    return [(each.kind, each.pool) for each in found]


def test_what_is_kept_free_comes_first_and_what_is_in_the_way_elsewhere_after_it() -> None:
    heavy = at(job(1, uses(train=80), ends_us=7_300 * S), "train-0")
    found = ask(job(2, uses(train=40)), heavy)
    assert [each.told(100 * S) for each in found] == [
        "train-1 has room for it, and is kept free for jobs of a reserved qos: wait for others to "
        "end, or ask for such a qos",
        "on train-0 it would run 1.49 times as long as alone, and 1.10 was promised; the first is "
        "expected to end in 2 h 0 min",
    ]
    assert [each.view(0) for each in found] == [
        {
            "kind": "reservation", "word": "Reservation", "sentence": found[0].sentence,
            "pool": "train", "wpg": "train-1", "job_id": None, "needed_bytes": 2 * GIB,
            "free_bytes": 16 * GIB, "until_us": None,
        },
        {
            "kind": "promise", "word": "Promise", "sentence": found[1].told(0), "pool": "train",
            "wpg": "train-0", "job_id": 2, "needed_bytes": 0, "free_bytes": 0,
            "until_us": 7_300 * S,
        },
    ]  # fmt: skip
    assert ask(job(2, uses(train=40)), heavy, reserved=True) == ()


def test_both_pools_are_told_where_both_are_in_the_way() -> None:
    found = ask(job(2), at(job(1, ends_us=5), "train-0"), rules=ALONE)
    assert kinds(found) == [
        (KEPT, Pool.ROLLOUT), (KEPT, Pool.TRAIN),
        (ObstacleKind.ROLLOUT_GPUS, Pool.ROLLOUT), (ObstacleKind.TRAIN_GPUS, Pool.TRAIN),
    ]  # fmt: skip
    assert [each.until_us for each in found] == [None, None, 5, 5]


def test_without_room_on_what_is_kept_others_are_in_the_way_first() -> None:
    heavy = [at(job(1, uses(train=80)), "train-0"), at(job(2, uses(train=80)), "train-1")]
    found = ask(job(3, uses(train=40)), *heavy)
    assert kinds(found) == [(ObstacleKind.PROMISE, Pool.TRAIN), (KEPT, Pool.TRAIN)]
    assert found[0].wpg == "train-0"  # no end of a job on train-1 would help
    assert found[1].sentence == "train-1 is kept free for jobs of a reserved qos"


def test_the_only_wpg_of_a_pool_is_kept_for_nobody() -> None:
    one = [TWO[0], TWO[2], TWO[3]]
    assert ask(job(2), sites=one) == ()
    heavy = at(job(1, uses(train=80)), "train-0")
    assert kinds(ask(job(2, uses(train=40)), heavy, sites=one)) == [
        (ObstacleKind.PROMISE, Pool.TRAIN)
    ]


def test_what_is_given_back_is_told_beside_what_is_kept() -> None:
    sites = [site("train-0", draining=True), *TWO[1:]]
    found = ask(job(2), sites=sites)
    assert kinds(found) == [(KEPT, Pool.TRAIN), (ObstacleKind.DRAINING, Pool.TRAIN)]
    assert found[1].sentence == "every other train WPG is being given back (train-0)"


def test_many_that_are_kept_are_told_by_the_first() -> None:
    sites = [*(site(f"train-{number}") for number in range(6)), TWO[2], TWO[3]]
    heavy = [at(job(n, uses(train=80)), f"train-{n}") for n in range(6)]
    found = ask(job(9, uses(train=40)), *heavy, kept=Reservation(wpgs=5), sites=sites)
    said = "train-1, train-2, train-3, ... are kept free for jobs of a reserved qos"
    assert [e.sentence for e in found if e.kind is KEPT and e.pool is Pool.TRAIN] == [said]


class TestMemory:
    #: Room for three images and a spare slab, of which one image is kept free.
    SITES = (site("train-0", host=4 * GIB), TWO[2])
    MEMORY = Reservation(host_bytes=GIB)

    def test_host_memory_is_told_with_what_of_it_is_kept(self) -> None:
        two = [at(job(number, ends_us=60 * S), "train-0") for number in (1, 2)]
        found = ask(job(3), *two, kept=self.MEMORY, sites=self.SITES)
        assert [each.told(0) for each in found] == [
            "1.00 GiB of host memory on each node of train-0 is kept free for jobs of a reserved "
            "qos: wait for others to end, or ask for such a qos",
            "1 node x 3.00 GiB of host memory, beside 1.00 GiB kept free for jobs of a reserved "
            "qos, hold 2 states of tiny on train-0; 2 are placed; the first is expected to end in "
            "1 min",
        ]
        assert [(each.needed_bytes, each.free_bytes) for each in found] == 2 * [(4 * GIB, 3 * GIB)]
        assert ask(job(3), *two, kept=self.MEMORY, sites=self.SITES, reserved=True) == ()

    def test_what_reserved_jobs_have_taken_is_kept_no_more(self) -> None:
        fast = Settled(who=job(1), homes=at(job(1), "train-0").homes, reserved=True)
        assert ask(job(3), fast, at(job(2), "train-0"), kept=self.MEMORY, sites=self.SITES) == ()

    def test_one_that_only_what_is_kept_could_hold_waits_for_that(self) -> None:
        found = ask(job(1, image=2 * GIB), kept=self.MEMORY, sites=self.SITES)
        assert [each.sentence for each in found] == [
            "1.00 GiB of host memory on each node of train-0 is kept free for jobs of a reserved "
            "qos: wait for others to end, or ask for such a qos",
            "1 node x 3.00 GiB of host memory, beside 1.00 GiB kept free for jobs of a reserved "
            "qos, hold 0 states of tiny on train-0; 0 are placed",
        ]


_SIZES = st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 3), st.booleans())


@effort(100)
@given(
    st.lists(st.tuples(_SIZES, st.integers(0, 2), st.integers(0, 2)), max_size=7),
    _SIZES,
    st.sampled_from([Reservation(wpgs=1), Reservation(wpgs=3), Reservation(host_bytes=2 * GIB)]),
    st.sampled_from([FIT, ALONE]),
)
def test_every_obstacle_that_holds_without_the_reservation_is_told_with_it(
    living: list[tuple[tuple[int, int, int, bool], int, int]],
    wanted: tuple[int, int, int, bool],
    kept: Reservation,
    rules: Rules,
) -> None:
    sites = [site(f"{pool}-{n}", pool, host=9 * GIB) for pool in Pool for n in range(3)]

    def made(number: int, sizes: tuple[int, int, int, bool]) -> Applicant:
        return job(number, uses(train=sizes[0], sample=sizes[1]), image=sizes[2] * GIB)

    settled = [
        Settled(
            who=made(number, sizes),
            homes=at(made(number, sizes), f"train-{train}", f"rollout-{rollout}").homes,
            reserved=sizes[3],
        )
        for number, (sizes, train, rollout) in enumerate(living)
    ]
    who = made(99, wanted)
    found = ask(who, *settled, kept=kept, sites=sites, rules=rules)
    whole = ask(who, *settled, kept=Reservation(), sites=sites, rules=rules)
    others = [each for each in found if each.kind is not KEPT]
    if kept.wpgs:  # as where these are given back
        most = min(kept.wpgs, 2)  # never all
        there = [replace(e, draining=int(e.wpg.id[-1]) >= 3 - most) for e in sites]
        fewer = ask(who, *settled, kept=Reservation(), sites=there, rules=rules)
        assert others == [each for each in fewer if each.kind is not ObstacleKind.DRAINING]
        assert {e.pool for e in found if e.kind is KEPT} >= {each.pool for each in fewer}
    if whole:
        assert found  # nothing is easier for it
        assert others == [] or found[0].kind is not KEPT
    else:
        assert not found or found[0].kind is KEPT
    assert len({(each.kind, each.pool) for each in found}) == len(found)
