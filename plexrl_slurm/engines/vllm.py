"""The rollout engine: vLLM's AsyncLLM, whose weights are replaced in place.

One slot per architecture: ``max_slots`` of them awake, ``max_asleep`` more without their device
memory. With ``second_slot`` one more is awake, also of the same architecture: a load then takes a
slot in which nothing runs, and the samples in the other one go on. A call's samples are one
request of vLLM's with ``n`` children, seeded ``seed + i``; only finished requests are answered,
and text is decoded only where stop strings ask for it. A paused call's request is aborted, which
tells what it has; it goes on as a request for each sample, see
:mod:`plexrl_slurm.engines.resume`.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, InvalidTransition, UnknownModel
from plexrl_slurm.engines import resume, snapshot_files
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.device_memory import DeviceMemory, on_the_same
from plexrl_slurm.engines.gpus import check_torch
from plexrl_slurm.engines.sampling import check_sample, top_k
from plexrl_slurm.engines.vllm_draws import DRAWN
from plexrl_slurm.engines.vllm_slots import Slot, shapes_of
from plexrl_slurm.memory.refusals import image_refusals

#: Between two attempts to pause a call whose requests vLLM may not have heard of yet.
PAUSE_S = 0.005


@dataclass(slots=True, eq=False, kw_only=True)
class _Working:
    """A sample call that vLLM works on."""

    slot: Slot
    name: str
    can_pause: bool
    #: Its requests that vLLM has, by vLLM's names.
    requests: set[str] = field(default_factory=set)
    pausing: bool = False


class VllmEngine:
    """A :class:`plexrl_slurm.engines.base.SampleEngine`."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        #: The one used last is the last; its weights are sampled.
        self._slots: list[Slot] = []
        self._two = bool(spec.options.get("second_slot"))
        self._numbers = count()
        self._working: dict[str, _Working] = {}
        self._broken: asyncio.Future[str] | None = None

    async def start(self) -> None:
        check_torch()
        self._broken = asyncio.get_running_loop().create_future()
        first = self._spec.options.get("model") or next(iter(self._spec.models))
        for _ in range(1 + self._two):
            await self._open(self._model(str(first)))

    async def load_snapshot(self, path: Path, *, model: str) -> int:
        spec = self._model(model)
        self._refuse_while_sampling(f"load {path}", slots=1 + self._two)
        with image_refusals(path):
            files = snapshot_files.find(path)
            key = snapshot_files.key_of(files)
            slot = self._slot_for(spec, key)
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
        self._slots.remove(slot)
        self._slots.append(slot)
        if slot.key == key:
            slot.model = spec
            return moved
        return moved + await slot.load(files, key, spec)

    async def sample(self, call: str, body: wire.Sample) -> wire.SampleOutput | wire.Paused:
        slot = self._slots[-1] if self._slots else None
        if slot is None or slot.key is None:
            raise InvalidTransition("vLLM", "no weights loaded", f"sample {call}", ())
        check_sample(body, slot.model)
        name = f"{call}-{next(self._numbers)}"
        work = _Working(slot=slot, name=name, can_pause=resume.can_pause(body))
        slot.running.add(name)
        self._working[call] = work
        try:
            return await (_go_on(work, body) if body.resume else _begin(work, body))
        finally:
            slot.running.discard(name)
            del self._working[call]

    async def pause(self, call: str) -> None:
        work = self._working.get(call)
        if work is None or not work.can_pause:
            return
        work.pausing = True
        while self._working.get(call) is work:
            await work.slot.engine.abort(sorted(work.requests), internal=True)
            await asyncio.sleep(PAUSE_S)

    async def broken(self) -> str:
        assert self._broken is not None, "broken before start"
        return await asyncio.shield(self._broken)

    async def close(self) -> None:
        while self._slots:
            await self._slots.pop().close()

    def _model(self, name: str) -> ModelSpec:
        try:
            return self._spec.models[name]
        except KeyError:
            raise UnknownModel(name, tuple(self._spec.models)) from None

    def _slot_for(self, spec: ModelSpec, key: snapshot_files.Key) -> Slot | None:
        """Where these weights are, or can be loaded: it is of the model's architecture, and nothing
        runs there; awake if there is a choice, and the one used least. ``None``: there is none."""
        fitting = [slot for slot in self._slots if slot.model.architecture == spec.architecture]
        for slot in reversed(fitting):
            if slot.key == key:
                return slot
        idle = sorted((slot for slot in fitting if not slot.running), key=lambda slot: slot.asleep)
        return idle[0] if idle else None

    def _refuse_while_sampling(self, wanted: str, *, slots: int = 1) -> None:
        """Unless less than so many slots are sampled."""
        busy = [slot for slot in self._slots if slot.running]
        running = [name for slot in busy for name in sorted(slot.running)]
        if len(busy) >= slots:
            state = f"sampling {len(running)} calls ({running[0]} ...)"
            raise InvalidTransition("vLLM", state, wanted, ())

    async def sleep(self) -> DeviceMemory:
        self._refuse_while_sampling("sleep")
        for slot in self._awake():
            await slot.sleep()
        return await self.memory()

    async def wake(self) -> DeviceMemory:
        if not self._awake():
            await self._slots[-1].wake()
        return await self.memory()

    async def memory(self) -> DeviceMemory:
        return on_the_same([await slot.memory() for slot in self._slots])

    def _awake(self) -> list[Slot]:
        """The one used least first."""
        return [slot for slot in self._slots if not slot.asleep]

    async def _open(self, model: ModelSpec) -> Slot:
        """A slot that holds the model folder's own weights."""
        await self._make_room()
        asleep = [slot for slot in self._slots if slot.asleep]
        for slot in asleep[: max(0, len(asleep) - int(self._spec.options.get("max_asleep", 1)))]:
            self._slots.remove(slot)
            await slot.close()
        slot = await Slot.open(self._spec, model, ended=self._ended)
        self._slots.append(slot)
        return slot

    async def _make_room(self) -> None:
        """Put the slots used least to sleep, so that one more may be awake."""
        awake = self._awake()
        most = int(self._spec.options.get("max_slots", 1)) + self._two
        idle = [slot for slot in awake if not slot.running]
        for slot in idle[: max(0, len(awake) + 1 - most)]:
            await slot.sleep()

    def _ended(self, why: str) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(why)


