"""Every loss against its formula, written out token by token, gradients by autograd."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines.losses import LOSSES, compute, find_loss, merge

pytestmark = pytest.mark.engines

#: Two sequences of three and four tokens.
LENGTHS = (3, 4)
SEGMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1])


def make_inputs(**more: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "logprobs": -1 - torch.rand(7, generator=generator),
        "advantages": torch.randn(7, generator=generator),
        "sequence_ratio_mask": torch.tensor([0.0, 1, 1, 0, 1, 1, 1]),
        "weights": torch.ones(7),
        **more,
    }


def make_logprobs() -> Tensor:
    return (-1 - torch.rand(7, generator=torch.Generator().manual_seed(1))).requires_grad_()


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    bounded = torch.clamp(ratio, low, high)
    return -torch.min(ratio * advantage, bounded * advantage)


def gspo(lp: Tensor, inputs: Mapping[str, Tensor], low: float, high: float) -> Tensor:
    total, at = torch.zeros(()), 0
    for length in LENGTHS:
        own = slice(at, at + length)
        marked = inputs["sequence_ratio_mask"][own] != 0
        mean = (lp.detach()[own] - inputs["logprobs"][own])[marked].mean()
        for t in range(at, at + length):
            ratio = torch.exp(mean) * torch.exp(lp[t]) / torch.exp(lp[t]).detach()
            total = total + surrogate(ratio, inputs["advantages"][t], low, high)
        at += length
    return total


def by_token(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def total(lp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        rows = zip(lp, inputs["logprobs"], inputs["advantages"], strict=True)
        return torch.stack([formula(*row) for row in rows]).sum()

    return total


@pytest.mark.parametrize(
    ("name", "config", "reference"),
    [
        pytest.param(
            "importance_sampling",
            {},
            by_token(lambda lp, old, adv: -torch.exp(lp) / torch.exp(old) * adv),
            id="importance sampling",
        ),
        pytest.param(
            "ppo",
            {},
            by_token(lambda lp, old, adv: surrogate(torch.exp(lp - old), adv, 0.8, 1.2)),
            id="ppo",
        ),
        pytest.param(
            "ppo",
            {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
            by_token(lambda lp, old, adv: surrogate(torch.exp(lp - old), adv, 0.95, 1.05)),
            id="ppo with thresholds",
        ),
        pytest.param(
            "cispo",
            {"clip_high_threshold": 1.1},
            by_token(lambda lp, old, adv: -torch.exp(lp - old).detach().clamp(max=1.1) * adv * lp),
            id="cispo",
        ),
        pytest.param(
            "dro",
            {"beta": 0.3},
            by_token(lambda lp, old, adv: -(lp * adv - 0.15 * (lp - old) ** 2)),
            id="dro",
        ),
        pytest.param(
            "gspo",
            {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
            lambda lp, inputs: gspo(lp, inputs, 0.9, 1.1),
            id="gspo",
        ),
    ],
)
def test_loss_and_gradient_are_those_of_the_formula(
    name: str, config: dict[str, float], reference: Callable[[Tensor, Any], Tensor]
) -> None:
    loss, whole = find_loss(name, config)
    inputs = make_inputs()
    lp, again = make_logprobs(), make_logprobs()
    total, metrics = compute(loss, lp, inputs, SEGMENTS, whole)
    wanted = reference(again, inputs)
    total.backward()
    wanted.backward()
    assert metrics["loss:sum"] == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(lp.grad, again.grad)


@pytest.mark.parametrize("shape", [(7,), (7, 3)], ids=["one target", "K targets"])
def test_cross_entropy_is_the_weighted_sum_of_negative_logprobs(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    lp = torch.randn(shape, generator=generator).requires_grad_()
    weights = torch.randn(shape, generator=generator)
    loss, config = find_loss("cross_entropy", {})
    total, metrics = compute(loss, lp, {"weights": weights}, SEGMENTS, config)
    total.backward()
    assert metrics == {"loss:sum": pytest.approx(-(lp.detach() * weights).sum().item(), rel=1e-5)}
    torch.testing.assert_close(lp.grad, -weights)


@pytest.mark.parametrize("key", ["mask", "weights"])
def test_a_mask_multiplies_every_tokens_loss(key: str) -> None:
    loss, config = find_loss("importance_sampling", {})
    mask = torch.tensor([0.0, 1, 1, 0.5, 1, 0, 1])
    lp = make_logprobs()
    total, _ = compute(loss, lp, make_inputs(**{key: mask}), SEGMENTS, config)
    ratio = (lp.detach() - make_inputs()["logprobs"]).exp()
    wanted = -(ratio * make_inputs()["advantages"] * mask).sum()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_metrics_say_how_far_off_policy_the_data_is() -> None:
    inputs = make_inputs(advantages=torch.tensor([0.0, 1, 1, 1, 1, 1, 1]))
    lp = inputs["logprobs"] + torch.tensor([9.0, 0.5, 0, 0, 0, 0, -0.5])
    loss, config = find_loss("ppo", {})
    _, metrics = compute(loss, lp, inputs, SEGMENTS, config)
    assert metrics["ratio:max"] == pytest.approx(math.exp(0.5), rel=1e-5)
    assert metrics["ratio:min"] == pytest.approx(math.exp(-0.5), rel=1e-5)
    assert metrics["clipped_tokens:sum"] == 2.0


def test_metrics_merge_by_the_reduction_in_their_names() -> None:
    parts = [
        {"loss:sum": 1.0, "ratio:max": 2.0, "ratio:min": 0.5},
        {"loss:sum": 2.0, "ratio:max": 1.0, "ratio:min": 0.7},
    ]
    assert merge(parts) == {"loss:sum": 3.0, "ratio:max": 2.0, "ratio:min": 0.5}


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        pytest.param("best_loss", {}, "cross_entropy, importance_sampling, ppo", id="unknown"),
        pytest.param("stable_reinforce", {}, "no formula of it is published", id="unpublished"),
        pytest.param("custom", {}, "'custom' cannot be computed", id="client side"),
        pytest.param("ppo", {"epsilon": 0.2}, "knows clip_low_threshold", id="strange key"),
        pytest.param("dro", {"beta": math.nan}, "beta must be finite", id="not finite"),
        pytest.param("ppo", {"clip_low_threshold": 2.0}, "0 <= low <= high", id="crossed"),
    ],
)
def test_what_cannot_be_computed_is_explained(
    name: str, config: dict[str, float], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        find_loss(name, config)


def test_stable_reinforce_is_answered_with_the_losses_that_work() -> None:
    with pytest.raises(BadInput) as failure:
        find_loss("stable_reinforce", {})
    assert all(name in str(failure.value) for name in LOSSES)
