"""Checkpoints of another number of ranks or ZeRO stage: the same elements, dealt anew."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from plexrl_slurm.core.shards import Groups, Layout, moves
from plexrl_slurm.engines.skeleton import Skeleton
from plexrl_slurm.memory.checkpoint import Manifest

#: Kinds of tensors of which every rank has its share only.
_SHARED = ("master", "exp_avg", "exp_avg_sq")


class _Copy(NamedTuple):
    name: str
    offset: int
    source: int
    source_name: str
    start: int
    length: int


class Resharded:
    """An opened checkpoint, read as if this rank had saved it."""

    def __init__(self, path: Path, manifest: Manifest, groups: Groups) -> None:
        """Raises ``ValueError`` if it does not have these parameters."""
        self._stack = ExitStack()
        self._work: list[_Copy] = []
        self._manifest = manifest
        self._groups = _as_saved(manifest, groups)
        try:
            self._files: list[Any] = [
                self._stack.enter_context(safe_open(path / file.name, framework="pt"))
                for file in manifest.files
            ]
            self._names = [sorted(file.keys(), key=_number) for file in self._files]
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Resharded":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def plan(
        self, tensors: Mapping[str, Tensor], rank: int, world: int, skeleton: Skeleton
    ) -> None:
        """Find where everything is that belongs into ``tensors``, by their names in ``skeleton``.

        Raises ``ValueError`` if it is not all there.
        """
        self._work = []
        sharded = skeleton.layout.stage == 3
        for kind in ("weights", *_SHARED):
            names = [name for name in tensors if _kind(name) == kind]
            if not names:
                continue
            alone = kind == "weights"
            here = _layout(skeleton.groups, world, sharded=sharded, alone=alone)
            there = _layout(
                self._groups, self._manifest.world, sharded=self._manifest.sharded, alone=alone
            )
            sizes = [tensors[name].numel() for name in names]
            wanted = here.pieces(rank if here.world > 1 else 0, sizes)
            found = {
                source: there.pieces(source, [size for _, size in self._line(source, kind)])
                for source in range(there.world)
            }
            for move in moves(wanted, found):
                index, offset = _place(sizes, move.at)
                name, start = self._find(move.source, kind, move.source_at)
                self._work.append(
                    _Copy(names[index], offset, move.source, name, start, move.length)
                )

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read everything that was planned."""
        for tensor in tensors.values():
            tensor.zero_()  # also what only fills up
        for each in self._work:
            part = self._files[each.source].get_slice(each.source_name)
            to = tensors[each.name].reshape(-1).narrow(0, each.offset, each.length)
            to.copy_(part[each.start : each.start + each.length])

    def _line(self, source: int, kind: str) -> list[tuple[str, int]]:
        """A rank's tensors of a kind, and their sizes."""
        return [
            (name, int(self._files[source].get_slice(name).get_shape()[0]))
            for name in self._names[source]
            if _kind(name) == kind
        ]

    def _find(self, source: int, kind: str, at: int) -> tuple[str, int]:
        line = self._line(source, kind)
        index, offset = _place([size for _, size in line], at)
        return line[index][0], offset


def _as_saved(manifest: Manifest, groups: Groups) -> Groups:
    """The checkpoint's parameter groups; older ones have one, in the model's order."""
    sizes = {name: size for group in groups for name, size in group}
    if not manifest.groups:
        if len(groups) > 1:
            raise ValueError("it does not say which parameters are in which group")
        return groups
    names = [name for group in manifest.groups for name in group]
    if sorted(names) != sorted(sizes):
        raise ValueError("it has other parameters")
    return [[(name, sizes[name]) for name in group] for group in manifest.groups]


def _layout(groups: Groups, world: int, *, sharded: bool, alone: bool) -> Layout:
    """Of weights (``alone``), of which every rank has all unless they are sharded; or the rest."""
    return Layout(groups=groups, world=1 if alone and not sharded else world, by_parameter=sharded)


def _place(sizes: Sequence[int], at: int) -> tuple[int, int]:
    """Which tensor of a line, and where in it."""
    for index, end in enumerate(accumulate(sizes)):
        if at < end:
            return index, at - (end - sizes[index])
    raise ValueError(f"element {at} of {sum(sizes)}")


def _kind(name: str) -> str:
    return name.rpartition(".")[0]


def _number(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition(".")
    return kind, int(number)