# ---- requests -----------------------------------------------------------------------------


async def _begin(work: _Working, body: wire.Sample) -> wire.SampleOutput | wire.Paused:
    greedy = body.temperature == 0
    params = _parameters(body, vocabulary=work.slot.model.vocab_size, n=1 if greedy else 0)
    output, _ = await _generate(work, work.name, body.prompt, params)
    sequences = [_sequence(one, body.topk_sample_logprobs) for one in output.outputs]
    if greedy:
        # All the same one; vLLM refuses to compute it twice.
        sequences *= body.num_samples
    prompt_logprobs, topk_prompt = _prompt(output.prompt_logprobs, body)
    return _ended(
        wire.SampleOutput(
            sequences=sequences,
            prompt_logprobs=prompt_logprobs,
            topk_prompt=topk_prompt,
            cached_tokens=output.num_cached_tokens or 0,
        )
    )


async def _go_on(work: _Working, body: wire.Sample) -> wire.SampleOutput | wire.Paused:
    from vllm.sampling_params import RequestOutputKind

    async def one(number: int) -> tuple[wire.Sequence, int, int]:
        rest = resume.rest(body, number)
        params = _parameters(rest, vocabulary=work.slot.model.vocab_size, n=1)
        params.extra_args = {DRAWN: len(body.resume[number].tokens)}
        # All outputs, for the first of them tells when the prompt had been computed.
        params.output_kind = RequestOutputKind.CUMULATIVE
        output, took_us = await _generate(work, f"{work.name}.{number}", rest.prompt, params)
        sequence = _sequence(output.outputs[0], body.topk_sample_logprobs)
        return sequence, len(rest.prompt), took_us

    numbers = resume.rests(body)
    rests = await asyncio.gather(*(one(number) for number in numbers))
    ended = {number: sequence for number, (sequence, _, _) in zip(numbers, rests, strict=True)}
    prefilled = sum(tokens for _, tokens, _ in rests), max((us for *_, us in rests), default=0)
    return _ended(wire.SampleOutput(sequences=resume.whole(body, ended), prefilled=prefilled))


def _ended(output: wire.SampleOutput) -> wire.SampleOutput | wire.Paused:
    if any(sequence.stop_reason == resume.PAUSED for sequence in output.sequences):
        return wire.Paused(output.sequences)
    return output


async def _generate(work: _Working, name: str, prompt: list[int], params: Any) -> tuple[Any, int]:
    """The last output of a request, and how many microseconds the first took to come.

    As vLLM's own ``generate``, but one knows from when on the request can be aborted: an abort
    that overtakes it would leave it running.
    """
    from vllm.exceptions import VLLMClientError

    engine = work.slot.engine
    tokens = {"type": "token", "prompt_token_ids": prompt}
    began, took = time.monotonic(), 0.0
    try:
        queue = await engine.add_request(name, tokens, params)
    except VLLMClientError as error:
        raise BadInput(str(error)) from error
    work.requests.add(queue.request_id)
    try:
        output = await queue.get()
        took = time.monotonic() - began
        while not output.finished:
            output = await queue.get()
    except asyncio.CancelledError:
        await engine.abort(queue.request_id, internal=True)
        raise
    finally:
        queue.close()
    known = {"stop", "length", *(["abort"] if work.pausing else [])}
    if any(one.finish_reason not in known for one in output.outputs):
        raise InvalidTransition("vLLM", f"sampling {name}", "aborted by the engine", ())
    return output, int(took * 1e6)


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
        stop_reason="paused" if output.finish_reason == "abort" else output.finish_reason,
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
