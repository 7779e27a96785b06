"""The newest image turns out to be damaged or gone: an older one and the calls since rebuild it."""

import pytest

from plexrl_slurm.core.messages import ImagesLeft
from plexrl_slurm.core.ordering import Program
from tests.core.hand import Hand, short
from tests.core.tiers import CREATE, FB, OPTIM, A, B, calls_of, durable, stepped
from tests.core.workloads import TRAIN

LOST = (
    "its state is lost: its newest image is gone, and so are calls that no older one "
    "contains; start from a checkpoint"
)


def left(image: tuple[int, int] | None, durable: tuple[int, int] | None = None) -> ImagesLeft:
    return ImagesLeft(image=image, durable=durable)


def away(hand: Hand, *, arrives: int) -> Hand:
    """The gang has died, and the next call of ``a`` waits for its image."""
    hand.down()
    hand.arrive(*calls_of("a", FB, first=arrives))
    hand.up()
    return hand


def spared(every: int = 2) -> Hand:
    """As ``durable``, and the durable image before the newest counts too."""
    hand = Hand(TRAIN, image_every=1, durable_every=every, spare_images=True)
    hand.place(A, B)
    hand.up()
    return hand


def replayed(hand: Hand, first: int, last: int) -> list[str]:
    """What follows when the calls of steps from ``first`` to ``last`` end again."""
    said: list[str] = []
    for seq in range(first, last + 1):
        (call,) = calls_of("a", CREATE if seq == 0 else FB if seq % 2 else OPTIM, first=seq)
        said = short(hand.end(call))
        if said and said[0].startswith("save"):
            said = short(hand.switched())
    return said


def test_the_durable_image_and_the_calls_since_rebuild_what_a_damaged_one_had() -> None:
    train = away(stepped(durable(every=5), steps=3), arrives=7)
    assert short(train.switched(left=left((3, 0), (3, 0)))) == ["replay a/3"]
    assert replayed(train, 3, 6) == ["run a/7"]
    assert "is damaged or gone" in "\n".join(train.core.story(A.id))


def test_the_sentence_says_what_was_damaged() -> None:
    train = away(stepped(durable(every=5), steps=2), arrives=5)
    train.switched(left=left((3, 0), (3, 0)), error="block 3 does not match")
    (line,) = [line for line in train.core.story(A.id) if "damaged" in line]
    assert line.endswith(
        "image (5, 0) is damaged or gone (block 3 does not match); what is left is (3, 0)"
    )


def test_without_any_image_left_it_is_created_anew() -> None:
    train = durable(image_every=1)
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    away(train, arrives=2)
    assert short(train.switched(ok=False, left=left(None))) == ["replay a/0"]
    assert short(train.end(*calls_of("a", CREATE))) == ["replay a/1"]
    assert short(train.end(*calls_of("a", OPTIM, first=1))) == ["run a/2"]


def test_what_no_image_has_and_no_call_rebuilds_is_said_to_be_lost() -> None:
    train = Hand(TRAIN, image_every=1)
    train.place(A)
    train.up()
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    away(train, arrives=2)
    assert short(train.switched(ok=False, left=left(None))) == [f"fail a/2: {LOST}"]
    assert short(train.arrive(*calls_of("a", FB, first=3))) == [f"fail a/3: {LOST}"]


def test_what_leaves_in_the_same_switch_is_saved() -> None:
    train = stepped(durable(every=5), steps=2)
    train.arrive(*calls_of("b", CREATE))
    train.later(30).tick()
    train.end(*calls_of("b", CREATE))
    assert short(train.later(30).arrive(*calls_of("a", FB, first=5))) == ["switch b -> a"]
    said = short(train.switched(left=left((3, 0), (3, 0))))
    assert said == ["replay a/3", "persist b at (1, 0) from train-0"]


# -- the newest durable image is damaged too --------------------------------------------------


def test_calls_are_kept_until_the_durable_image_before_the_newest_has_them() -> None:
    train = spared()
    train.work(*calls_of("a", CREATE, FB, OPTIM))
    train.switched()
    assert short(train.persisted(A, (3, 0))) == [], "create would have to run again"
    train.work(*calls_of("a", FB, OPTIM, FB, OPTIM, first=3))
    train.switched()
    assert short(train.persisted(A, (7, 0))) == ["forget a below (3, 0)"]


def test_the_durable_image_before_the_newest_is_good_enough() -> None:
    train = stepped(spared(), steps=3)
    train.persisted(A, (7, 0))
    away(train, arrives=7)
    assert short(train.switched(left=left((3, 0), (3, 0)))) == ["replay a/3"]
    said = replayed(train, 3, 6)
    assert said == ["run a/7", "persist a at (7, 0) from train-0"]


def test_both_durable_images_damaged_lose_what_is_older() -> None:
    train = stepped(spared(), steps=3)
    train.persisted(A, (7, 0))
    away(train, arrives=7)
    assert short(train.switched(ok=False, left=left(None))) == [f"fail a/7: {LOST}"]


def test_the_only_durable_image_damaged_has_it_created_anew() -> None:
    train = stepped(spared(every=5), steps=2)
    away(train, arrives=5)
    assert short(train.switched(ok=False, left=left(None))) == ["replay a/0"]


def test_after_a_restart_the_spare_counts_as_before() -> None:
    train = spared()
    train.restart()
    train.place(A, image=None, applied=(7, 0), durable=(7, 0), spare=(3, 0))
    train.arrive(*calls_of("a", FB, OPTIM, FB, OPTIM, first=3), done=True)
    train.arrive(*calls_of("a", FB, first=7))
    assert short(train.up()) == ["switch nothing -> a"]
    assert short(train.switched(left=left((3, 0), (3, 0)))) == ["replay a/3"]


