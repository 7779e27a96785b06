"""From datums to micro-batches: checking, sharing prompts, packing, dealing to ranks.

Everything here is a pure function of the call, so all ranks compute the same plan for each
other and the same call is always cut in the same way: replay gives the same bits.

Datums with a common beginning (the completions of one GRPO prompt) become one *row*: the
shared tokens once, then every datum's own tokens, under a mask that lets each token see the
shared ones and its own branch. Rows of similar length are padded into a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines.losses import Loss

#: Fewer common tokens than this are not worth a mask.
_WORTH_SHARING = 4
#: The mask is dense, and must fit.
_LONGEST_TREE = 2048
#: Attention over so many tokens takes as long as the rest of the model (about; it depends).
_SQUARE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One checked datum."""

    #: ``[T]`` int64.
    tokens: NDArray[np.int64]
    #: ``[T]`` or ``[T, K]`` int64.
    targets: NDArray[np.int64]
    #: float32, each shaped like ``targets``.
    inputs: Mapping[str, NDArray[np.float32]]

    @property
    def width(self) -> tuple[int, ...]:
        """``()`` or ``(K,)``: what one position's target looks like."""
        return self.targets.shape[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Datums that share their first ``prefix`` tokens (all of them, if it is one datum)."""

    #: Numbers of the datums.
    members: tuple[int, ...]
    prefix: int
    #: Own tokens of each member, behind the shared ones.
    tails: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prefix + sum(self.tails)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass; ``N`` is the number of targets' positions."""

    #: Numbers of the datums, in the order of their targets.
    members: tuple[int, ...]
    #: ``[B, L]``.
    ids: Tensor
    #: ``[B, L]`` and ``[B, 1, L, L]`` (true: may look), or ``None`` for plain causal rows.
    positions: Tensor | None
    mask: Tensor | None
    #: Unique (position in ``ids`` flattened, targets) pairs: ``[U]`` and ``[U]`` or ``[U, K]``.
    places: Tensor
    targets: Tensor
    #: ``[N]`` into the unique pairs.
    expand: Tensor
    #: ``[N]``: which member a position belongs to.
    segments: Tensor
    #: ``[N]`` or ``[N, K]`` by name.
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device; itself if it is there."""
        if device.type == "cpu":
            return self
        moved = {
            name: value.to(device)
            for name, value in ((each.name, getattr(self, each.name)) for each in fields(self))
            if isinstance(value, Tensor)
        }
        inputs = {key: value.to(device) for key, value in self.inputs.items()}
        return replace(self, **moved, inputs=inputs)


def check(body: wire.ForwardBackward, loss: Loss, model: ModelSpec) -> list[Example]:
    """The datums as arrays; raises ``BadInput`` that names the first thing that is wrong."""
    if not body.data:
        raise BadInput("data is empty: give at least one datum")
    return [
        _check_datum(f"datum {number}", datum, body.loss_fn, loss, model)
        for number, datum in enumerate(body.data)
    ]


def _check_datum(where: str, datum: wire.Datum, name: str, loss: Loss, model: ModelSpec) -> Example:
    tokens = _integers(where, "tokens", datum.tokens)
    if tokens.ndim != 1 or tokens.size == 0:
        raise BadInput(f"{where}: its tokens have shape {list(tokens.shape)}; give one or more")
    if tokens.size > model.max_context_length:
        raise BadInput(
            f"{where}: {tokens.size} tokens are more than the {model.max_context_length} "
            f"of model {model.name}; cut it"
        )
    needed = ("target_tokens", *loss.inputs)
    if missing := [key for key in needed if key not in datum.inputs]:
        raise BadInput(f"{where}: loss_fn {name} needs {', '.join(missing)} in loss_fn_inputs")
    targets = _integers(where, "target_tokens", datum.inputs["target_tokens"])
    wide = targets.ndim == 2 and targets.shape[1] > 0 and name == "cross_entropy"
    if not (targets.ndim == 1 or wide) or targets.shape[0] != tokens.size:
        raise BadInput(
            f"{where}: target_tokens has shape {list(targets.shape)} for {tokens.size} tokens; "
            f"give one per token (cross_entropy also takes K per token)"
        )
    for what, ids in (("tokens", tokens), ("target_tokens", targets)):
        if (ids < 0).any() or (ids >= model.vocab_size).any():
            strange = ids[(ids < 0) | (ids >= model.vocab_size)].flat[0]
            raise BadInput(
                f"{where}: {what} has token id {strange}; model {model.name} has ids "
                f"0 to {model.vocab_size - 1}"
            )
    inputs = {
        key: _floats(where, key, datum.inputs[key], targets.shape)
        for key in (*loss.inputs, *(m for m in loss.masks if m in datum.inputs))
    }
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise BadInput(f"{where}: sequence_ratio_mask marks no token; mark the sampled ones")
    return Example(tokens=tokens, targets=targets, inputs=inputs)


def _array(where: str, key: str, array: wire.Array) -> NDArray[np.generic]:
    try:
        return array.numpy()
    except (ValueError, TypeError) as error:
        raise BadInput(f"{where}: {key} is no array ({error})") from error


def _integers(where: str, key: str, array: wire.Array) -> NDArray[np.int64]:
    values = _array(where, key, array)
    if values.dtype.kind != "i":
        raise BadInput(f"{where}: {key} has dtype {values.dtype}; give int64")
    return values.astype(np.int64)


def _floats(where: str, key: str, array: wire.Array, shape: tuple[int, ...]) -> NDArray[np.float32]:
    given = _array(where, key, array)
    if given.shape != shape:
        raise BadInput(
            f"{where}: {key} has shape {list(given.shape)} and target_tokens {list(shape)}; "
            f"make them equal"
        )
    values = given.astype(np.float32)
    if not np.isfinite(values).all():
        raise BadInput(f"{where}: {key} has NaN or infinite values; replace them")
    return values


def make_rows(examples: Sequence[Example], *, share: bool, longest: int) -> list[Row]:
    """Datums as rows, longest first. ``longest``: most tokens of a row of several datums.

    In lexicographic order datums with a common beginning are neighbours; the cheapest way to
    cut that order into rows is found by dynamic programming.
    """
    order = sorted(range(len(examples)), key=lambda i: (examples[i].width, _key(examples[i]), i))
    common = [0] + [_common(examples[a], examples[b]) if share else 0 for a, b in pairwise(order)]
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first n datums, start of the last row
    for last, number in enumerate(order):
        prefix = total = examples[number].tokens.size
        cheapest = (best[last][0] + _cost(total, members=1), last)
        for first in range(last - 1, -1, -1):
            prefix = min(prefix, common[first + 1])
            total += examples[order[first]].tokens.size
            count = last - first + 1
            length = total - (count - 1) * prefix
            if prefix < _WORTH_SHARING or length > min(longest, _LONGEST_TREE):
                break
            cheapest = min(cheapest, (best[first][0] + _cost(length, members=count), first))
        best.append(cheapest)
    rows = []
    stop = len(order)
    while stop:
        start = best[stop][1]
        members = order[start:stop]
        prefix = min([examples[members[0]].tokens.size, *common[start + 1 : stop]])
        tails = tuple(examples[i].tokens.size - prefix for i in members)
        rows.append(Row(members=tuple(members), prefix=prefix, tails=tails))
        stop = start
    return sorted(rows, key=lambda row: (examples[row.members[0]].width, -row.length, row.members))


def _cost(length: int, *, members: int) -> float:
    """Time of a row, in tokens: a tree's attention looks at the whole square."""
    return length + length * length / (_SQUARE if members > 1 else 2 * _SQUARE)


def _key(example: Example) -> bytes:
    # Big-endian bytes sort like the numbers.
    return example.tokens.astype(">i8").tobytes()


def _common(one: Example, other: Example) -> int:
    if one.width != other.width:
        return 0
    size = min(one.tokens.size, other.tokens.size)
    different = np.flatnonzero(one.tokens[:size] != other.tokens[:size])
    return int(different[0]) if different.size else size


def deal(
    rows: Sequence[Row], examples: Sequence[Example], *, world: int, max_tokens: int
) -> list[list[list[Row]]]:
    """For every rank its micro-batches (lists of rows), as many for each; the last may be empty."""
    plans = [_fill(rows[rank::world], examples, max_tokens) for rank in range(world)]
    most = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(most - len(plan))] for plan in plans]


