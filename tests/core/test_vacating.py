"""Which hold all could leave: with every promise kept, for others that are used, or none."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.sites import Applicant, Partition, Settled, Site
from plexrl_slurm.core.vacating import vacant
from tests.core.test_admission import ALONE, FIT, GIB, PACK, job, site, uses

LIGHT = uses(train=3, sample=3)
#: Three holds, each with two training WPGs and two to sample on.
HOLDS = [
    (
        f"h{hold}",
        tuple(WpgId(f"{pool}-{hold * 2 + number}") for pool in Pool for number in range(2)),
    )
    for hold in range(3)
]
NAMES = [wpg for _, wpgs in HOLDS for wpg in wpgs]


def sites(**other: Site) -> list[Site]:
    known = {wpg: site(wpg, Pool(wpg.partition("-")[0]), nodes=(wpg,)) for wpg in NAMES}
    return list((known | {name.replace("_", "-"): each for name, each in other.items()}).values())


def town(*homes: tuple[Applicant, int, int], **other: Site) -> Partition:
    """Jobs, each with the numbers of its WPGs."""
    settled = [
        Settled(
            who=who,
            homes={Pool.TRAIN: WpgId(f"train-{train}"), Pool.ROLLOUT: WpgId(f"rollout-{rollout}")},
        )
        for who, train, rollout in homes
    ]
    return Partition(sites=sites(**other), settled=settled)


def found(partition: Partition, *fixed: int) -> str | None:
    before = partition.settled
    name = vacant(partition, HOLDS, FIT, lambda job: job not in fixed)
    assert list(partition.settled) == list(before)
    return name


ONE, TWO, THREE = (job(number, LIGHT) for number in (1, 2, 3))


def test_all_can_leave_the_hold_that_is_used_least() -> None:
    assert found(town((ONE, 0, 0), (TWO, 2, 2), (THREE, 3, 2))) == "h0"
    assert found(town((ONE, 0, 0), (THREE, 1, 1), (TWO, 2, 2))) == "h1"


def test_whoever_only_samples_there_has_to_find_a_place_as_well() -> None:
    noisy = job(1, uses(train=3, sample=60))
    assert found(town((ONE, 2, 0), (TWO, 2, 2))) == "h0"
    # Both samplers are too much for one WPG, and there are two on the other hold.
    third, fourth = job(3, uses(train=3, sample=60)), job(4, uses(train=3, sample=60))
    assert found(town((noisy, 2, 0), (third, 2, 2), (fourth, 2, 3))) is None
    assert found(town((noisy, 2, 0), (third, 2, 2), (TWO, 2, 2))) == "h0"


def test_nobody_leaves_for_a_hold_that_is_empty_or_where_there_is_only_one() -> None:
    heavy = job(1, uses(train=60)), job(2, uses(train=60)), job(3, uses(train=60))
    crowd = [(who, number, number) for number, who in enumerate(heavy)]
    assert found(town(*crowd)) is None  # though the third hold has room for all
    assert found(town((ONE, 0, 0), (TWO, 1, 1))) is None
    assert found(town()) is None


def test_all_leave_or_nobody() -> None:
    two = ((ONE, 0, 0), (TWO, 1, 1), (THREE, 2, 2), (job(4, LIGHT), 3, 3), (job(5, LIGHT), 3, 3))
    assert found(town(*two)) == "h0"
    assert found(town(*two), 2) == "h1"
    assert found(town(*two), 2, 4) is None


def test_what_leaves_has_memory_and_as_many_gpus_there() -> None:
    homes = (ONE, 0, 0), (TWO, 2, 2), (THREE, 3, 3)
    small = {f"train_{n}": site(f"train-{n}", host=2 * GIB, nodes=(f"n{n}",)) for n in (2, 3)}
    assert found(town(*homes, **small)) == "h1"
    tiny = {f"train_{n}": site(f"train-{n}", device=GIB // 2) for n in (2, 3)}
    assert found(town(*homes[:2], **tiny)) == "h1"
    larger = {f"train_{n}": site(f"train-{n}", gpus=2) for n in (2, 3)}
    assert found(town(*homes, **larger)) is None
    gone = {name: replace(each, draining=True) for name, each in small.items()}
    assert found(town(*homes, **gone)) == "h1"


@pytest.mark.parametrize("rules", [ALONE, PACK])
def test_without_promises_nobody_leaves(rules: object) -> None:
    partition = town((ONE, 0, 0), (TWO, 2, 2))
    assert vacant(partition, HOLDS, rules, lambda _: True) is None  # type: ignore[arg-type]


def test_holds_of_which_wpgs_are_gone_are_no_trouble() -> None:
    partition = town((ONE, 0, 0), (TWO, 2, 2))
    more = [*HOLDS, ("h9", (WpgId("train-99"),))]
    assert vacant(partition, more, FIT, lambda _: True) == "h0"
    assert partition.homes[JobId(1)][Pool.TRAIN] == "train-0"
