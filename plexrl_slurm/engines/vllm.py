"""The rollout engine: vLLM's AsyncLLM, whose weights are replaced in place.

One slot per architecture: ``max_slots`` of them awake, ``max_asleep`` more without their device
memory. A call's samples are one request of vLLM's with ``n`` children, seeded
``seed + i``; only finished requests are answered, and text is decoded only where stop strings
ask for it.
"""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, InvalidTransition, UnknownModel
from plexrl_slurm.engines import snapshot_files
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.device_memory import DeviceMemory, together
from plexrl_slurm.engines.gpus import check_torch
from plexrl_slurm.engines.sampling import check_sample, top_k
from plexrl_slurm.engines.vllm_slots import Slot, shapes_of


class VllmEngine:
    """A :class:`plexrl_slurm.engines.base.SampleEngine`."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        #: By architecture; the one used last is the last.
        self._slots: dict[str, Slot] = {}
        self._numbers = count()
        self._broken: asyncio.Future[str] | None = None

    async def start(self) -> None:
        check_torch()
        self._broken = asyncio.get_running_loop().create_future()
        first = self._spec.options.get("model") or next(iter(self._spec.models))
        await self._open(self._model(str(first)))

    async def load_snapshot(self, path: Path, *, model: str) -> int:
        spec = self._model(model)
        self._refuse_while_sampling(f"load {path}")
        files = snapshot_files.find(path)
        key = snapshot_files.key_of(files)
        slot = self._slots.get(spec.architecture)
        if slot is None or slot.key != key:
            own = slot.shapes if slot else shapes_of(snapshot_files.find(Path(spec.path)))
            snapshot_files.compare(path, files, own)
        moved = 0
        if slot is None:
            slot = await self._open(spec)
            moved = spec.weights_bytes
        elif slot.asleep:
            await self._make_room()
            await slot.wake()
        self._slots[spec.architecture] = self._slots.pop(spec.architecture)  # the one used last
        if slot.key == key:
            slot.model = spec
            return moved
        return moved + await slot.load(files, key, spec)

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

    async def broken(self) -> str:
        assert self._broken is not None, "broken before start"
        return await asyncio.shield(self._broken)

    async def close(self) -> None:
        while self._slots:
            await self._slots.popitem()[1].close()

    def _model(self, name: str) -> ModelSpec:
        try:
            return self._spec.models[name]
        except KeyError:
            raise UnknownModel(name, tuple(self._spec.models)) from None

    def _refuse_while_sampling(self, wanted: str) -> None:
        running = [name for slot in self._slots.values() for name in sorted(slot.running)]
        if running:
            state = f"sampling {len(running)} calls ({running[0]} ...)"
            raise InvalidTransition("vLLM", state, wanted, ())

    async def sleep(self) -> DeviceMemory:
        self._refuse_while_sampling("sleep")
        for slot in self._awake():
            await slot.sleep()
        return await self.memory()

    async def wake(self) -> DeviceMemory:
        if not self._awake():
            await next(reversed(self._slots.values())).wake()
        return await self.memory()

    async def memory(self) -> DeviceMemory:
        return together([await slot.memory() for slot in self._slots.values()])

    def _awake(self) -> list[Slot]:
        """The one used least first."""
        return [slot for slot in self._slots.values() if not slot.asleep]

    async def _open(self, model: ModelSpec) -> Slot:
        """A slot that holds the model folder's own weights."""
        await self._make_room()
        asleep = [name for name, slot in self._slots.items() if slot.asleep]
        for name in asleep[: max(0, len(asleep) - int(self._spec.options.get("max_asleep", 1)))]:
            await self._slots.pop(name).close()
        slot = await Slot.open(self._spec, model, ended=self._ended)
        self._slots[model.architecture] = slot
        return slot

    async def _make_room(self) -> None:
        """Put the slots used least to sleep, so that one more may be awake."""
        awake = self._awake()
        for slot in awake[: max(0, len(awake) + 1 - int(self._spec.options.get("max_slots", 1)))]:
            await slot.sleep()

    def _ended(self, why: str) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(why)


# ---- requests -----------------------------------------------------------------------------


async def _generate(slot: Slot, name: str, body: wire.Sample) -> wire.SampleOutput:
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
