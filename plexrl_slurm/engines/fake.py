"""Engines without torch for tests of logic: milliseconds fast, deterministic and strict.

A deployment's state is a handful of hashes of everything that took effect on it, so two
histories that should end equal do, and two that should not do not. Wrong use, which a real
engine would answer with a crash or garbage, is an ``AssertionError`` here.

``options`` of both: ``delay_us`` (a mapping of method names to microseconds), ``crash_on`` (a
list of ``{"kind": method, "count": n}``, with ``"rank"`` for one rank only: the process ends with
code 9 at the n-th such call; ``half_image`` is the middle of writing an image) and
``crash_marker`` (a file that keeps it from happening twice; the crash makes it). With ``clock`` a
training call's metrics say when the rank began and ended it.
With ``image_bytes`` an image has so many bytes more, so that a tier can be too small for it, and
with ``gradient_bytes`` one with an open step; with ``snapshot_bytes`` a published snapshot, so that
it takes a while to get to another node. With ``token_us`` each token of a sample takes so long,
beside ``delay_us``. With ``second_slot`` a load may come while other weights are sampled.
"""

import asyncio
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from plexrl_slurm import wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core import content
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadImage, BadInput, StorageFailed, StorageFull
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.device_memory import DeviceMemory
from plexrl_slurm.engines.fake_pause import Progress
from plexrl_slurm.engines.sampling import check_sample, top_k
from plexrl_slurm.memory.files import part_name, saving_errors, storage_errors
from plexrl_slurm.memory.refusals import READ, image_refusals, refusals
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor, needed_bytes
from plexrl_slurm.model_fingerprint import check_weights

T = TypeVar("T", bound=msgspec.Struct)

#: Losses that the fakes know by name.
LOSSES: Final = frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"})


class FakeState(msgspec.Struct, frozen=True, kw_only=True):
    """A training deployment; each field is a running hash."""

    base_model: str
    weights: str
    moments: str
    #: Of the accumulated gradients; "" when there are none.
    gradients: str = ""
    step: int = 0
    #: Of the model's folder.
    fingerprint: str = ""


class FakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Published sampling weights."""

    base_model: str
    weights: str
    #: As much as a test wants.
    more: bytes = b""


def base_weights(model: str) -> str:
    """The hash that stands for a catalogue model's own weights."""
    return _hash("base", model)


def _content(state: FakeState) -> str:
    if state.weights == base_weights(state.base_model):
        return content.text(content.of_base(state.base_model, state.fingerprint))
    return content.text(content.of_files(state.weights))


def fake_memory(spec: RankSpec, *, awake: bool) -> DeviceMemory:
    """What the options say: ``device_used`` awake, ``device_left`` asleep; of ``device_total``."""
    used = int(spec.options.get("device_used" if awake else "device_left", 0))
    total = spec.options.get("device_total")
    return DeviceMemory(used=used, free=None if total is None else int(total) - used)