def _fill(rows: Sequence[Row], examples: Sequence[Example], max_tokens: int) -> list[list[Row]]:
    batches: list[list[Row]] = []
    for row in rows:
        batch = batches[-1] if batches else None
        if (
            batch is None
            or examples[batch[0].members[0]].width != examples[row.members[0]].width
            or (len(batch) + 1) * batch[0].length > max_tokens
        ):
            batches.append([row])
        else:
            batch.append(row)
    return batches


def build(rows: Sequence[Row], examples: Sequence[Example], inputs: Sequence[str]) -> MicroBatch:
    """Tensors of one micro-batch; without rows, a dummy of one token and zero weight."""
    if not rows:
        return _dummy(inputs)
    length = max(row.length for row in rows)
    tree = any(len(row.members) > 1 for row in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros((len(rows), length), dtype=np.int64)
    members: list[int] = []
    places: list[NDArray[np.int64]] = []
    for b, row in enumerate(rows):
        shared = np.arange(row.prefix)
        ids[b, : row.prefix] = examples[row.members[0]].tokens[: row.prefix]
        positions[b, : row.prefix] = shared
        at = row.prefix
        for number, tail in zip(row.members, row.tails, strict=True):
            ids[b, at : at + tail] = examples[number].tokens[row.prefix :]
            positions[b, at : at + tail] = np.arange(row.prefix, row.prefix + tail)
            places.append(b * length + np.concatenate([shared, np.arange(at, at + tail)]))
            members.append(number)
            at += tail
    place = np.concatenate(places)
    targets = np.concatenate([examples[i].targets for i in members])
    pairs = np.column_stack([place, targets])
    unique, expand = np.unique(pairs, axis=0, return_inverse=True)
    return MicroBatch(
        members=tuple(members),
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions) if tree else None,
        mask=torch.from_numpy(_mask(rows, length)) if tree else None,
        places=torch.from_numpy(unique[:, 0].copy()),
        targets=torch.from_numpy(unique[:, 1:].reshape(-1, *targets.shape[1:]).copy()),
        expand=torch.from_numpy(expand.reshape(-1)),
        segments=torch.from_numpy(
            np.repeat(np.arange(len(members)), [examples[i].tokens.size for i in members])
        ),
        inputs={
            key: torch.from_numpy(np.concatenate([_input(examples[i], key) for i in members]))
            for key in inputs
        },
    )


def _input(example: Example, key: str) -> NDArray[np.float32]:
    # A mask that only some datums have is all ones for the others.
    return example.inputs.get(key, np.ones(example.targets.shape, dtype=np.float32))


def _mask(rows: Sequence[Row], length: int) -> NDArray[np.bool_]:
    mask = np.zeros((len(rows), 1, length, length), dtype=np.bool_)
    mask[:, 0] = np.eye(length, dtype=np.bool_)  # padding must look at something
    for b, row in enumerate(rows):
        mask[b, 0, : row.prefix, : row.prefix] = np.tri(row.prefix, dtype=np.bool_)
        at = row.prefix
        for tail in row.tails:
            mask[b, 0, at : at + tail, : row.prefix] = True
            mask[b, 0, at : at + tail, at : at + tail] = np.tri(tail, dtype=np.bool_)
            at += tail
    return mask


def _dummy(inputs: Sequence[str]) -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        members=(),
        ids=zero.reshape(1, 1),
        positions=None,
        mask=None,
        places=zero,
        targets=zero,
        expand=zero,
        segments=zero,
        inputs={key: torch.zeros(1) for key in inputs},
    )