def test_an_open_step_in_the_spare_is_open_again() -> None:
    train = spared(every=1)
    train.work(*calls_of("a", CREATE, FB))
    (create,) = calls_of("b", CREATE)
    train.arrive(create)
    train.later(3).tick()  # a leaves in the middle of its step
    train.switched()
    train.end(create)
    train.persisted(A, (2, 0))
    train.arrive(*calls_of("a", OPTIM, first=2))
    train.later(30).tick()
    train.switched()
    train.end(*calls_of("a", OPTIM, first=2))
    train.switched()
    train.persisted(A, (3, 0))
    away(train, arrives=3)
    train.switched(left=left((2, 0), (2, 0)))
    program = train.core._books.homes[A.id][1].program
    assert program is not None
    assert (program.position, program.open_step) == ((2, 0), True)


# -- found by whoever copies it ---------------------------------------------------------------


def test_an_image_found_damaged_while_it_is_copied_is_no_image() -> None:
    train = stepped(durable(every=1), steps=2)
    train.down()
    said = short(train.persisted(A, (5, 0), ok=False, left=left((3, 0), (3, 0))))
    assert said == []
    train.arrive(*calls_of("a", FB, first=5))
    assert short(train.up()) == ["switch nothing -> a"]
    assert short(train.switched()) == ["replay a/3"]


def test_of_a_resident_whose_image_is_damaged_another_is_made() -> None:
    train = stepped(durable(every=1), steps=2)
    said = short(train.persisted(A, (5, 0), ok=False, left=left((3, 0), (3, 0))))
    assert "save a at (5, 0)" in [*said, *short(train.drain())]


def test_a_damaged_image_does_not_keep_a_wpg_from_being_given_back() -> None:
    train = stepped(durable(every=1), steps=2)
    train.arrive(*calls_of("b", CREATE))
    train.later(30).tick()
    train.end(*calls_of("b", CREATE))
    assert short(train.drain()) == ["save b at (1, 0)"]
    assert short(train.switched()) == ["persist b at (1, 0) from train-0"]
    train.persisted(B, (1, 0))
    said = train.persisted(A, (5, 0), ok=False, left=left((3, 0), (3, 0)))
    assert short(said) == ["drained train-0"]


def leaving(for_whom: str) -> Hand:
    """``a`` is being saved at (6, 0), and its image at (5, 0) is being copied; ``b`` is to come."""
    train = stepped(durable(every=1), steps=2)
    first = CREATE if for_whom == "new" else FB
    if for_whom == "old":
        train.arrive(*calls_of("b", CREATE))
        train.later(30).tick()
        train.end(*calls_of("b", CREATE))
        train.arrive(*calls_of("a", FB, first=5))
        assert short(train.later(30).tick()) == []
        train.switched()
        train.end(*calls_of("a", FB, first=5))
    else:
        train.work(*calls_of("a", FB, first=5))
    train.arrive(*calls_of("b", first, first=0 if for_whom == "new" else 1))
    said = short(train.later(30).tick())
    assert said == ["save a at (6, 0)" if for_whom == "new" else "switch a -> b"]
    return train


def program_of_a(train: Hand) -> Program:
    program = train.core._books.homes[A.id][1].program
    assert program is not None
    return program


@pytest.mark.parametrize("for_whom", ["new", "old"])
def test_an_image_found_damaged_while_a_newer_one_is_saved_is_none_if_that_fails(
    for_whom: str,
) -> None:
    train = leaving(for_whom)
    train.persisted(A, (5, 0), ok=False, left=left((3, 0), (3, 0)))
    train.switched(ok=False)
    program = program_of_a(train)
    assert (program.image, program.position, program.applied) == ((3, 0), (3, 0), (6, 0))


@pytest.mark.parametrize("for_whom", ["new", "old"])
def test_an_image_found_damaged_while_a_newer_one_is_saved_does_not_matter_then(
    for_whom: str,
) -> None:
    train = leaving(for_whom)
    assert short(train.persisted(A, (5, 0), ok=False, left=left((3, 0), (3, 0)))) == []
    said = short(train.switched())
    assert "persist a at (6, 0) from train-0" in said
    program = program_of_a(train)
    assert (program.image, program.position, program.dirty) == ((6, 0), (6, 0), False)


def alone_on_the_device() -> Hand:
    """No image of ``a`` is left, nor the calls to make it anew; the device has it."""
    train = stepped(spared(), steps=3)
    train.persisted(A, (7, 0))
    for first in (7, 9):
        train.work(*calls_of("a", FB, OPTIM, first=first))
        said = short(train.switched())
    assert said == ["persist a at (11, 0) from train-0"]
    train.persisted(A, (11, 0), ok=False, left=left(None))
    return train


def test_a_resident_without_any_image_goes_on_and_is_saved() -> None:
    train = alone_on_the_device()
    assert short(train.arrive(*calls_of("a", FB, first=11))) == ["run a/11"]
    assert short(train.end(*calls_of("a", FB, first=11))) == ["finish a/11"]
    train.arrive(*calls_of("b", CREATE))
    assert short(train.later(30).tick()) == ["save a at (12, 0)"]
    assert short(train.switched()) == ["run b/0", "persist a at (12, 0) from train-0"]
    train.down()
    said = short(train.arrive(*calls_of("a", OPTIM, first=12)))
    assert said == [], "its image has all of it"


def test_a_resident_without_any_image_is_lost_with_its_device() -> None:
    train = alone_on_the_device()
    train.down()
    assert short(train.arrive(*calls_of("a", FB, first=11))) == [f"fail a/11: {LOST}"]
