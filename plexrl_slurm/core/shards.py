"""Which part of which parameter lies where in the flat tensors of a rank, by ZeRO stage.

A rank's *line* is its tensors of one kind (masters, a moment, weights), one after another: one
tensor for each parameter group at stages 1 and 2, one for each sub-group at stage 3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Parameter groups: names and numbers of elements, in DeepSpeed's order.
Groups = Sequence[Sequence[tuple[str, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive elements of one parameter on one rank."""

    name: str
    #: Of its first element in the parameter, counted flat.
    start: int
    length: int
    #: Of its first element in the rank's line.
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one kind of tensor lies on the ranks."""

    groups: Groups
    #: Ranks that share the tensors out among them; 1: each has them whole.
    world: int
    #: Every parameter is cut in ``world``, and not each group's flat tensor.
    by_parameter: bool

    def pieces(self, rank: int, sizes: Sequence[int]) -> tuple[Piece, ...]:
        """What a rank has in tensors of these sizes; raises ``ValueError`` if they do not fit."""
        if self.by_parameter:
            found = tuple(self._cut_parameters(rank))
            length = sum(-(-size // self.world) for group in self.groups for _, size in group)
            if length != sum(sizes):
                raise ValueError(f"{sum(sizes)} elements where {length} belong")
            return found
        if len(sizes) != len(self.groups):
            raise ValueError(f"{len(sizes)} tensors for {len(self.groups)} parameter groups")
        for group, size in zip(self.groups, sizes, strict=True):
            needed = sum(elements for _, elements in group)
            if self.world * size < needed:
                raise ValueError(f"{self.world} x {size} elements where {needed} belong")
        return tuple(self._cut_groups(rank, sizes))

    def _cut_parameters(self, rank: int) -> Iterator[Piece]:
        at = 0
        for name, elements in (each for group in self.groups for each in group):
            share = -(-elements // self.world)
            length = min(share, elements - rank * share)
            if length > 0:
                yield Piece(name=name, start=rank * share, length=length, at=at)
            at += share

    def _cut_groups(self, rank: int, sizes: Sequence[int]) -> Iterator[Piece]:
        at = 0
        for group, size in zip(self.groups, sizes, strict=True):
            begin, end, here = rank * size, (rank + 1) * size, 0
            for name, elements in group:
                low, high = max(here, begin), min(here + elements, end)
                if low < high:
                    yield Piece(name=name, start=low - here, length=high - low, at=at + low - begin)
                here += elements
            at += size


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy elements from the line of one rank to this rank's."""

    source: int
    source_at: int
    at: int
    length: int


def moves(wanted: Sequence[Piece], found: Mapping[int, Sequence[Piece]]) -> tuple[Move, ...]:
    """How to fill ``wanted`` from what ranks have; raises ``ValueError`` if they lack some."""
    by_name: dict[str, list[tuple[int, Piece]]] = {}
    for rank, pieces in found.items():
        for piece in pieces:
            by_name.setdefault(piece.name, []).append((rank, piece))
    result = []
    for piece in wanted:
        left = piece.length
        for rank, other in by_name.get(piece.name, ()):
            low = max(piece.start, other.start)
            high = min(piece.start + piece.length, other.start + other.length)
            if low < high:
                result.append(
                    Move(
                        source=rank,
                        source_at=other.at + low - other.start,
                        at=piece.at + low - piece.start,
                        length=high - low,
                    )
                )
                left -= high - low
        if left:
            raise ValueError(f"{left} elements of {piece.name} are missing")
    return tuple(result)
