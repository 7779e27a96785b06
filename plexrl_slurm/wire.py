"""Values that cross a process border, and their one encoding (msgpack, by msgspec).

Bodies of calls (what a controller asked), results (what it gets), and nothing else: links
have their own envelopes in ``transport``. No field is ever a pickle.
"""

from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

#: dtypes an array may have on the wire.
DTYPES = ("float32", "int64", "int32", "bool")


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A dense C-ordered little-endian array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> "Array":
        array = np.ascontiguousarray(array)
        return cls(str(array.dtype), array.shape, array.tobytes())

    def numpy(self) -> NDArray[np.generic]:
        """A read-only view; raises ``ValueError`` if the bytes do not fit the shape."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} is none of {', '.join(DTYPES)}")
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


class Datum(msgspec.Struct, frozen=True):
    """One training sequence: ``tokens`` int64 ``[T]``; every input ``[T]`` or ``[T, K]``."""

    tokens: Array
    inputs: dict[str, Array]


# ---- bodies -------------------------------------------------------------------------------


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Initialise a full-parameter deployment from a catalogue model."""

    base_model: str
    seed: int = 0
    #: Checkpoint to load on top ("" for none), with its optimizer state if ``optimizer``.
    load_path: str = ""
    load_uri: str = ""
    optimizer: bool = False
    #: Of the catalogue's weights when it was accepted; "": of any. See ``model_fingerprint``.
    fingerprint: str = ""


class ForwardBackward(msgspec.Struct, frozen=True, tag="forward_backward"):
    """Loss and gradients (``forward_only``: logprobs and loss, no gradients) of some sequences."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float] = {}
    forward_only: bool = False


class OptimStep(msgspec.Struct, frozen=True, tag="optim_step"):
    """AdamW with the accumulated gradients (``tinker.types.AdamParams``)."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    #: Largest global L2 norm of the gradient; 0 turns clipping off.
    grad_clip_norm: float


class SaveState(msgspec.Struct, frozen=True, tag="save_state"):
    """Write weights and optimizer into the folder ``path`` (complete or not at all)."""

    path: str
    #: What the caller sees: ``tinker://…/weights/NAME``.
    uri: str


class LoadState(msgspec.Struct, frozen=True, tag="load_state"):
    """Replace weights (and optimizer moments and step) by those in the folder ``path``."""

    path: str
    uri: str
    optimizer: bool


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Write the sampling weights as snapshot ``snapshot`` (one safetensors file, HF names)."""

    snapshot: str
    #: Durable copy to write as well, for named ones; "" for ephemeral ones.
    path: str = ""
    #: ``tinker://…/sampler_weights/NAME`` for named ones.
    uri: str = ""


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Completions of one prompt."""

    #: Prompt token ids.
    prompt: list[int]
    num_samples: int
    max_tokens: int
    #: Sample ``i`` uses ``seed + i``.
    seed: int
    temperature: float = 1.0
    #: -1: off.
    top_k: int = -1
    top_p: float = 1.0
    #: Stop strings (the completion includes the tokens that spell one), or
    stop_strings: list[str] = []
    #: stop token ids (the completion includes it).
    stop_tokens: list[int] = []
    #: Do not stop at the model's end-of-sequence token (the SDK's ``stop=[]``).
    ignore_eos: bool = False
    #: Logprob of every prompt token given those before it.
    prompt_logprobs: bool = False
    #: For every prompt position the K most likely tokens.
    topk_prompt_logprobs: int = 0
    #: For every sampled position the K most likely tokens.
    topk_sample_logprobs: int = 0
    #: What a pause left (:class:`Paused`), one for each sample, to go on from; empty: nothing.
    resume: list["Sequence"] = []


class Doomed(msgspec.Struct, frozen=True, tag="doomed"):
    """A call that was accepted only to fail in its turn, because its input is bad."""

    message: str


Body: TypeAlias = (
    Create | ForwardBackward | OptimStep | SaveState | LoadState | Publish | Sample | Doomed
)

# ---- results ------------------------------------------------------------------------------


class TrainOutput(msgspec.Struct, frozen=True, tag="train"):
    """``logprobs[i]`` float32, shaped like datum ``i``'s targets; metrics ``name:reduction``."""

    logprobs: list[Array]
    metrics: dict[str, float]


class OptimOutput(msgspec.Struct, frozen=True, tag="optim"):
    """Metrics of one optimizer step, for example ``grad_norm``."""

    metrics: dict[str, float]


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """Something was written or loaded; ``bytes`` of it."""

    uri: str
    bytes: int
    #: Equal weights have equal names (:mod:`plexrl_slurm.core.content`); "": not known.
    content: str = ""


class TopK(msgspec.Struct, frozen=True, array_like=True):
    """``tokens`` int32 and ``logprobs`` float32, both ``[N, K]``; empty cells are (0, -99999)."""

    tokens: Array
    logprobs: Array


class Sequence(msgspec.Struct, frozen=True):
    """One completion."""

    tokens: list[int]
    #: One per token: logprob under the raw (temperature 1, unfiltered) distribution.
    logprobs: list[float]
    #: ``stop`` or ``length``; ``paused`` if it goes on after a pause.
    stop_reason: str
    topk: TopK | None = None


class SampleOutput(msgspec.Struct, frozen=True, tag="sample"):
    """What sampling one prompt gave."""

    sequences: list[Sequence]
    #: One per prompt token; the first is ``None``.
    prompt_logprobs: list[float | None] | None = None
    topk_prompt: TopK | None = None
    #: Prompt tokens found in the prefix cache.
    cached_tokens: int = 0
    #: After a pause: tokens whose keys and values were computed again, and microseconds it took.
    prefilled: tuple[int, int] = (0, 0)


class Paused(msgspec.Struct, frozen=True, tag="paused"):
    """A sample call was stopped at a token boundary; ``Sample.resume`` takes it up again."""

    sequences: list[Sequence]

    @property
    def tokens(self) -> int:
        """Sampled so far, of the samples that go on."""
        return sum(len(s.tokens) for s in self.sequences if s.stop_reason == "paused")


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The function failed. ``category``: ``user`` or ``server``."""

    message: str
    category: str = "user"


class Created(msgspec.Struct, frozen=True, tag="created"):
    """A deployment exists."""

    parameters: int


Result: TypeAlias = TrainOutput | OptimOutput | Saved | SampleOutput | Failed | Created

#: What one run gives.
RunResult: TypeAlias = Result | Paused

_encoder = msgspec.msgpack.Encoder()
_bodies = msgspec.msgpack.Decoder(Body)
_results = msgspec.msgpack.Decoder(Result)
_paused = msgspec.msgpack.Decoder(Paused)
#: How it begins.
_PAUSED = _encoder.encode(Paused([]))[: len(b"\x82\xa4type\xa6paused")]


def encode(value: Body | RunResult) -> bytes:
    """The bytes of a body or a result."""
    return _encoder.encode(value)


def decode_body(data: bytes | memoryview) -> Body:
    """The body behind the bytes; raises ``msgspec.DecodeError`` on foreign bytes."""
    return _bodies.decode(data)


def decode_result(data: bytes | memoryview) -> Result:
    """The result behind the bytes; raises ``msgspec.DecodeError`` on foreign bytes."""
    return _results.decode(data)


def decode_paused(data: bytes | memoryview) -> Paused | None:
    """What a pause left; ``None``: the bytes are of a result. Costs nothing with a result."""
    return _paused.decode(data) if bytes(data[: len(_PAUSED)]) == _PAUSED else None
