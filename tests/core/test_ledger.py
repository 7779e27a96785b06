"""Splitting a stretch, and the open stretch of a WPG."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.ids import CallId, CauseId, JobId, WpgId
from plexrl_slurm.core.ledger import IDLE, Meter, Use, split
from plexrl_slurm.core.messages import Activity, Pool, Wpg

CAUSE = CauseId("test")
WPG = Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=4)
TRAINING = Use(activity=Activity.BUSY, jobs=frozenset({JobId(1)}), call=CallId("c"), began_us=10)


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        pytest.param(10, {1: 1, 2: 1}, {1: 5, 2: 5}, id="even"),
        pytest.param(10, {2: 1, 1: 1, 3: 1}, {1: 4, 2: 3, 3: 3}, id="remainder to the lowest id"),
        pytest.param(7, {5: 0, 9: 3}, {5: 0, 9: 7}, id="without tokens nothing is paid"),
        pytest.param(7, {5: 0, 9: 0}, {5: 4, 9: 3}, id="nobody has tokens: equal"),
    ],
)
def test_split(total: int, weights: dict[JobId, int], shares: dict[JobId, int]) -> None:
    assert split(total, weights) == shares


@given(
    st.integers(0, 10**15),
    st.dictionaries(st.integers(1, 99).map(JobId), st.integers(0, 10**6), min_size=1),
)
def test_shares_sum_to_the_whole(total: int, weights: dict[JobId, int]) -> None:
    shares = split(total, weights)
    assert sum(shares.values()) == total
    assert min(shares.values()) >= 0


def test_a_stretch_is_charged_when_the_use_changes() -> None:
    meter = Meter(WPG, 5)
    (down,) = meter.turn(TRAINING, 10, (), CAUSE)
    assert (down.activity, down.job, down.gpu_us) == (Activity.DOWN, None, 20)
    assert meter.turn(TRAINING, 12, (), CAUSE) == []
    (busy,) = meter.turn(IDLE, 15, (), CAUSE)
    assert (busy.job, busy.call, busy.start_us, busy.stop_us) == (1, "c", 10, 15)
    assert meter.turn(TRAINING, 15, (), CAUSE) == [], "an empty stretch is no row"


@pytest.mark.parametrize(
    ("use", "seconds"),
    [
        pytest.param(IDLE, 60, id="a minute"),
        pytest.param(Use(activity=Activity.BUSY, jobs=frozenset({JobId(1)})), 10, id="shared"),
    ],
)
def test_a_long_stretch_is_written_down_while_it_lasts(use: Use, seconds: int) -> None:
    meter = Meter(WPG, 0)
    meter.turn(use, 0, (), CAUSE)
    assert not meter.due(seconds * 1_000_000 - 1)
    assert meter.due(seconds * 1_000_000)
    assert len(meter.cut(seconds * 1_000_000, (), CAUSE)) == 1
    assert not meter.due(seconds * 1_000_000 + 1)
