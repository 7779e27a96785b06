"""Bodies of JSON requests, read straight into structs; fields that we ignore are not listed.

A training or sampling call is read twice if it must be: whole, and, when that fails, only its
identity, because a call whose identity is known is accepted and fails in its turn.
"""

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from fastapi import Request

from plexrl_slurm.core.errors import BadInput

#: Longest request body, after decompression.
BODY_LIMIT = 256 << 20

T = TypeVar("T")
#: What the database can hold; a call with another number cannot be accepted.
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


async def body_of(request: Request) -> tuple[bytes, bool]:
    """The body and whether it is whole; of an oversized one, its first part."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        # Read on to the end: a client that is cut off while it writes sees no answer.
        if size <= BODY_LIMIT or not chunks:
            chunks.append(chunk)
    return b"".join(chunks), size <= BODY_LIMIT


async def read(kind: type[T], request: Request) -> T:
    """The body as ``kind``; raises ``BadInput``."""
    raw, whole = await body_of(request)
    if not whole:
        raise BadInput(f"the request is larger than {BODY_LIMIT >> 20} MiB: send less at once")
    return parse(kind, raw)


def parse(kind: type[T], raw: bytes) -> T:
    """``raw`` as ``kind``; raises ``BadInput`` naming the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{kind.__name__}: {error}") from error


# ---- sessions -----------------------------------------------------------------------------


class CreateSession(msgspec.Struct):
    """``POST create_session``."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(msgspec.Struct):
    """``POST session_heartbeat``."""

    session_id: str


class FinishReason(msgspec.Struct):
    """``success``, ``errored`` or ``interrupted``."""

    type: str


class FinishSession(msgspec.Struct):
    """``POST sessions/{id}/finish``."""

    reason: FinishReason
    detail: str | None = None


# ---- training -----------------------------------------------------------------------------


class TrainingCall(msgspec.Struct):
    """The identity of any training call."""

    model_id: str
    seq_id: Number


class LoraConfig(msgspec.Struct):
    """Rank 0 asks for full-parameter training."""

    rank: Number = 0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct):
    """Which optimizer a model keeps for life."""

    type: str = "adamw"


class CreateModel(msgspec.Struct):
    """``POST create_model``."""

    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class GetInfo(msgspec.Struct):
    """``POST get_info`` and ``unload_model``."""

    model_id: str


class AdamParams(msgspec.Struct):
    """``tinker.types.AdamParams``, with its defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct):
    """``POST optim_step``; ``optimizer_params`` are those of another optimizer than Adam."""

    model_id: str
    seq_id: Number
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None


class SaveWeights(msgspec.Struct):
    """``POST save_weights``."""

    model_id: str
    seq_id: Number
    path: str | None = None
    overwrite: bool = False


class LoadTarget(msgspec.Struct):
    """Which model a load is for: none means a new one."""

    model_id: str | None = None
    seq_id: Number | None = None


class LoadWeights(msgspec.Struct):
    """``POST load_weights``: into ``(model_id, seq_id)``, or create ``(session_id, …)`` with it."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(msgspec.Struct):
    """``POST save_weights_for_sampler``: named by ``path``, else ephemeral."""

    model_id: str
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"


# ---- sampling -----------------------------------------------------------------------------


class CreateSamplingSession(msgspec.Struct):
    """``POST create_sampling_session``."""

    session_id: str
    sampling_session_seq_id: Number
    model_path: str | None = None
    base_model: str | None = None


class Chunk(msgspec.Struct):
    """A piece of a prompt; only ``encoded_text`` has tokens."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(msgspec.Struct):
    """A prompt."""

    chunks: list[Chunk]


class SamplingParams(msgspec.Struct):
    """``tinker.types.SamplingParams``."""

    max_tokens: int | None = None
    seed: int | None = None
    #: Absent: stop at the model's own end; empty: do not even stop there.
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SamplingCall(msgspec.Struct):
    """The identity of a sampling call, and how many sequence ids its answer owes."""

    sampling_session_id: str
    seq_id: Number
    num_samples: int = 1


class Asample(msgspec.Struct):
    """``POST asample``."""

    sampling_session_id: str
    seq_id: Number
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: msgspec.Raw | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


# ---- the rest -----------------------------------------------------------------------------


class RetrieveFuture(msgspec.Struct):
    """``POST retrieve_future`` and ``cancel_future``."""

    request_id: str


class WeightsInfo(msgspec.Struct):
    """``POST weights_info``."""

    tinker_path: str
