"""Weights copied into the tensors of a model that fuses and shards them, as vLLM's do."""

import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from plexrl_slurm.engines.vllm_layout import DeviceWeights, Layout, NotACopy, Staging

pytestmark = pytest.mark.engines
CPU = torch.device("cpu")


class Fused(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Rank 1 of 2: half of a fused q and k, half the columns of an output, a whole norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.full((8, 6), -1.0))
        self.out = nn.Parameter(torch.full((6, 4), -1.0))
        self.norm = nn.Parameter(torch.full((6,), -1.0, dtype=torch.bfloat16))
        self.head = self.embed = nn.Parameter(torch.full((10, 6), -1.0))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            match name:
                case "q" | "k":
                    start = 0 if name == "q" else 4
                    self.qk.data.narrow(0, start, 4).copy_(weight.narrow(0, 4, 4))
                case "out":
                    self.out.data.copy_(weight[:, 4:])
                case "embed":  # two rows of padding
                    self.embed[: weight.shape[0]].data.copy_(weight)
                    self.embed[weight.shape[0] :].data.fill_(0)
                case _:
                    self.norm.data.copy_(weight)


def snapshot(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 6), "k": (8, 6), "out": (6, 8), "norm": (6,)}
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


class Scaled(Fused):
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.norm.data.copy_(-torch.exp(self.norm.data))


class Shifted(Fused):
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.norm.data.add_(1)


class Forgetful(Fused):
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super().load_weights((name, weight) for name, weight in weights if name != "out")


def with_embedding(seed: int) -> dict[str, Tensor]:
    return {**snapshot(seed), "embed": torch.arange(60.0)[12:].view(8, 6) + seed}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("size", [64 << 20, 64, 16], ids=["whole", "in pieces", "a row is larger"])
def test_a_second_snapshot_is_copied_to_where_the_loaders_put_the_first(size: int) -> None:
    model, other = Fused(), Fused()
    layout = Layout.record(model.parameters(), with_embedding(1).items(), model.load_weights)
    places = {name: value.data_ptr() for name, value in model.named_parameters()}
    for seed in (2, 3):
        expected = with_embedding(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))  # as after a sleep
        other.load_weights(iter(expected.items()))
        moved = layout.load(expected, Staging(CPU, size=size))
        padding = 2 * 6 * 4
        assert moved == sum(p.nbytes for p in model.parameters()) - padding
        for name, value in state(other).items():
            assert torch.equal(state(model)[name], value), name
    assert {name: value.data_ptr() for name, value in model.named_parameters()} == places


def test_recording_loads_the_snapshot_itself() -> None:
    model, other = Fused(), Fused()
    Layout.record(model.parameters(), with_embedding(1).items(), model.load_weights)
    other.load_weights(iter(with_embedding(1).items()))
    assert all(torch.equal(state(model)[name], value) for name, value in state(other).items())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(Scaled(), "not in the snapshot", id="computed from a parameter"),
        pytest.param(Shifted(), "add_.* changes a parameter", id="changed in place"),
        pytest.param(Forgetful(), "not filled", id="left out"),
    ],
)
def test_a_model_whose_loaders_do_more_than_copy_is_refused(model: Fused, reason: str) -> None:
    with pytest.raises(NotACopy, match=reason):
        Layout.record(model.parameters(), with_embedding(1).items(), model.load_weights)


def test_a_part_that_is_filled_twice_is_refused() -> None:
    model = Fused()
    weights = [*with_embedding(1).items(), *snapshot(2).items()]
    with pytest.raises(NotACopy, match="filled twice"):
        Layout.record(model.parameters(), weights, model.load_weights)


class Worker:
    """A worker's model, and vLLM's way to reload it."""

    def __init__(self, model: Fused) -> None:
        self.model, self.reloads = model, 0
        self.weights = DeviceWeights(model, CPU)

    def reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.reloads += 1
        self.model.load_weights(weights)

    def load(self, seed: int) -> dict[str, Tensor]:
        self.weights.load(with_embedding(seed), reload=self.reload)
        return state(self.model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


def test_weights_are_reloaded_once_and_copied_from_then_on() -> None:
    worker, plain = Worker(Fused()), Fused()
    for seed in range(3):
        plain.load_weights(iter(with_embedding(seed).items()))
        assert same(worker.load(seed), state(plain))
    assert (worker.reloads, worker.weights.refused) == (1, "")


class Repacked(Worker):
    """Its kernels want q and k the other way round."""

    def reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super().reload(weights)
        self.model.qk.data.copy_(self.model.qk.data.flip(0))


class FusedMoEMethod:
    """One that shuffles weights."""


def with_experts() -> Fused:
    model: Any = Fused()
    model.experts = nn.Module()
    model.experts.quant_method = FusedMoEMethod()
    return cast(Fused, model)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        pytest.param(Worker(Scaled()), "NotACopy: .*not in the snapshot", id="computed"),
        pytest.param(Repacked(Fused()), "qk has another layout", id="another layout"),
        pytest.param(Worker(with_experts()), "experts .FusedMoEMethod. makes", id="experts"),
    ],
)
def test_what_cannot_be_copied_is_reloaded_every_time(worker: Worker, reason: str) -> None:
    plain = type(worker)(type(worker.model)())
    for seed in range(3):
        plain.reload(iter(with_embedding(seed).items()))
        assert same(worker.load(seed), state(plain.model))
    assert worker.reloads == 4  # the first time it was tried
    assert worker.weights.refused is not None
    assert re.search(reason, worker.weights.refused)
