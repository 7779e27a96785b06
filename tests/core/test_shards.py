"""Flat tensors of one number of ranks and stage are those of another, element by element."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.shards import Groups, Layout, moves

GROUPS = [[("a", 7), ("b", 12)], [("c", 1), ("d", 5)]]
SHAPES = st.tuples(st.integers(1, 5), st.booleans())
SIZES = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=3)


def sizes_of(layout: Layout) -> list[int]:
    """Of a rank's tensors: padded, and at stage 3 in sub-groups of their own."""
    if layout.by_parameter:
        return [sum(-(-size // layout.world) for _, size in group) for group in layout.groups]
    return [
        math.ceil(sum(size for _, size in group) / (2 * layout.world)) * 2
        for group in layout.groups
    ]


def lines_of(layout: Layout, values: dict[str, list[int]]) -> list[list[int]]:
    """Each rank's line."""
    lines = []
    for rank in range(layout.world):
        sizes = sizes_of(layout)
        line = [0] * sum(sizes)
        for piece in layout.pieces(rank, sizes):
            part = values[piece.name][piece.start : piece.start + piece.length]
            line[piece.at : piece.at + piece.length] = part
        lines.append(line)
    return lines


def named(groups: list[list[int]]) -> Groups:
    return [[(f"p{i}.{j}", n) for j, n in enumerate(group)] for i, group in enumerate(groups)]


@given(SIZES, SHAPES, SHAPES)
def test_any_shape_becomes_any_other(
    groups: list[list[int]], there: tuple[int, bool], here: tuple[int, bool]
) -> None:
    names = named(groups)
    values, count = {}, 1
    for name, size in (each for group in names for each in group):
        values[name] = list(range(count, count + size))
        count += size
    old = Layout(groups=names, world=there[0], by_parameter=there[1])
    new = Layout(groups=names, world=here[0], by_parameter=here[1])
    lines = lines_of(old, values)
    found = {rank: old.pieces(rank, sizes_of(old)) for rank in range(old.world)}
    for rank, wanted in enumerate(lines_of(new, values)):
        line = [0] * len(wanted)
        for move in moves(new.pieces(rank, sizes_of(new)), found):
            part = lines[move.source][move.source_at : move.source_at + move.length]
            line[move.at : move.at + move.length] = part
        assert line == wanted


@pytest.mark.parametrize(
    ("layout", "sizes", "reason"),
    [
        (Layout(groups=GROUPS, world=2, by_parameter=True), [10, 5], "15 elements where 14"),
        (Layout(groups=GROUPS, world=2, by_parameter=False), [10], "1 tensors for 2"),
        (Layout(groups=GROUPS, world=2, by_parameter=False), [9, 3], "2 x 9 elements where 19"),
    ],
    ids=["cut parameters", "groups", "cut groups"],
)
def test_tensors_of_another_size_do_not_fit(layout: Layout, sizes: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        layout.pieces(0, sizes)


def test_what_no_rank_has_is_missing() -> None:
    layout = Layout(groups=GROUPS, world=2, by_parameter=True)
    wanted = Layout(groups=GROUPS, world=1, by_parameter=True).pieces(0, [19, 6])
    with pytest.raises(ValueError, match="3 elements of a are missing"):
        moves(wanted, {0: layout.pieces(0, [10, 4])})
