"""What a call's content must be before anything is spent on it. Raises ``BadInput``, one sentence.

The caller turns that into a ``wire.Doomed``, because an accepted ``seq_id`` must be consumed.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from plexrl_slurm import wire
from plexrl_slurm.api.requests import AdamParams, Asample, SamplingParams
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput

#: Most completions of one prompt.
MAX_SAMPLES: Final = 1024
#: One more than the largest seed of a sample.
SEEDS: Final = 2**63
#: Longest name of a checkpoint, in characters.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_URI: Final = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Names of the inputs a loss reads besides ``target_tokens``."""

    needs: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()
    #: Whether ``target_tokens`` may be ``[T, K]``.
    wide: bool = False


_POLICY: Final = Loss(needs=("logprobs", "advantages"), may_have=("mask", "weights"))
LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(may_have=("weights", "mask"), wide=True),
    "importance_sampling": _POLICY,
    "ppo": _POLICY,
    "cispo": _POLICY,
    "dro": _POLICY,
    "gspo": Loss(needs=(*_POLICY.needs, "sequence_ratio_mask"), may_have=_POLICY.may_have),
}


# ---- training -----------------------------------------------------------------------------


def checked_forward_backward(body: wire.ForwardBackward, model: ModelSpec) -> wire.ForwardBackward:
    """``body`` with every input present, of its loss' dtype and finite; raises ``BadInput``."""
    loss = LOSSES.get(body.loss_fn)
    if loss is None:
        reason = "has no published formula" if body.loss_fn == "stable_reinforce" else "is unknown"
        raise BadInput(f"the loss {body.loss_fn!r} {reason} here; use one of {', '.join(LOSSES)}")
    for name, value in body.loss_fn_config.items():
        if not math.isfinite(value):
            raise BadInput(f"loss_fn_config[{name!r}] is {value}: give a finite number")
    if not body.data:
        raise BadInput("there are no sequences: give at least one datum")
    data = [_datum(index, datum, body.loss_fn, loss) for index, datum in enumerate(body.data)]
    for index, datum in enumerate(data):
        if datum.tokens.shape[0] > model.max_context_length:
            raise BadInput(
                f"datum {index} has {datum.tokens.shape[0]} tokens, but the context of "
                f"{model.name} is {model.max_context_length}: shorten it"
            )
    _find(data, "tokens", lambda array: _outside(array, model), _vocabulary(model))
    _find(data, "target_tokens", lambda array: _outside(array, model), _vocabulary(model))
    for name in (*loss.needs, *loss.may_have):
        _find(data, name, lambda array: ~np.isfinite(array), "which is not a finite number")
    return wire.ForwardBackward(
        data=data,
        loss_fn=body.loss_fn,
        loss_fn_config=body.loss_fn_config,
        forward_only=body.forward_only,
    )


def _datum(index: int, datum: wire.Datum, loss_fn: str, loss: Loss) -> wire.Datum:
    """Shapes and dtypes of one sequence; absent ``weights`` become ones."""
    length = datum.tokens.shape[0]
    if length == 0:
        raise BadInput(f"datum {index} is empty: give at least one token")
    names = ("target_tokens", *loss.needs, *loss.may_have)
    for name in datum.inputs:
        if name not in names:
            raise BadInput(
                f"datum {index} has an input {name!r}, which {loss_fn} does not read; "
                f"it reads {', '.join(names)}"
            )
    for name in ("target_tokens", *loss.needs):
        if name not in datum.inputs:
            raise BadInput(f"datum {index} lacks the input {name!r}, which {loss_fn} needs")
    targets = datum.inputs["target_tokens"]
    if targets.dtype == "float32":
        raise BadInput(f"datum {index}: target_tokens are float32; token ids are integers")
    most = 2 if loss.wide else 1
    if not 1 <= len(targets.shape) <= most or targets.shape[0] != length or 0 in targets.shape:
        wanted = f"[{length}] or [{length}, K]" if loss.wide else f"[{length}]"
        raise BadInput(
            f"datum {index}: target_tokens have shape {list(targets.shape)}, but the sequence has "
            f"{length} tokens, so {loss_fn} needs {wanted}"
        )
    inputs: dict[str, wire.Array] = {}
    for name, array in datum.inputs.items():
        if array.shape != targets.shape:
            raise BadInput(
                f"datum {index}: {name} has shape {list(array.shape)}, but target_tokens have "
                f"{list(targets.shape)}; they must agree"
            )
        inputs[name] = _as(array, "int64" if name == "target_tokens" else "float32")
    if loss_fn == "cross_entropy" and "weights" not in inputs:
        inputs["weights"] = wire.Array.of(np.ones(targets.shape, np.float32))
    return wire.Datum(tokens=datum.tokens, inputs=inputs)


def _as(array: wire.Array, dtype: str) -> wire.Array:
    return array if array.dtype == dtype else wire.Array.of(array.numpy().astype(dtype))


def _of(datum: wire.Datum, name: str) -> wire.Array | None:
    return datum.tokens if name == "tokens" else datum.inputs.get(name)


def _find(
    data: Sequence[wire.Datum],
    name: str,
    bad: Callable[[NDArray[Any]], NDArray[np.bool_]],
    problem: str,
) -> None:
    """Raise ``BadInput`` naming the first bad element of any sequence's ``name``."""
    arrays = [(at, array) for at, datum in enumerate(data) if (array := _of(datum, name))]
    if not arrays:
        return
    # One look at all of them together; only a bad call pays for finding the place.
    flat = np.frombuffer(b"".join(array.data for _, array in arrays), arrays[0][1].dtype)
    if not bad(flat).any():
        return
    for at, array in arrays:
        flat = array.numpy().ravel()
        where = np.flatnonzero(bad(flat))
        if len(where):
            place = np.unravel_index(int(where[0]), array.shape)
            position = ", ".join(str(int(part)) for part in place)
            raise BadInput(f"datum {at}: {name}[{position}] is {flat[where[0]]}, {problem}")


