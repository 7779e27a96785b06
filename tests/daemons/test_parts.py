"""Long calls in parts."""

import numpy as np
import pytest

from plexrl_slurm import wire
from plexrl_slurm.daemons.parts import cut, cuts, join, tokens_of


def body(*lengths: int) -> wire.ForwardBackward:
    data = [
        wire.Datum(wire.Array.of(np.full(length, index, dtype=np.int64)), {})
        for index, length in enumerate(lengths)
    ]
    return wire.ForwardBackward(data, "cross_entropy", {"x": 1.0})


@pytest.mark.parametrize(
    ("lengths", "limit", "starts"),
    [
        pytest.param((3, 3, 3), 100, [0], id="short enough"),
        pytest.param((3, 3, 3), 6, [0, 2], id="two fit"),
        pytest.param((3, 3, 3), 5, [0, 1, 2], id="one fits"),
        pytest.param((9, 1, 1), 5, [0, 1], id="one sequence longer than the limit goes alone"),
    ],
)
def test_cuts(lengths: tuple[int, ...], limit: int, starts: list[int]) -> None:
    assert cuts(body(*lengths), max_tokens=limit) == starts


def test_the_parts_together_are_the_whole() -> None:
    whole = body(4, 5, 6, 7)
    parts = [cut(whole, part=part, max_tokens=10) for part in range(3)]
    assert [datum for part in parts for datum in part.data] == whole.data
    assert all(part.loss_fn_config == {"x": 1.0} for part in parts)
    assert sum(tokens_of(part) for part in parts) == tokens_of(whole) == 22


def test_results_are_joined_by_the_reduction_in_their_names() -> None:
    def output(value: float, *lengths: int) -> wire.TrainOutput:
        arrays = [wire.Array.of(np.full(n, value, dtype=np.float32)) for n in lengths]
        names = ("loss:sum", "a:mean", "b:min", "c:max")
        return wire.TrainOutput(arrays, dict.fromkeys(names, value))

    joined = join([output(1.0, 2), output(4.0, 3, 3)])
    assert isinstance(joined, wire.TrainOutput)
    assert joined.metrics == {"loss:sum": 5.0, "a:mean": 3.0, "b:min": 1.0, "c:max": 4.0}
    assert [array.shape for array in joined.logprobs] == [(2,), (3,), (3,)]


def test_a_failed_part_is_the_result_of_the_whole() -> None:
    failed = wire.Failed("no")
    assert join([wire.TrainOutput([], {}), failed]) == failed
