"""The SDK's protobuf messages <-> our wire values. Structure is checked here, meaning is not.

The message module is loaded from its file: importing ``tinker`` takes seconds and loads torch.
"""

import importlib.util
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from plexrl_slurm import wire
from plexrl_slurm.core.errors import BadInput

#: Most elements of one densified tensor.
MAX_ELEMENTS: Final = 64 << 20
#: Reductions that the SDK knows; a metric is named ``name:reduction`` or crashes it.
_REDUCTIONS: Final = frozenset({"mean", "sum", "min", "max", "slack", "hash2", "unique"})


def _load() -> Any:
    package = importlib.util.find_spec("tinker")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0], "proto", "tinker_public_pb2.py")
    spec = importlib.util.spec_from_file_location("plexrl_slurm_tinker_public_pb2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pb: Final = _load()

_DTYPES: Final = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_INT64: "int64", pb.DTYPE_INT32: "int32"}


# ---- requests -----------------------------------------------------------------------------


def unpacked(raw: bytes, encoding: str, limit: int) -> tuple[bytes, bool]:
    """A body without its ``Content-Encoding``, and whether that is all; raises ``BadInput``."""
    if encoding in ("", "identity"):
        return raw, True
    if encoding != "zstd":
        raise BadInput(f"Content-Encoding {encoding!r} is not known here: send zstd or none")
    try:
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise BadInput(f"the body is not zstd: {error}") from error
    return plain, len(plain) <= limit


def request_of(raw: bytes) -> Any:
    """A parsed ``ForwardBackwardRequest``; raises ``BadInput``."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise BadInput(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


def identity_of(raw: bytes) -> tuple[str, int] | None:
    """``(model_id, seq_id)`` of a request that is cut off or malformed further on.

    They are fields 1 and 2, and the SDK writes fields in order.
    """
    try:
        if raw[0] != 0x0A:
            return None
        length, at = _varint(raw, 1)
        model_id = raw[at : at + length].decode()
        if raw[at + length] != 0x10:
            return None
        seq_id, _ = _varint(raw, at + length + 1)
    except (IndexError, UnicodeDecodeError):
        return None
    return model_id, seq_id


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError(at)


def forward_backward_of(message: Any) -> wire.ForwardBackward:
    """The body of a parsed request; raises ``BadInput``."""
    config: dict[str, float] = {}
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise BadInput(f"loss_fn_config[{key!r}] is text; losses here take numbers only")
        config[key] = value.number
    if not config:
        config = dict(message.loss_fn_config)
    return wire.ForwardBackward(
        data=[_datum(index, datum) for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=config,
        forward_only=message.forward_only,
    )


def _datum(index: int, datum: Any) -> wire.Datum:
    pieces: list[bytes] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise BadInput(f"datum {index} has an image or audio chunk; models here read text only")
        pieces.append(chunk.encoded_text.tokens)
    text = b"".join(pieces)
    if len(text) % 4:
        raise BadInput(f"datum {index}: {len(text)} bytes are no whole number of int32 tokens")
    tokens = np.frombuffer(text, np.int32).astype(np.int64)
    inputs = {
        name: _array(f"datum {index}, {name}", tensor)
        for name, tensor in sorted(datum.loss_fn_inputs.items())
    }
    return wire.Datum(tokens=wire.Array.of(tokens), inputs=inputs)


def _array(where: str, tensor: Any) -> wire.Array:
    """A dense tensor as it is, a sparse CSR one densified with zeros."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise BadInput(f"{where}: dtype number {tensor.dtype} is none of float32, int64, int32")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise BadInput(f"{where}: shape {list(shape)} is negative or too large")
    if tensor.HasField("sparse_csr"):
        return wire.Array.of(_densified(where, tensor.sparse_csr, dtype, shape))
    width = np.dtype(dtype).itemsize
    if not shape:
        shape = (len(tensor.dense) // width,)
    if len(tensor.dense) != math.prod(shape) * width:
        raise BadInput(
            f"{where}: {len(tensor.dense)} bytes do not fill shape {list(shape)} of {dtype}"
        )
    return wire.Array(dtype, shape, tensor.dense)


def _densified(where: str, csr: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    broken = BadInput(f"{where}: its sparse CSR indices do not describe shape {list(shape)}")
    if (
        len(shape) != 2
        or any(len(part) % 8 for part in (csr.crow_indices, csr.col_indices))
        or len(csr.values) % np.dtype(dtype).itemsize
    ):
        raise broken
    rows, columns = shape
    starts = np.frombuffer(csr.crow_indices, np.int64)
    at = np.frombuffer(csr.col_indices, np.int64)
    values = np.frombuffer(csr.values, dtype)
    counts = np.diff(starts)
    if (
        len(starts) != rows + 1
        or len(at) != len(values)
        or starts[0] != 0
        or starts[-1] != len(values)
        or (counts < 0).any()
        or (len(at) and (at.min() < 0 or at.max() >= columns))
    ):
        raise broken
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(rows), counts), at] = values
    return dense


# ---- results ------------------------------------------------------------------------------


def forward_backward_bytes(output: wire.TrainOutput) -> bytes:
    """A ``ForwardBackwardOutput``: one record for each run of equal trailing shapes."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing, run in groupby(output.logprobs, key=lambda array: array.shape[1:]):
        arrays = list(run)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
        field.data = b"".join(array.data for array in arrays)
        ends = np.cumsum([0, *(len(array.data) for array in arrays)], dtype=np.int64)
        field.offsets = ends.tobytes()
    for name, value in output.metrics.items():
        message.metrics[_metric_name(name)] = value
    return bytes(message.SerializeToString())


def _metric_name(name: str) -> str:
    base, _, reduction = name.rpartition(":")
    if base and ":" not in base and reduction in _REDUCTIONS:
        return name
    return f"{name.replace(':', '_')}:mean"


def sample_bytes(output: wire.SampleOutput) -> bytes:
    """A ``SampleResponse``."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=output.cached_tokens)
    for sequence in output.sequences:
        added = message.sequences.add(
            stop_reason=(
                pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
            ),
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=_floats(sequence.logprobs),
        )
        if sequence.topk is not None:
            added.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk))
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(
            math.nan if value is None else value for value in output.prompt_logprobs
        )
    if output.topk_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(output.topk_prompt))
    return bytes(message.SerializeToString())


def _floats(values: Iterable[float] | Sequence[float]) -> bytes:
    return np.asarray(list(values), np.float32).tobytes()


def _topk(topk: wire.TopK) -> Any:
    length, k = topk.tokens.shape
    return pb.TopkLogprobs(
        token_ids=topk.tokens.numpy().astype(np.int32, copy=False).tobytes(),
        logprobs=topk.logprobs.numpy().astype(np.float32, copy=False).tobytes(),
        length=length,
        k=k,
    )