class Faults:
    """The delays and crashes that ``options`` ask for."""

    def __init__(self, options: Mapping[str, Any], *, rank: int = 0) -> None:
        self._delays = dict(options.get("delay_us", {}))
        self._crashes = {
            (crash["kind"], crash["count"])
            for crash in options.get("crash_on", ())
            if crash.get("rank", rank) == rank
        }
        self._marker = str(options.get("crash_marker", ""))
        self._calls: Counter[str] = Counter()

    def delay_s(self, kind: str) -> float:
        """Count a call of ``kind``; crash, or answer with how long it shall take."""
        self._calls[kind] += 1
        if (kind, self._calls[kind]) in self._crashes and self._first_crash():
            os._exit(9)
        return float(self._delays.get(kind, 0)) / 1e6

    def _first_crash(self) -> bool:
        if not self._marker:
            return True
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class FakeTrainEngine:
    """A :class:`plexrl_slurm.engines.base.TrainEngine`."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._faults = Faults(spec.options, rank=spec.rank)
        self._deployment: str | None = None
        self._state: FakeState | None = None
        self._awake = not spec.asleep

    def create(self, deployment: str, body: wire.Create) -> wire.Created:
        self._enter("create")
        assert self._awake, f"{deployment} created on memory that others have"
        model = self._spec.models.get(body.base_model)
        if model is None:
            known = ", ".join(self._spec.models)
            raise BadInput(f"unknown model {body.base_model!r}; this WPG offers: {known}")
        check_weights(model, body.fingerprint)
        self._deployment = deployment
        self._state = FakeState(
            base_model=model.name,
            weights=base_weights(model.name),
            moments=_hash("zero"),
            fingerprint=body.fingerprint,
        )
        return wire.Created(parameters=model.parameters)

    def save_image(self, path: Path, *, deployment: str, progress: tuple[int, int]) -> int:
        self._enter("save_image")
        state = self._resident("save_image")
        assert deployment == self._deployment, f"{deployment} saved, {self._deployment} is resident"
        data = msgspec.msgpack.encode(state)
        slab = Slab(path)
        header = slab.write(self._header(deployment, progress, state, len(data)))
        self._enter("half_image")
        slab.views(header.tensors)[0][:] = data
        slab.commit()
        return len(data)

    def slab_bytes(self, deployment: str) -> int:
        state = self._resident("slab_bytes")
        size = len(msgspec.msgpack.encode(state))
        return needed_bytes(self._header(deployment, (1 << 31, 0), state, size))

    def load_image(self, path: Path, *, deployment: str) -> int:
        self._enter("load_image")
        assert self._awake, f"{deployment} loaded into memory that others have"
        slab = Slab(path)
        header = slab.read()
        if header.deployment != deployment:
            raise BadImage(str(path), f"holds {header.deployment}, not {deployment}")
        if (header.rank, header.world) != (self._spec.rank, self._spec.world):
            raise BadImage(str(path), f"is of rank {header.rank} of {header.world}")
        data = bytes(slab.views(header.tensors)[0])
        self._state = msgspec.msgpack.decode(data, type=FakeState)
        self._deployment = deployment
        return len(data)

    def swap_images(
        self, save: Path, load: Path, *, outgoing: str, progress: tuple[int, int], incoming: str
    ) -> int:
        moved = self.save_image(save, deployment=outgoing, progress=progress)
        return moved + self.load_image(load, deployment=incoming)

    def forward_backward(self, body: wire.ForwardBackward) -> wire.TrainOutput:
        kind = "forward" if body.forward_only else "forward_backward"
        started_us = now_us()
        self._enter(kind)
        state = self._resident(kind)
        targets = _check_data(body, self._spec.models[state.base_model])
        if not body.forward_only:
            gradients = _hash(state.gradients, state.weights, wire.encode(body))
            self._state = msgspec.structs.replace(state, gradients=gradients)
        outputs = []
        for target in targets:
            draw = _draws(state.weights, target.tobytes())
            values = [-next(draw) / 2**32 for _ in range(target.size)]
            outputs.append(np.asarray(values, dtype=np.float32).reshape(target.shape))
        metrics = {"loss:sum": -sum(float(output.sum()) for output in outputs)}
        if self._spec.options.get("clock"):
            # Modulo 2**24, so that a float32 on the wire is exact.
            metrics["rank_start_us:sum"] = float(started_us % 2**24)
            metrics["rank_end_us:sum"] = float(now_us() % 2**24)
        return wire.TrainOutput([wire.Array.of(output) for output in outputs], metrics)

    def optim_step(self, body: wire.OptimStep) -> wire.OptimOutput:
        self._enter("optim_step")
        state = self._resident("optim_step")
        numbers = {name: getattr(body, name) for name in body.__struct_fields__}
        if bad := [name for name, value in numbers.items() if not np.isfinite(value)]:
            raise BadInput(f"{bad[0]} is {numbers[bad[0]]}: give a finite number")
        if not state.gradients:
            raise BadInput("optim_step without a forward_backward since the last one")
        self._state = FakeState(
            base_model=state.base_model,
            weights=_hash(state.weights, state.moments, state.gradients, wire.encode(body)),
            moments=_hash(state.moments, state.gradients),
            step=state.step + 1,
        )
        norm, step = next(_draws(state.gradients)) / 2**32, float(self._state.step)
        return wire.OptimOutput(
            {"grad_norm": norm, "learning_rate": body.learning_rate, "step": step}
        )

    def save_state(self, body: wire.SaveState) -> wire.Saved:
        self._enter("save_state")
        state = msgspec.structs.replace(self._resident("save_state"), gradients="")
        return wire.Saved(body.uri, self._file(Path(body.path) / "state", state))

    def load_state(self, body: wire.LoadState) -> wire.Saved:
        self._enter("load_state")
        now = self._resident("load_state")
        path = Path(body.path) / "state"
        with refusals(Path(body.path), READ):
            if not path.is_file():
                raise BadInput(
                    f"there is no checkpoint {body.uri}: save it first, or correct the name"
                )
            state, size = _read(path, FakeState), path.stat().st_size
        if state.base_model != now.base_model:
            raise BadInput(f"{body.uri} is of {state.base_model}, this model is {now.base_model}")
        if not body.optimizer:
            state = msgspec.structs.replace(state, moments=_hash("zero"), step=0)
        self._state = state
        return wire.Saved(body.uri, size)

    def publish(self, body: wire.Publish, path: Path) -> wire.Saved:
        self._enter("publish")
        state = self._resident("publish")
        more = bytes(int(self._spec.options.get("snapshot_bytes", 0)))
        snapshot = FakeSnapshot(base_model=state.base_model, weights=state.weights, more=more)
        written = self._file(path, snapshot)
        if body.path:
            self._file(Path(body.path) / "model.safetensors", snapshot)
        return wire.Saved(body.uri, written, _content(state))

    def sleep(self) -> DeviceMemory:
        self._enter("sleep")
        self._deployment, self._state, self._awake = None, None, False
        return self.memory()

    def wake(self) -> DeviceMemory:
        self._enter("wake")
        self._awake = True
        return self.memory()

    def memory(self) -> DeviceMemory:
        return fake_memory(self._spec, awake=self._awake)

    def digest(self) -> str:
        state = self._resident("digest")
        return _hash(state.weights, state.moments, str(state.step), str(self._spec.rank))

    def _enter(self, kind: str) -> None:
        time.sleep(self._faults.delay_s(kind))

    def _resident(self, kind: str) -> FakeState:
        assert self._state is not None, f"{kind} while nothing is resident"
        return self._state

    def _file(self, path: Path, value: msgspec.Struct) -> int:
        """Write a file of the gang's, which is rank 0's work; returns its bytes."""
        data = msgspec.msgpack.encode(value)
        if self._spec.rank == 0:
            part = part_name(path)
            try:
                with saving_errors(path.parent), storage_errors(path.parent, len(data)):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    part.write_bytes(data)
                    part.rename(path)
            except (StorageFailed, StorageFull):
                with suppress(OSError):
                    part.unlink()
                raise
        return len(data)

    def _header(
        self, deployment: str, progress: tuple[int, int], state: FakeState, size: int
    ) -> SlabHeader:
        more = int(self._spec.options.get("image_bytes", 0))
        if state.gradients:
            more += int(self._spec.options.get("gradient_bytes", 0))
        return SlabHeader(
            deployment=deployment,
            progress=progress,
            rank=self._spec.rank,
            world=self._spec.world,
            architecture=self._spec.models[state.base_model].architecture,
            tensors=(
                SlabTensor("state", "bytes", (size,), size),
                SlabTensor("more", "bytes", (more,), more),
            ),
            state={"step": state.step},
        )


class FakeSampleEngine:
    """A :class:`plexrl_slurm.engines.base.SampleEngine`."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._faults = Faults(spec.options)
        self._started = False
        self._awake = not spec.asleep
        self._model: ModelSpec | None = None
        self._weights = ""
        self._loaded: tuple[str, int, int] | None = None
        #: And what pauses each, and the weights of which it is.
        self._running: dict[str, tuple[asyncio.Event, tuple[str, int, int] | None]] = {}
        #: Calls whose coroutine was cancelled, for tests.
        self.aborted: list[str] = []

    async def start(self) -> None:
        await asyncio.sleep(self._faults.delay_s("start"))
        assert not self._started, "started twice"
        self._started = True

    async def load_snapshot(self, path: Path, *, model: str) -> int:
        assert self._started, "load_snapshot before start"
        assert self._awake, f"{path} loaded into memory that others have"
        assert self._free(None), f"load of {path} while {sorted(self._running)} are sampled"
        self._model = None
        await asyncio.sleep(self._faults.delay_s("load_snapshot"))
        spec = self._spec.models[model]
        with image_refusals(path):
            loaded, weights = _snapshot(path, spec)
        assert self._free(loaded), f"load of {path} while others are sampled in both slots"
        here = {self._loaded, *(weights for _, weights in self._running.values())}
        moved = 0 if loaded in here else spec.weights_bytes
        self._model, self._weights, self._loaded = spec, weights, loaded
        return moved

    async def sample(self, call: str, body: wire.Sample) -> wire.SampleOutput | wire.Paused:
        assert self._model is not None, f"sample {call} while nothing is loaded"
        assert call not in self._running, f"{call} is sampled already"
        model = self._model
        check_sample(body, model)
        output = self._complete(body, model)
        token_s = float(self._spec.options.get("token_us", 0)) / 1e6
        progress = Progress(body, output, self._faults.delay_s("sample"), token_s)
        pause = asyncio.Event()
        self._running[call] = pause, self._loaded
        try:
            return await progress.run(pause)
        except asyncio.CancelledError:
            self.aborted.append(call)
            raise
        finally:
            del self._running[call]

    def _free(self, incoming: tuple[str, int, int] | None) -> bool:
        """Whether there is a slot for other weights than those that are sampled."""
        busy = {weights for _, weights in self._running.values()} - {incoming}
        return len(busy) < 1 + bool(self._spec.options.get("second_slot"))

    async def pause(self, call: str) -> None:
        if call in self._running:
            self._running[call][0].set()

    async def sleep(self) -> DeviceMemory:
        assert not self._running, f"sleep while {sorted(self._running)} are sampled"
        await asyncio.sleep(self._faults.delay_s("sleep"))
        self._model, self._loaded, self._awake = None, None, False
        return await self.memory()

    async def wake(self) -> DeviceMemory:
        await asyncio.sleep(self._faults.delay_s("wake"))
        self._awake = True
        return await self.memory()

    async def memory(self) -> DeviceMemory:
        return fake_memory(self._spec, awake=self._awake)

    async def broken(self) -> str:
        why: str = await asyncio.get_running_loop().create_future()
        return why

    async def close(self) -> None:
        assert not self._running, f"closed while {sorted(self._running)} are sampled"
        self._started, self._model = False, None

    def _complete(self, body: wire.Sample, model: ModelSpec) -> wire.SampleOutput:
        length = len(body.prompt)
        scores = [-next(_draws(self._weights, str(body.prompt[:i]))) / 2**32 for i in range(length)]
        k = body.topk_prompt_logprobs
        rows = (([token], [score]) for token, score in zip(body.prompt, scores, strict=True))
        return wire.SampleOutput(
            sequences=[self._sequence(body, model, index) for index in range(body.num_samples)],
            prompt_logprobs=[None, *scores[1:]] if body.prompt_logprobs else None,
            topk_prompt=top_k(rows, length=length, k=k) if k else None,
        )

    def _sequence(self, body: wire.Sample, model: ModelSpec, index: int) -> wire.Sequence:
        seed = "greedy" if body.temperature == 0 else str(body.seed + index)
        draw = _draws(self._weights, str(body.prompt), seed)
        tokens: list[int] = []
        while len(tokens) < body.max_tokens:
            tokens.append(next(draw) % model.vocab_size)
            if tokens[-1] in body.stop_tokens:
                break
        logprobs = [-next(draw) / 2**32 for _ in tokens]
        rows = (([token], [score]) for token, score in zip(tokens, logprobs, strict=True))
        k = body.topk_sample_logprobs
        return wire.Sequence(
            tokens=tokens,
            logprobs=logprobs,
            stop_reason="stop" if tokens[-1] in body.stop_tokens else "length",
            topk=top_k(rows, length=len(tokens), k=k) if k else None,
        )


