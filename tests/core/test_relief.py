"""Who leaves a WPG whose promises break: to a WPG of its shape, with memory, or nobody."""

from dataclasses import replace

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.relief import relieve
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
