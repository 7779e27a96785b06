"""What several agents say of one gang, put together."""

from typing import Any

import pytest

from plexrl_slurm.daemons.gang_facts import Said, common_images, merge
from plexrl_slurm.transport import messages as tm


def done(call: str, number: int = 0, *, result: bytes = b"") -> tm.Done:
    return tm.Done(
        number=1, wpg="train-0", order="o", what="run", ok=True, call=call, part=number,
        result=result,
    )  # fmt: skip


def said(**facts: Any) -> Said:
    values: dict[str, Any] = {"state": "up", "incarnation": 4, "resident": "a", "progress": (3, 0)}
    return Said(**(values | facts))


def image(deployment: str, seq: int) -> tm.ImageHeld:
    return tm.ImageHeld(wpg="train-0", deployment=deployment, progress=(seq, 0), bytes=8)


def test_parts_that_agree_are_a_gang_that_goes_on() -> None:
    found = merge([said(), said()])
    assert found is not None
    assert (found.resident, found.progress, found.running) == ("a", (3, 0), ())


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"state": "down"}, id="one is down"),
        pytest.param({"state": "moving"}, id="one waits in a switch"),
        pytest.param({"incarnation": 5}, id="one is of another incarnation"),
        pytest.param({"resident": "b"}, id="a switch reached one of them"),
        pytest.param({"progress": (4, 0)}, id="a call reached one of them, and ended"),
        pytest.param({"running": {("c9", 0)}}, id="a call reached one of them, which waits"),
    ],
)
def test_parts_that_do_not_agree_must_start_anew(other: dict[str, Any]) -> None:
    assert merge([said(), said(**other)]) is None
    assert merge([said(**other), said()]) is None


def test_a_call_that_has_ended_on_one_part_runs_until_it_has_on_all() -> None:
    ahead = said(progress=(4, 0), finished=[done("c3")])
    found = merge([ahead, said(running={("c3", 0)})])
    assert found is not None
    assert (found.progress, found.running, found.finished) == ((3, 0), (("c3", 0),), [])


def test_a_call_that_has_ended_on_all_parts_has_ended_and_the_first_tells_its_result() -> None:
    first = done("c3", result=b"x")
    found = merge([said(finished=[first]), said(finished=[done("c3")])])
    assert found is not None
    assert found.finished == [first]


def test_an_end_that_one_part_has_been_thanked_for_is_written_down() -> None:
    found = merge([said(finished=[done("c3")]), said()])
    assert found is not None
    assert found.finished == []


def test_the_newest_image_that_every_part_has_counts() -> None:
    one = [image("a", 3), image("a", 5), image("b", 2), image("c", 1)]
    other = [image("a", 3), image("b", 1), image("b", 2)]
    settled, orders = common_images([one, other])
    assert settled == {"a": (3, 0), "b": (2, 0)}
    assert orders == {"a": (3, 0), "b": (2, 0), "c": None}
