"""Builders for tests of the training engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.base import RankSpec

PARAMETERS = 312_448


def tiny_spec(folder: Path, dtype: str = "float32") -> ModelSpec:
    """Catalogue entry of the tiny model."""
    return ModelSpec(
        name="tiny",
        path=str(folder),
        dtype=dtype,
        max_context_length=128,
        vocab_size=64,
        parameters=PARAMETERS,
        architecture=f"tiny-{dtype}",
    )


def rank_spec(
    model: ModelSpec, *, rank: int = 0, world: int = 1, port: int = 0, **options: Any
) -> RankSpec:
    """What a training rank is told."""
    return RankSpec(
        wpg="train-0",
        engine="deepspeed",
        rank=rank,
        world=world,
        gpus=world,
        master_port=port,
        agent="",
        models={model.name: model},
        options=options,
    )


def sequence(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``length`` token ids of the tiny model."""
    return np.random.default_rng(seed).integers(4, 60, length)


def datum(tokens: Sequence[int] | np.ndarray[Any, Any], **inputs: Any) -> wire.Datum:
    """Predict ``tokens[1:]`` from ``tokens[:-1]``, with some more inputs (float32)."""
    ids = np.asarray(tokens, dtype=np.int64)
    arrays = {key: wire.Array.of(np.asarray(value, np.float32)) for key, value in inputs.items()}
    return wire.Datum(
        tokens=wire.Array.of(ids[:-1]),
        inputs={"target_tokens": wire.Array.of(ids[1:]), **arrays},
    )


def assert_close(found: wire.Array, wanted: wire.Array | torch.Tensor) -> None:
    """Equal logprobs, as far as fp32 goes."""
    other = torch.tensor(wanted.numpy()) if isinstance(wanted, wire.Array) else wanted
    torch.testing.assert_close(torch.tensor(found.numpy()), other, atol=1e-5, rtol=0.0)


def supervised(seed: int, *lengths: int) -> wire.ForwardBackward:
    """Cross entropy of some random sequences of so many tokens each."""
    data = [
        datum(sequence(100 * seed + i, length + 1), weights=np.ones(length))
        for i, length in enumerate(lengths)
    ]
    return wire.ForwardBackward(data=data, loss_fn="cross_entropy")


def grpo(seed: int, *, group: int, loss_fn: str = "ppo", **inputs: Any) -> wire.ForwardBackward:
    """A group of completions of one prompt."""
    rng = np.random.default_rng(seed)
    prompt = sequence(seed, 12)
    data = []
    for length in rng.integers(3, 9, group):
        tokens = np.concatenate([prompt, rng.integers(4, 60, length)])
        own = np.arange(len(tokens) - 1) >= len(prompt) - 1
        data.append(
            datum(
                tokens,
                logprobs=own * rng.normal(-4.0, 0.3, len(own)),
                advantages=own * rng.normal(),
                **{key: make(own) for key, make in inputs.items()},
            )
        )
    return wire.ForwardBackward(data=data, loss_fn=loss_fn)


def adam(**changed: float) -> wire.OptimStep:
    """An optimizer step as the SDK asks for it by default, but fast."""
    values = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    return wire.OptimStep(**{**values, **changed})


def exploding() -> wire.ForwardBackward:
    """Its loss is finite, and its gradient is not."""
    weights = np.array([3e38, -3e38, 0, 0, 0]) / 20
    huge = [datum(sequence(1, 6), weights=weights)] * 8
    return wire.ForwardBackward(data=huge, loss_fn="cross_entropy")


CREATE = wire.Create(base_model="tiny")
