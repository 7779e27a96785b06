"""Who may leave a WPG now: who runs, came long ago, and stays for long."""

import pytest

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.leaving import LeaveRules, Leaves, Leaving, still_right
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.sites import Partition, Settled
from tests.core.test_admission import FIT, job, site, uses

NOW, LEAST = 10_000, 1_000
RULES = LeaveRules(rules=FIT, regroup_us=LEAST)
SITES = [
    *(site(f"train-{number}") for number in range(2)),
    *(site(f"rollout-{number}", Pool.ROLLOUT) for number in range(2)),
]
CROWDED, ROOMY = WpgId("train-0"), WpgId("train-1")


def crowd(*loads: int, ends_us: int | None = None) -> Partition:
    """All train on one WPG."""
    homes = {Pool.TRAIN: CROWDED, Pool.ROLLOUT: WpgId("rollout-0")}
    return Partition(
        sites=SITES,
        settled=[
            Settled(who=job(number, uses(train=load, sample=1), ends_us=ends_us), homes=homes)
            for number, load in enumerate(loads, 1)
        ],
    )


@pytest.mark.parametrize(
    ("since_us", "ends_us", "may"),
    [
        pytest.param(NOW - LEAST, None, True, id="long ago"),
        pytest.param(NOW - LEAST + 1, None, False, id="not long ago"),
        pytest.param(NOW + 5, None, False, id="after now: the clock was set back"),
        pytest.param(None, None, False, id="it does not run"),
        pytest.param(0, NOW + LEAST, True, id="it stays for long"),
        pytest.param(0, NOW + LEAST - 1, False, id="it will have ended soon"),
        pytest.param(0, NOW - 1, False, id="it should have ended"),
    ],
)
def test_who_may_leave(since_us: int | None, ends_us: int | None, may: bool) -> None:
    since = {} if since_us is None else {JobId(1): since_us}
    leaves = Leaves(RULES, crowd(3, ends_us=ends_us), since, NOW)
    assert leaves.may_leave(JobId(1)) is may
    assert not leaves.may_leave(JobId(2))


def test_the_first_that_somebody_has_to_leave_is_left_and_the_rest_is_not_asked_for() -> None:
    asked: list[WpgId] = []

    def ask() -> object:
        for wpg in (ROOMY, CROWDED, WpgId("rollout-0")):
            asked.append(wpg)
            yield wpg

    leaves = Leaves(RULES, crowd(45, 20), {JobId(1): 0, JobId(2): 0}, NOW)
    found = leaves.relieved(ask())  # type: ignore[arg-type]
    assert found == Leaving(wpg=CROWDED, homes=((JobId(2), ROOMY),), merges=False)
    assert asked == [ROOMY, CROWDED]
    assert leaves.merged() is None


def test_it_is_right_as_long_as_the_same_would_leave_for_the_same() -> None:
    found = Leaving(wpg=CROWDED, homes=((JobId(2), ROOMY),), merges=False)
    assert still_right(crowd(45, 20), RULES, found)
    assert not still_right(crowd(45), RULES, found)
    assert not still_right(crowd(3, 3), RULES, found)
    there = crowd(45, 20, 3)
    there.settle(Settled(who=job(3, uses(train=60)), homes={Pool.TRAIN: ROOMY}))
    assert not still_right(there, RULES, found)
