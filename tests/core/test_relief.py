"""Who leaves a WPG whose promises break: to a WPG of its shape, with memory, or nobody."""

from dataclasses import replace

from plexrl_slurm.core.grouping import Placement as Way
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.relief import Merge, merge, relieve
from plexrl_slurm.core.sites import Applicant, Partition, Settled, Site
from tests.core.test_admission import FIT, GIB, PACK, site, uses
from tests.core.test_admission import job as one_of

ROLLOUTS = [site(f"rollout-{number}", Pool.ROLLOUT) for number in range(4)]
HEAVY, LIGHT = uses(train=45), uses(train=20)


def heavy(number: int) -> Applicant:
    return one_of(number, HEAVY)


def town(*homes: tuple[Applicant, str], sites: list[Site]) -> Partition:
    settled = [
        Settled(
            who=who, homes={Pool.TRAIN: WpgId(home), Pool.ROLLOUT: WpgId(f"rollout-{who.job % 4}")}
        )
        for who, home in homes
    ]
    return Partition(sites=[*sites, *ROLLOUTS], settled=settled)


def leaves(partition: Partition, *fixed: int) -> tuple[JobId, WpgId] | None:
    return relieve(partition, WpgId("train-0"), FIT, lambda job: job not in fixed)


TWO = [site("train-0"), site("train-1")]
CROWDED = ((heavy(1), "train-0"), (one_of(2, LIGHT), "train-0"))


def test_the_lightest_leaves_for_an_empty_wpg() -> None:
    assert leaves(town(*CROWDED, sites=TWO)) == (2, "train-1")
    assert leaves(town(*CROWDED, sites=TWO), 2) == (1, "train-1")


def test_nobody_leaves_while_promises_are_kept_or_where_nobody_may() -> None:
    calm = ((one_of(1, LIGHT), "train-0"), (one_of(2, LIGHT), "train-0"))
    assert leaves(town(*calm, sites=TWO)) is None
    assert leaves(town(*CROWDED, sites=TWO), 1, 2) is None
    assert relieve(town(*CROWDED, sites=TWO), WpgId("train-0"), PACK, lambda _: True) is None
    assert relieve(town(*CROWDED, sites=TWO), WpgId("train-7"), FIT, lambda _: True) is None


def test_a_next_home_has_the_shape_and_is_not_given_back() -> None:
    assert leaves(town(*CROWDED, sites=[TWO[0], site("train-1", gpus=2)])) is None
    assert leaves(town(*CROWDED, sites=[TWO[0], site("train-1", draining=True)])) is None


