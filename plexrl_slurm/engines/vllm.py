"""The rollout engine: vLLM's AsyncLLM, whose weights are replaced in place.

One *slot* (an AsyncLLM and its processes) per architecture. A call's samples are one request
of vLLM's with ``n`` children, seeded ``seed + i``; only finished requests are answered, and
text is decoded only where stop strings ask for it.
"""

import asyncio
import gc
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadImage, BadInput, InvalidTransition, UnknownModel
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.gpus import check_torch
from plexrl_slurm.engines.sampling import check_sample, top_k
from plexrl_slurm.engines.vllm_extension import RANK_PID, WorkerExtension

_EXTENSION: Final = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
#: Same file, same contents: ``(path, inode, mtime in ns, size)`` of every file.
Key = tuple[tuple[str, int, int, int], ...]
#: A safetensors header is never longer; the format's own limit.
_LONGEST_HEADER: Final = 100_000_000
#: Tensors that may be absent from a file, because another's weights are used for them.
_TIED: Final = frozenset({"lm_head.weight"})


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One AsyncLLM and what is in it."""

    engine: Any
    #: Shape of every tensor of the architecture.
    shapes: Mapping[str, tuple[int, ...]]
    #: The catalogue entry whose weights it holds.
    model: ModelSpec
    #: ``None`` while the weights are being replaced, and for ever if that failed.
    key: Key | None
    #: Calls that it is working on.
    running: set[str] = field(default_factory=set)


class VllmEngine:
    """A :class:`plexrl_slurm.engines.base.SampleEngine`."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        #: By architecture; the one used last is the last.
        self._slots: dict[str, _Slot] = {}
        self._numbers = count()

    async def start(self) -> None:
        check_torch()
        first = self._spec.options.get("model") or next(iter(self._spec.models))
        await self._open(self._model(str(first)))

    async def load_snapshot(self, path: Path, *, model: str) -> int:
        spec = self._model(model)
        self._refuse_while_sampling(path)
        files = _files(path)
        slot, moved = self._slots.pop(spec.architecture, None), 0
        if slot is None:
            slot = await self._open(spec)
            moved = spec.weights_bytes
        self._slots[spec.architecture] = slot  # the one used last
        key = _key(files)
        if slot.key == key:
            slot.model = spec
            return moved
        _compare(path, files, slot.shapes)
        slot.key = None
        await slot.engine.collective_rpc("plexrl_load", args=([str(file) for file in files],))
        if not await slot.engine.reset_prefix_cache():
            raise InvalidTransition("prefix cache", "in use", f"reset for {path}", ())
        slot.key, slot.model = key, spec
        return moved + sum(size for _, _, _, size in key)

    async def sample(self, call: str, body: wire.Sample) -> wire.SampleOutput:
        slot = next(reversed(self._slots.values()), None)
        if slot is None or slot.key is None:
            raise InvalidTransition("vLLM", "no weights loaded", f"sample {call}", ())
        check_sample(body, slot.model)
        name = f"{call}-{next(self._numbers)}"
        slot.running.add(name)
        try:
            return await _generate(slot, name, body)
        finally:
            slot.running.discard(name)

    async def close(self) -> None:
        while self._slots:
            await self._close_oldest()

    def _model(self, name: str) -> ModelSpec:
        try:
            return self._spec.models[name]
        except KeyError:
            raise UnknownModel(name, tuple(self._spec.models)) from None

    def _refuse_while_sampling(self, path: Path) -> None:
        running = [name for slot in self._slots.values() for name in sorted(slot.running)]
        if running:
            state = f"sampling {len(running)} calls ({running[0]} ...)"
            raise InvalidTransition("vLLM", state, f"load {path}", ())

    async def _open(self, model: ModelSpec) -> _Slot:
        """A slot that holds the model folder's own weights; may close the one used least."""
        while len(self._slots) >= int(self._spec.options.get("max_slots", 1)):
            await self._close_oldest()
        slot = await asyncio.to_thread(_open_slot, self._spec, model)
        self._slots[model.architecture] = slot
        return slot

    async def _close_oldest(self) -> None:
        slot = self._slots.pop(next(iter(self._slots)))
        if (handler := slot.engine.output_handler) is not None:
            handler.cancel()  # or it takes the end of the engine's process for a crash
            await asyncio.wait((handler,))
        await asyncio.to_thread(slot.engine.shutdown)
        slot.engine = None
        # It is part of cycles, and its __del__ must not run while Python ends.
        await asyncio.to_thread(gc.collect)


# ---- vLLM's processes ---------------------------------------------------------------------


def _open_slot(spec: RankSpec, model: ModelSpec) -> _Slot:
    files = _files(Path(model.path))
    return _Slot(
        shapes=dict(shape for file in files for shape in _shapes(file)),
        model=model,
        key=_key(files),
        engine=_start_engine(spec, model),
    )


