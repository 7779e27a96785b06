"""What every sampling engine refuses, and how top-k rows become matrices. No torch here."""

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput

#: Logprob in a cell of a :class:`wire.TopK` that holds nothing.
EMPTY_LOGPROB: Final = -99999.0
#: One more than the largest seed a sample may use.
SEEDS: Final = 2**63


def check_sample(body: wire.Sample, model: ModelSpec) -> None:
    """Raise ``BadInput`` unless ``model`` can run ``body``."""
    for name, value in (("num_samples", body.num_samples), ("max_tokens", body.max_tokens)):
        if value < 1:
            raise BadInput(f"{name} is {value}: ask for at least 1")
    if not body.prompt:
        raise BadInput("the prompt is empty: give at least one token")
    for what, tokens in (("prompt", body.prompt), ("stop_tokens", body.stop_tokens)):
        _check_tokens(what, tokens, model)
    if len(body.prompt) + body.max_tokens > model.max_context_length:
        raise BadInput(
            f"the prompt has {len(body.prompt)} tokens and max_tokens is {body.max_tokens}, "
            f"together {len(body.prompt) + body.max_tokens}, but the context of {model.name} is "
            f"{model.max_context_length} tokens: shorten the prompt or lower max_tokens"
        )
    if not (math.isfinite(body.temperature) and body.temperature >= 0):
        raise BadInput(f"temperature is {body.temperature}: give a finite number of at least 0")
    if not 0 < body.top_p <= 1:
        raise BadInput(f"top_p is {body.top_p}: give a number above 0 and at most 1")
    if body.top_k < 1 and body.top_k != -1:
        raise BadInput(f"top_k is {body.top_k}: give at least 1, or -1 to turn it off")
    if not 0 <= body.seed <= SEEDS - body.num_samples:
        raise BadInput(
            f"seed is {body.seed}: seed and seed + num_samples - 1 must lie in 0..{SEEDS - 1}"
        )
    if "" in body.stop_strings:
        raise BadInput("a stop string is empty: leave it out or write what shall end a sample")
    for name, value in (
        ("topk_prompt_logprobs", body.topk_prompt_logprobs),
        ("topk_sample_logprobs", body.topk_sample_logprobs),
    ):
        if value < 0:
            raise BadInput(f"{name} is {value}: give at least 1, or 0 for none")


def _check_tokens(what: str, tokens: list[int], model: ModelSpec) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < model.vocab_size):
        bad = next(token for token in tokens if not 0 <= token < model.vocab_size)
        raise BadInput(
            f"token {bad} in {what} is not in the vocabulary of {model.name}, whose tokens are "
            f"0..{model.vocab_size - 1}: tokenize with this model's tokenizer"
        )


def top_k(rows: Iterable[tuple[list[int], list[float]]], *, length: int, k: int) -> wire.TopK:
    """``[length, k]`` from each row's most likely tokens; what a row lacks stays empty."""
    tokens = np.zeros((length, k), dtype=np.int32)
    logprobs = np.full((length, k), EMPTY_LOGPROB, dtype=np.float32)
    for index, (row_tokens, row_logprobs) in enumerate(rows):
        filled = min(k, len(row_tokens))
        tokens[index, :filled] = row_tokens[:filled]
        logprobs[index, :filled] = row_logprobs[:filled]
    return wire.TopK(wire.Array.of(tokens), wire.Array.of(logprobs))
