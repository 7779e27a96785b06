"""How often ranks may die while calls run again after a loss."""

import pytest

from plexrl_slurm.core.messages import Call, FunctionKind
from tests.core.hand import Hand, short
from tests.core.workloads import TRAIN, call, trained

CREATE, FB = FunctionKind.CREATE, FunctionKind.FORWARD_BACKWARD
A = trained(1, "a")


def calls_of(*kinds: FunctionKind) -> list[Call]:
    return [call(A, kind, seq) for seq, kind in enumerate(kinds)]


@pytest.fixture
def train() -> Hand:
    hand = Hand(TRAIN)
    hand.place(A)
    hand.up()
    return hand


def test_a_replay_that_gets_on_is_never_given_up(train: Hand) -> None:
    """Ranks are killed again and again, and every call runs well in between."""
    create, first, second = calls_of(CREATE, FB, FB)
    train.work(create, first)
    train.arrive(second)
    train.down()
    for _ in range(5):
        assert short(train.up()) == ["replay a/0"]
        for _ in range(3):
            train.down()
            assert short(train.up()) == ["replay a/0"]
        assert short(train.end(create)) == ["replay a/1"]
        for _ in range(3):
            train.down()
            train.up()
            assert short(train.end(create)) == ["replay a/1"]
        assert short(train.end(first)) == ["run a/2"]
        train.down(blame=False)
    train.up()
    train.end(create)
    assert short(train.end(first)) == ["run a/2"]
    assert short(train.end(second)) == ["finish a/2"]


def test_a_call_that_runs_for_the_first_time_is_given_up_after_a_replay_too(train: Hand) -> None:
    create, deadly = calls_of(CREATE, FB)
    train.work(create)
    train.arrive(deadly)
    for _ in range(2):
        train.down()
        train.up()
        train.down()  # of what runs again
        train.up()
        assert short(train.end(create)) == ["run a/1"]
    assert short(train.down()) == ["fail a/1: its ranks died 3 times while it ran"]