def _start_engine(spec: RankSpec, model: ModelSpec) -> Any:
    """Import vLLM and start one AsyncLLM; takes about ten seconds and blocks."""
    threads = max(1, len(spec.cores) // spec.gpus)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)  # this thread's, which the engine process inherits
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": _thread_binding(spec.cores, spec.gpus, threads),
            # One process less between us and the weights: on one core 19 ms against 25 ms
            # for a small request, and a start of 10 s against 30 s.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            RANK_PID: str(os.getpid()),
        }
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model.path,
            dtype=model.dtype,
            max_model_len=model.max_context_length,
            tensor_parallel_size=spec.gpus,
            max_num_seqs=int(spec.options.get("max_num_seqs", 256)),
            # A prompt cut in two samples a token too many and takes it back, which a seeded
            # generator of the CPU cannot: "CPU Generator does not use offset" ends the engine.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(2048, model.max_context_length),
            block_size=int(spec.options.get("block_size", 32)),
            enable_prefix_caching=bool(spec.options.get("prefix_caching", False)),
            kv_cache_memory_bytes=int(spec.options.get("kv_cache_bytes", 256 << 20)),
            gpu_memory_utilization=0.1,
            max_logprobs=-1,
            enforce_eager=True,
            disable_log_stats=True,
            worker_extension_cls=_EXTENSION,
        )
    )


def _thread_binding(cores: tuple[int, ...], gpus: int, threads: int) -> str:
    """``0,1|2,3``: cores of each tensor-parallel worker; ``nobind`` when there are too few."""
    if len(cores) < gpus:
        return "nobind"
    shares = (cores[start * threads : (start + 1) * threads] for start in range(gpus))
    return "|".join(",".join(map(str, share)) for share in shares)


# ---- requests -----------------------------------------------------------------------------


async def _generate(slot: _Slot, name: str, body: wire.Sample) -> wire.SampleOutput:
    from vllm.exceptions import VLLMClientError

    greedy = body.temperature == 0
    prompt = {"type": "token", "prompt_token_ids": body.prompt}
    params = _parameters(body, vocabulary=slot.model.vocab_size, n=1 if greedy else 0)
    try:
        (output,) = [one async for one in slot.engine.generate(prompt, params, name)]
    except VLLMClientError as error:
        raise BadInput(str(error)) from error
    if any(one.finish_reason not in ("stop", "length") for one in output.outputs):
        raise InvalidTransition("vLLM", f"sampling {name}", "aborted by the engine", ())
    sequences = [_sequence(one, body.topk_sample_logprobs) for one in output.outputs]
    prompt_logprobs, topk_prompt = _prompt(output.prompt_logprobs, body)
    return wire.SampleOutput(
        # Greedy samples are all the same one; vLLM refuses to compute it twice.
        sequences=sequences * body.num_samples if greedy else sequences,
        prompt_logprobs=prompt_logprobs,
        topk_prompt=topk_prompt,
        cached_tokens=output.num_cached_tokens or 0,
    )


def _parameters(body: wire.Sample, *, vocabulary: int, n: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt_rows = body.prompt_logprobs or body.topk_prompt_logprobs > 0
    return SamplingParams(
        n=n or body.num_samples,
        max_tokens=body.max_tokens,
        seed=body.seed,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_strings or None,
        stop_token_ids=body.stop_tokens or None,
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(body.stop_strings),
        logprobs=min(body.topk_sample_logprobs, vocabulary),
        prompt_logprobs=min(body.topk_prompt_logprobs, vocabulary) if prompt_rows else None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _sequence(output: Any, k: int) -> wire.Sequence:
    """One completion; vLLM's flat rows are the sampled token, then the most likely ones."""
    flat, tokens = output.logprobs, list(output.token_ids)
    firsts = flat.start_indices
    return wire.Sequence(
        tokens=tokens,
        logprobs=[flat.logprobs[first] for first in firsts],
        stop_reason=output.finish_reason,
        topk=top_k(_rows(flat), length=len(tokens), k=k) if k else None,
    )


def _prompt(flat: Any, body: wire.Sample) -> tuple[list[float | None] | None, wire.TopK | None]:
    logprobs: list[float | None] | None = None
    if body.prompt_logprobs:
        spans = zip(flat.start_indices, flat.end_indices, strict=True)
        logprobs = [flat.logprobs[first] if first < end else None for first, end in spans]
    if not body.topk_prompt_logprobs:
        return logprobs, None
    k = body.topk_prompt_logprobs
    return logprobs, top_k(_rows(flat), length=len(body.prompt), k=k)


def _rows(flat: Any) -> Iterator[tuple[list[int], list[float]]]:
    for first, end in zip(flat.start_indices, flat.end_indices, strict=True):
        yield flat.token_ids[first + 1 : end], flat.logprobs[first + 1 : end]


# ---- files --------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    """The safetensors files of a snapshot or a model folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise BadImage(str(path), "there is no safetensors file")
    return files


def _key(files: list[Path]) -> Key:
    found = [(str(file), file.stat()) for file in files]
    return tuple((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in found)


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, from the header; refuses a file that is not whole."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
        header.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in header.values())
        shapes = [(name, tuple(entry["shape"])) for name, entry in header.items()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadImage(str(file), "it is no safetensors file") from error
    if file.stat().st_size != 8 + length + end:
        raise BadImage(str(file), f"it is torn: {8 + length + end} bytes were promised")
    yield from shapes


def _compare(path: Path, files: list[Path], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that would leave a tensor unset; vLLM itself would only warn."""
    found = dict(shape for file in files for shape in _shapes(file))
    for name in sorted((found.keys() ^ expected.keys()) - _TIED):
        word = "lacks" if name in expected else "has"
        raise BadImage(str(path), f"it {word} tensor {name}, unlike the slot's architecture")
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            raise BadImage(
                str(path), f"tensor {name} is {found[name]}, and the slot's is {expected[name]}"
            )