def _outside(array: NDArray[Any], model: ModelSpec) -> NDArray[np.bool_]:
    return (array < 0) | (array >= model.vocab_size)


def _vocabulary(model: ModelSpec) -> str:
    return (
        f"which is no token of {model.name} (0..{model.vocab_size - 1}): "
        "tokenize with this model's tokenizer"
    )


def optim_step_of(params: AdamParams) -> wire.OptimStep:
    """One AdamW step; raises ``BadInput``."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise BadInput(f"adam_params.{name} is {value}: give a finite number of at least 0")
    for name in ("beta1", "beta2"):
        if getattr(params, name) >= 1:
            raise BadInput(f"adam_params.{name} is {getattr(params, name)}: it must be below 1")
    return wire.OptimStep(
        learning_rate=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        grad_clip_norm=params.grad_clip_norm,
    )


def check_name(name: str) -> None:
    """Raise ``BadInput`` unless a checkpoint may be called that."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            f"{name!r} cannot name a checkpoint: use up to 128 of A-Z a-z 0-9 . _ - "
            "and no leading dot or dash"
        )


def check_training_uri(uri: str) -> None:
    """Raise ``BadInput`` unless ``uri`` may hold training state."""
    found = _URI.fullmatch(uri)
    if found is None:
        raise BadInput(f"{uri!r} is no checkpoint: it must read tinker://RUN/weights/NAME")
    if found[2] != "weights":
        raise BadInput(
            f"{uri} holds sampling weights only; load one that save_state wrote "
            "(tinker://RUN/weights/NAME)"
        )


# ---- sampling -----------------------------------------------------------------------------


def sample_of(asked: Asample, model: ModelSpec) -> wire.Sample:
    """The body of a sample call; its seed is 0 if none was asked for. Raises ``BadInput``."""
    _check_offered(asked)
    prompt = _prompt(asked, model)
    params = asked.sampling_params
    if not 1 <= asked.num_samples <= MAX_SAMPLES:
        raise BadInput(f"num_samples is {asked.num_samples}: ask for 1 to {MAX_SAMPLES}")
    room = model.max_context_length - len(prompt)
    max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
    if max_tokens < 1:
        raise BadInput(f"max_tokens is {max_tokens}: ask for at least 1")
    if max_tokens > room:
        raise BadInput(
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, but the context "
            f"of {model.name} is {model.max_context_length}: shorten the prompt or ask for fewer"
        )
    _check_filters(params, asked.num_samples)
    strings, tokens = _stops(params, model)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(asked, name) <= model.vocab_size:
            raise BadInput(f"{name} is {getattr(asked, name)}: give 0 to {model.vocab_size}")
    return wire.Sample(
        prompt=prompt,
        num_samples=asked.num_samples,
        max_tokens=max_tokens,
        seed=params.seed or 0,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop_strings=strings,
        stop_tokens=tokens,
        ignore_eos=params.stop == [],
        prompt_logprobs=bool(asked.prompt_logprobs),
        topk_prompt_logprobs=asked.topk_prompt_logprobs,
        topk_sample_logprobs=asked.topk_sample_logprobs,
    )


def _check_offered(asked: Asample) -> None:
    # The SDK fails loudly if these are ignored; record_stability_info may be, and is.
    for name, given in (
        ("target_prompt_logprobs", asked.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", asked.prompt_alt_tokens_k != 0),
        ("prompt_logprobs_last_n", asked.prompt_logprobs_last_n is not None),
    ):
        if given:
            raise BadInput(
                f"{name} is not offered here: use include_prompt_logprobs or "
                "topk_prompt_logprobs, which score the whole prompt"
            )


def _prompt(asked: Asample, model: ModelSpec) -> list[int]:
    for chunk in asked.prompt.chunks:
        if chunk.type != "encoded_text":
            raise BadInput(f"the prompt has a chunk of type {chunk.type}; models here read text")
    prompt = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
    if not prompt:
        raise BadInput("the prompt is empty: give at least one token")
    _check_tokens("the prompt", prompt, model)
    return prompt


def _check_tokens(where: str, tokens: Sequence[int], model: ModelSpec) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < model.vocab_size):
        at = next(i for i, token in enumerate(tokens) if not 0 <= token < model.vocab_size)
        raise BadInput(f"token {at} of {where} is {tokens[at]}, {_vocabulary(model)}")


def _check_filters(params: SamplingParams, num_samples: int) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise BadInput(f"temperature is {params.temperature}: give a finite number of at least 0")
    if not 0 < params.top_p <= 1:
        raise BadInput(f"top_p is {params.top_p}: give a number above 0 and at most 1")
    if params.top_k != -1 and params.top_k < 1:
        raise BadInput(f"top_k is {params.top_k}: give at least 1, or -1 to turn it off")
    if params.seed is not None and not 0 <= params.seed <= SEEDS - num_samples:
        raise BadInput(f"seed is {params.seed}: seed + num_samples must lie within 0..{SEEDS}")


def _stops(params: SamplingParams, model: ModelSpec) -> tuple[list[str], list[int]]:
    stop = params.stop
    given = [stop] if isinstance(stop, str) else stop or []
    strings = [each for each in given if isinstance(each, str)]
    tokens = [each for each in given if isinstance(each, int)]
    if "" in strings:
        raise BadInput("a stop string is empty: leave it out")
    _check_tokens("stop", tokens, model)
    return strings, tokens
