"""The losses of the Tinker protocol: sums over tokens, never means.

Formulas are those of the protocol's documentation (tinker-docs, pages "Loss functions",
"Cross entropy", "Importance sampling", "PPO", "CISPO", "DRO", "GSPO"). ``lp`` are the
logprobs of the target tokens under the model that is trained, ``old`` those under the model
that sampled them (input ``logprobs``), ``adv`` the input ``advantages``. Where a datum has
``mask`` (or, for a policy-gradient loss, ``weights``) each token's loss is multiplied by it.

A custom loss needs nothing here: the SDK asks for logprobs by a forward-only ``cross_entropy``
and sends its gradient back as (negative, fractional) ``weights`` of another one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from plexrl_slurm.core.errors import BadInput

#: ``(lp, inputs, segments, config)`` to (loss of every token, importance ratio or ``None``).
_TokenLoss: TypeAlias = Callable[
    [Tensor, Mapping[str, Tensor], Tensor, Mapping[str, float]], tuple[Tensor, Tensor | None]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss: what it needs and what it does."""

    #: Inputs every datum must have besides ``target_tokens``.
    inputs: tuple[str, ...]
    #: Inputs it multiplies the token losses with, if they are there.
    masks: tuple[str, ...] = ("mask",)
    #: Config keys and their defaults.
    config: Mapping[str, float] = field(default_factory=dict)
    tokens: _TokenLoss


def _cross_entropy(
    lp: Tensor, inputs: Mapping[str, Tensor], segments: Tensor, config: Mapping[str, float]
) -> tuple[Tensor, Tensor | None]:
    """``-lp * weights``; with ``[T, K]`` targets a soft distribution over K tokens."""
    return -lp * inputs["weights"], None


def _importance_sampling(
    lp: Tensor, inputs: Mapping[str, Tensor], segments: Tensor, config: Mapping[str, float]
) -> tuple[Tensor, Tensor | None]:
    """``-exp(lp - old) * adv``."""
    ratio = (lp - inputs["logprobs"]).exp()
    return -ratio * inputs["advantages"], ratio


def _ppo(
    lp: Tensor, inputs: Mapping[str, Tensor], segments: Tensor, config: Mapping[str, float]
) -> tuple[Tensor, Tensor | None]:
    """``-min(r * adv, clip(r) * adv)`` with ``r = exp(lp - old)`` (Schulman et al., 2017)."""
    ratio = (lp - inputs["logprobs"]).exp()
    return _clipped(ratio, inputs["advantages"], config), ratio


def _cispo(
    lp: Tensor, inputs: Mapping[str, Tensor], segments: Tensor, config: Mapping[str, float]
) -> tuple[Tensor, Tensor | None]:
    """``-sg(clip(r)) * adv * lp`` (MiniMax-M1, 2025); one-sided clip by default, as documented."""
    ratio = (lp.detach() - inputs["logprobs"]).exp()
    weight = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -weight * inputs["advantages"] * lp, ratio


def _dro(
    lp: Tensor, inputs: Mapping[str, Tensor], segments: Tensor, config: Mapping[str, float]
) -> tuple[Tensor, Tensor | None]:
    """``-(lp * adv - beta / 2 * (lp - old)^2)`` (Richemond et al., 2024)."""
    gap = lp - inputs["logprobs"]
    return -(lp * inputs["advantages"] - 0.5 * config["beta"] * gap.square()), gap.exp()


def _gspo(
    lp: Tensor, inputs: Mapping[str, Tensor], segments: Tensor, config: Mapping[str, float]
) -> tuple[Tensor, Tensor | None]:
    """GSPO-token (Zheng et al., 2025): PPO with the geometric mean ratio of the sequence.

    The mean runs over the tokens that ``sequence_ratio_mask`` marks; each token has the
    sequence ratio's value and its own logprob's gradient.
    """
    marked = (inputs["sequence_ratio_mask"] != 0).to(lp.dtype)
    gap = (lp.detach() - inputs["logprobs"]) * marked
    # There are no more sequences than tokens; how many there are, a GPU would have to be asked.
    total = lp.new_zeros(len(lp)).index_add_(0, segments, gap)
    count = lp.new_zeros(len(lp)).index_add_(0, segments, marked)
    # A dummy of zero weight marks nothing; its mean is irrelevant but must be finite.
    mean = (total / count.clamp_min(1.0))[segments]
    ratio = (mean + lp - lp.detach()).exp()
    return _clipped(ratio, inputs["advantages"], config), ratio