def _check_data(body: wire.ForwardBackward, model: ModelSpec) -> list[np.ndarray[Any, Any]]:
    """The target tokens of every datum; raises ``BadInput``."""
    if body.loss_fn not in LOSSES:
        known = ", ".join(sorted(LOSSES))
        raise BadInput(f"loss function {body.loss_fn!r} is not offered; these are: {known}")
    if not body.data:
        raise BadInput("data is empty: give at least one datum")
    targets = []
    for index, datum in enumerate(body.data):
        if "target_tokens" not in datum.inputs:
            raise BadInput(f"datum {index} has no target_tokens: every loss needs them")
        try:
            tokens, target = datum.tokens.numpy(), datum.inputs["target_tokens"].numpy()
        except ValueError as error:
            raise BadInput(f"datum {index}: {error}") from error
        if tokens.shape != target.shape[:1]:
            raise BadInput(
                f"datum {index} has {tokens.size} tokens and target_tokens of shape {target.shape}"
            )
        for token in (*tokens.flat, *target.flat):
            if not 0 <= token < model.vocab_size:
                raise BadInput(
                    f"token {token} of datum {index} is not in 0..{model.vocab_size - 1}"
                )
        targets.append(target)
    return targets


def _snapshot(path: Path, model: ModelSpec) -> tuple[tuple[str, int, int], str]:
    """Which file it is, and the weights in it: the catalogue's folder, a named one or a file."""
    if path == Path(model.path):
        return (str(path), 0, 0), base_weights(model.name)
    file = path / "model.safetensors" if path.is_dir() else path
    snapshot = _read(file, FakeSnapshot)
    if snapshot.base_model != model.name:
        raise BadImage(str(path), f"is of {snapshot.base_model}, not {model.name}")
    stat = file.stat()
    return (str(file), stat.st_ino, stat.st_mtime_ns), snapshot.weights


def _hash(*parts: str | bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def _draws(*parts: str | bytes) -> Iterator[int]:
    """Endless 32-bit numbers that depend on ``parts`` only."""
    block = _hash(*parts)
    while True:
        for start in range(0, 64, 8):
            yield int(block[start : start + 8], 16)
        block = _hash(block)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise BadImage(str(path), "is not there") from error
    except msgspec.DecodeError as error:
        raise BadImage(str(path), f"is no {kind.__name__} ({error})") from error