def test_a_next_home_has_memory_for_it() -> None:
    full = replace(site("train-1"), device_bytes=GIB // 2)
    assert leaves(town(*CROWDED, sites=[TWO[0], full])) is None
    # Somebody lives there whose images leave no room, though both promises would be kept.
    small = site("train-1", host=2 * GIB)
    third = (one_of(3, uses(train=5), image=GIB // 2 + GIB // 4), "train-1")
    assert leaves(town(*CROWDED, third, sites=[TWO[0], small])) is None
    assert leaves(town(*CROWDED, third, sites=TWO)) == (2, "train-1")


def test_nobody_goes_where_another_promise_would_break() -> None:
    there = (heavy(3), "train-1")
    assert leaves(town(*CROWDED, there, sites=TWO)) is None


# ---- rollout WPGs ------------------------------------------------------------------------


def sampling(*homes: tuple[Applicant, str], sites: list[Site] | None = None) -> Partition:
    """Each trains alone."""
    settled = [
        Settled(who=who, homes={Pool.TRAIN: WpgId(f"train-{who.job}"), Pool.ROLLOUT: WpgId(home)})
        for who, home in homes
    ]
    trains = [site(f"train-{number}") for number in range(6)]
    return Partition(sites=[*trains, *(ROLLOUTS if sites is None else sites)], settled=settled)


def stops_sampling(partition: Partition, *fixed: int) -> tuple[JobId, WpgId] | None:
    return relieve(partition, WpgId("rollout-0"), FIT, lambda job: job not in fixed)


LONG, SHORT = uses(sample=45), uses(sample=20)
NOISY = ((one_of(1, LONG), "rollout-0"), (one_of(2, SHORT), "rollout-0"))


def test_whoever_samples_least_leaves_for_the_rollout_wpg_that_samples_least() -> None:
    third = (one_of(3, SHORT), "rollout-1")
    assert stops_sampling(sampling(*NOISY, third)) == (2, "rollout-2")
    assert stops_sampling(sampling(*NOISY, third), 2) == (1, "rollout-2")
    assert stops_sampling(sampling(*NOISY, third), 1, 2) is None


def test_nobody_stops_sampling_where_promises_are_kept_or_nowhere_is_better() -> None:
    calm = ((one_of(1, uses(sample=3)), "rollout-0"), (one_of(2, uses(sample=3)), "rollout-0"))
    assert stops_sampling(sampling(*calm)) is None
    there = (one_of(3, LONG), "rollout-1")
    assert stops_sampling(sampling(*NOISY, there, sites=ROLLOUTS[:2])) is None
    full = replace(ROLLOUTS[1], host_bytes=GIB // 8)
    assert stops_sampling(sampling(*NOISY, sites=[ROLLOUTS[0], full])) is None
    given_back = [replace(each, draining=True) for each in ROLLOUTS[1:]]
    assert stops_sampling(sampling(*NOISY, sites=[ROLLOUTS[0], *given_back])) is None


# ---- merging -----------------------------------------------------------------------------

SMALL = uses(train=3)
THREE = [site("train-0"), site("train-1"), site("train-2")]


def thin(*homes: str, sites: list[Site] | None = None, **facts: int) -> Partition:
    settled = [(one_of(number, SMALL, **facts), home) for number, home in enumerate(homes, 1)]
    return town(*settled, sites=THREE if sites is None else sites)


def emptied(partition: Partition, *fixed: int) -> Merge | None:
    return merge(partition, FIT, lambda job: job not in fixed)


def test_the_wpg_that_uses_least_is_emptied_into_others_that_have_jobs() -> None:
    assert emptied(thin("train-0", "train-0", "train-1")) == Merge(
        wpg=WpgId("train-1"), homes=((JobId(3), WpgId("train-0")),)
    )
    # Not onto an empty one, which would gain nothing.
    assert emptied(thin("train-0")) is None
    assert emptied(thin("train-0", "train-0")) is None


def test_nobody_merges_who_may_not_move_or_would_break_a_promise() -> None:
    assert emptied(thin("train-0", "train-1"), 1, 2) is None
    assert emptied(thin("train-0", "train-1"), 1) == Merge(
        wpg=WpgId("train-1"), homes=((JobId(2), WpgId("train-0")),)
    )
    busy = town((heavy(1), "train-0"), (heavy(2), "train-1"), sites=THREE)
    assert emptied(busy) is None
    strict = [(one_of(n, SMALL, promise=1.0), f"train-{n}") for n in (0, 1)]
    assert emptied(town(*strict, sites=THREE)) is None


def test_a_larger_wpg_is_freed_first_and_only_into_its_size() -> None:
    large = [site("train-8", gpus=2), site("train-9", gpus=2)]
    both = thin("train-0", "train-1", "train-8", "train-9", sites=[*THREE, *large])
    found = emptied(both)
    assert found is not None and found.wpg == "train-8"
    assert found.homes == ((JobId(3), WpgId("train-9")),)
    assert emptied(thin("train-0", "train-8", sites=[THREE[0], large[0]])) is None
    given_back = replace(THREE[1], draining=True)
    assert emptied(thin("train-0", "train-1", sites=[THREE[0], given_back])) is None


def test_merging_asks_for_memory_for_all_of_them_together() -> None:
    # Two of a GiB and a spare slab are in 3 GiB; a third is not.
    tight = [site("train-0", host=3 * GIB), site("train-1", host=3 * GIB)]
    assert emptied(thin("train-0", "train-1", sites=tight)) is not None
    crowd = thin("train-0", "train-0", "train-1", "train-1", sites=tight)
    homes = {job: dict(found) for job, found in crowd.homes.items()}
    assert emptied(crowd) is None
    assert {job: dict(found) for job, found in crowd.homes.items()} == homes


def test_only_the_wpg_that_is_asked_for() -> None:
    partition = thin("train-0", "train-0", "train-1")
    assert merge(partition, FIT, lambda _: True, only=[WpgId("train-0")]) == Merge(
        wpg=WpgId("train-0"),
        homes=((JobId(1), WpgId("train-1")), (JobId(2), WpgId("train-1"))),
    )
    assert merge(partition, FIT, lambda _: True, only=[WpgId("train-2")]) is None
    spread = Rules(placement=Way.SPREAD)
    assert merge(partition, spread, lambda _: True) is None