def _clipped(ratio: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    bounded = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, bounded * advantages)


def _clip(low: float, high: float) -> Mapping[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


_POLICY: Final = ("logprobs", "advantages")
_MASKS: Final = ("mask", "weights")
#: By the name that controllers write.
LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(inputs=("weights",), tokens=_cross_entropy),
    "importance_sampling": Loss(inputs=_POLICY, masks=_MASKS, tokens=_importance_sampling),
    "ppo": Loss(inputs=_POLICY, masks=_MASKS, config=_clip(0.8, 1.2), tokens=_ppo),
    "cispo": Loss(inputs=_POLICY, masks=_MASKS, config=_clip(0.0, 4.0), tokens=_cispo),
    # The documentation names no default for beta; 0.05 is what its example uses.
    "dro": Loss(inputs=_POLICY, masks=_MASKS, config={"beta": 0.05}, tokens=_dro),
    # The clipping ranges of the GSPO paper, section 5.1.
    "gspo": Loss(
        inputs=(*_POLICY, "sequence_ratio_mask"),
        masks=_MASKS,
        config=_clip(1 - 3e-4, 1 + 4e-4),
        tokens=_gspo,
    ),
}


def find_loss(name: str, config: Mapping[str, float]) -> tuple[Loss, dict[str, float]]:
    """The loss and its complete config; raises ``BadInput`` for what is not ours."""
    loss = LOSSES.get(name)
    if loss is None:
        why = "no formula of it is published" if name == "stable_reinforce" else "it is unknown"
        raise BadInput(f"loss_fn {name!r} cannot be computed: {why}; use {', '.join(LOSSES)}")
    if strange := sorted(config.keys() - loss.config.keys()):
        known = ", ".join(loss.config) or "no keys at all"
        raise BadInput(f"loss_fn_config of {name} has {', '.join(strange)}; it knows {known}")
    if bad := sorted(key for key, value in config.items() if not math.isfinite(value)):
        raise BadInput(f"loss_fn_config of {name}: {', '.join(bad)} must be finite")
    whole = {**loss.config, **config}
    low, high = whole.get("clip_low_threshold", 0.0), whole.get("clip_high_threshold", math.inf)
    if not 0.0 <= low <= high:
        raise BadInput(
            f"loss_fn_config of {name}: clip_low_threshold {low} and clip_high_threshold {high} "
            f"must satisfy 0 <= low <= high (they bound the ratio itself, around 1)"
        )
    return loss, whole


def compute(
    loss: Loss,
    lp: Tensor,
    inputs: Mapping[str, Tensor],
    segments: Tensor,
    config: Mapping[str, float],
) -> tuple[Tensor, dict[str, float]]:
    """The loss (a scalar with a gradient) and the metrics of some sequences.

    ``lp`` and ``inputs`` are ``[N]`` or ``[N, K]``: the sequences' tokens in a row;
    ``segments[n]`` is the number of the sequence that token ``n`` belongs to.
    """
    tokens, ratio = loss.tokens(lp, inputs, segments, config)
    for mask in loss.masks:
        if mask in inputs:
            tokens = tokens * inputs[mask]
    total = tokens.sum()
    metrics = {"loss:sum": float(total.detach())}
    if ratio is not None:
        metrics |= _ratio_metrics(ratio.detach(), inputs["advantages"] != 0, config)
    return total, metrics


def _ratio_metrics(ratio: Tensor, live: Tensor, config: Mapping[str, float]) -> dict[str, float]:
    """How far the trained model is from the sampling one, over tokens with an advantage."""
    seen = ratio[live]
    if seen.numel() == 0:
        seen = ratio.new_ones(1)
    metrics = {"ratio:max": float(seen.max()), "ratio:min": float(seen.min())}
    if "clip_low_threshold" in config:
        outside = (seen < config["clip_low_threshold"]) | (seen > config["clip_high_threshold"])
        metrics["clipped_tokens:sum"] = float(outside.sum())
    return metrics


_REDUCTIONS: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "sum": sum,
    "max": max,
    "min": min,
}


def merge(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of one call from those of its micro-batches, by the reduction in their names."""
    merged: dict[str, float] = {}
    for key in metrics[0]:
        values = [one[key] for one in metrics]
        merged[key] = float(_REDUCTIONS[key.rpartition(":")[2]](values))
    return merged
