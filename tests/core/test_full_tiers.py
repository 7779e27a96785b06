"""A tier without room breaks nobody: what is resident stays, and the switch is tried again."""

import pytest

from plexrl_slurm.core.explain import Asker, ReasonKind
from plexrl_slurm.core.handover import RETRY_US
from plexrl_slurm.core.lane import ROOM_WAITS
from plexrl_slurm.core.messages import Room
from tests.core.hand import SECOND, Hand, short
from tests.core.tiers import CREATE, FB, A, B, calls_of
from tests.core.workloads import TRAIN

FULL = "/dev/shm has 1 MiB free and 4 MiB are needed"
RETRY_S = RETRY_US / SECOND


@pytest.fixture
def train() -> Hand:
    """``a`` is resident with a step that no image has; ``b``, which has an image, is to come in."""
    hand = Hand(TRAIN)
    hand.place(A)
    hand.place(B, image=(1, 0), applied=(1, 0))
    hand.up()
    hand.work(*calls_of("a", CREATE))
    assert short(hand.arrive(*calls_of("b", FB, first=1))) == ["switch a -> b"]
    return hand


def test_the_resident_stays_and_goes_on_and_the_switch_is_tried_again(train: Hand) -> None:
    for _ in range(5):  # more than a damaged image would be tried
        assert short(train.switched(ok=False, room=Room.SHORT, error=FULL)) == []
        assert short(train.later(RETRY_S).tick()) == ["switch a -> b"]
    train.switched(ok=False, room=Room.SHORT, error=FULL)
    assert short(train.arrive(*calls_of("a", FB, first=1))) == ["run a/1"]
    train.end(*calls_of("a", FB, first=1))
    assert short(train.later(RETRY_S).tick()) == ["switch a -> b"]
    assert short(train.switched())[-1] == "run b/1"
    assert train.end(*calls_of("b", FB, first=1))


def test_people_are_told_what_it_waits_for(train: Hand) -> None:
    train.switched(ok=False, room=Room.SHORT, error=FULL)
    (reason,) = train.core.explain(B.id).reasons
    assert reason.kind is ReasonKind.NO_ROOM and FULL in reason.sentence
    assert reason.until_us == train.now + RETRY_US and train.wakes[-1] == reason.until_us
    for later_s, told in ((0, f"in {RETRY_S:.1f} s"), (RETRY_S - 1, "in 1.0 s"), (99, "at once")):
        said = train.core.explain(B.id, Asker(train.now + int(later_s * 1_000_000))).sentence
        assert said.endswith(f"; it tries again {told}")
    train.later(RETRY_S).tick()
    train.switched()
    assert FULL not in train.core.explain(B.id).sentence


def test_what_can_never_be_saved_makes_room_in_the_end_and_is_rebuilt(train: Hand) -> None:
    for _ in range(ROOM_WAITS):
        train.switched(ok=False, room=Room.SHORT, error=FULL)
        said = short(train.later(RETRY_S).tick())
    assert said == ["switch nothing -> b"]
    assert short(train.switched()) == ["run b/1"]
    train.end(*calls_of("b", FB, first=1))
    train.arrive(*calls_of("a", FB, first=1))
    assert short(train.later(60).tick()) == ["save b at (2, 0)"]
    assert short(train.switched())[-1] == "replay a/0"


def test_a_full_tier_under_the_ranks_hands_costs_the_device_and_breaks_nobody(train: Hand) -> None:
    for _ in range(5):
        train.switched(ok=False, room=Room.LOST, error=FULL)
        assert short(train.later(RETRY_S).tick()) == ["switch nothing -> b"]
    assert short(train.switched()) == ["run b/1"]


def test_for_one_that_is_created_the_resident_is_not_given_up_either() -> None:
    train = Hand(TRAIN)
    train.place(A, B)
    train.up()
    train.work(*calls_of("a", CREATE))
    assert short(train.arrive(*calls_of("b", CREATE))) == ["save a at (1, 0)"]
    assert short(train.switched(ok=False, room=Room.SHORT, error=FULL)) == []
    assert short(train.later(RETRY_S).tick()) == ["save a at (1, 0)"]
    assert short(train.switched())[-1] == "run b/0"
