"""The training engine of a rank on the device that is here: what ``gpu_check`` asks of it.

Two deployments of one random model take turns in it, also in the middle of a step, and each has
to learn what it learns alone. Slabs have no names, so that ``/dev/shm`` may be small.
"""

import os
import socket
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.gpu_trainer import Device, reserve
from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.model_folder import tensors_of

#: Layers, hidden size, columns of the MLP, vocabulary, heads, key-value heads.
_LARGE: Final = (4, 2048, 8192, 32768, 32, 8)
_SMALL: Final = (2, 64, 128, 256, 4, 2)
#: Who runs what between two switches: f(orward and backward), o(ptimizer step).
TURNS: Final = [("a", "ff"), ("b", "fo"), ("a", "o"), ("b", "f"), ("a", "fo"), ("b", "fo")]


@dataclass(frozen=True, kw_only=True)
class Found:
    """One thing that was seen."""

    what: str
    measured: str
    wanted: str = ""
    #: ``None``: it is for information only.
    holds: bool | None = None
    #: Whether this machine can tell.
    here: bool = True
    values: dict[str, float] | None = None


def check(device: Device, *, small: bool, rounds: int) -> list[Found]:
    """Build the engine, learn alone and by turns, switch, sleep."""
    with tempfile.TemporaryDirectory() as folder:
        model = _make_model(Path(folder) / "model", small=small)
        before = device.taken()
        engine = _Driven(model, device)
        found = [
            Found(
                what="computes on",
                measured=engine.place,
                wanted=device.torch.type,
                holds=engine.place == device.torch.type,
            )
        ]
        wanted = engine.alone()
        if device.cuda:
            engine.reserve()
        same = engine.by_turns() == wanted
        found.append(
            Found(
                what="losses, logprobs and state of two jobs by turns as alone",
                measured="bit-identical" if same else "differ",
                wanted="bit-identical",
                holds=same,
            )
        )
        found.append(engine.switches(rounds))
        found += engine.sleeps(before)
    return found


def _make_model(folder: Path, *, small: bool) -> ModelSpec:
    from transformers import AutoModelForCausalLM, LlamaConfig

    layers, hidden, columns, vocabulary, heads, shared = _SMALL if small else _LARGE
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=columns,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return ModelSpec(
        name="random",
        path=str(folder),
        dtype="bfloat16",
        max_context_length=1024,
        vocab_size=vocabulary,
        parameters=sum(int(np.prod(shape)) for _, (_, shape) in tensors_of(folder)),
        architecture="random",
    )


class _Driven:
    """One rank's engine and the slabs of two deployments, with a spare one."""

    def __init__(self, model: ModelSpec, device: Device) -> None:
        self._device, self._model = device, model
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        spec = RankSpec(
            wpg="train-0", engine="deepspeed", rank=0, world=1, gpus=1, master_port=port,
            agent="", models={model.name: model}, options={},
        )  # fmt: skip
        self.engine = DeepSpeedEngine(spec)
        self._files = [os.memfd_create(name) for name in ("a", "b", "spare")]
        self._slabs = [Path(f"/proc/{os.getpid()}/fd/{each}") for each in self._files]
        self._seen = {"a": 0, "b": 0}
        self._resident = ""

    @property
    def place(self) -> str:
        """Where its weights are."""
        skeleton, _ = self._create("a")
        return str(next(iter(skeleton.weights().values())).device.type)

    def _create(self, job: str) -> tuple:  # type: ignore[type-arg]
        self.engine.create(job, wire.Create(base_model=self._model.name))
        return self.engine._resident(job)

    def reserve(self) -> None:
        """Room for an open step in each slab, no faster than memory grows."""
        for file in self._files:
            reserve(file, 17 * self._model.parameters + (1 << 20))

    def _run(self, job: str, operations: str) -> list[object]:
        told: list[object] = []
        for operation in operations:
            if operation == "o":
                out = self.engine.optim_step(
                    wire.OptimStep(
                        learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8,
                        weight_decay=0.1, grad_clip_norm=1.0,
                    )
                )  # fmt: skip
                told.append(out.metrics)
                continue
            output = self.engine.forward_backward(self._data(job))
            told.append((output.metrics, [each.numpy().tobytes() for each in output.logprobs]))
        return told

    def _data(self, job: str) -> wire.ForwardBackward:
        self._seen[job] += 1
        random = np.random.default_rng(1000 * ord(job) + self._seen[job])
        top = self._model.vocab_size
        data = []
        for length in (100, 130, 64, 200):
            tokens = random.integers(0, top, length + 1)
            weights = wire.Array.of(np.ones(length, np.float32))
            targets = wire.Array.of(tokens[1:])
            inputs = {"target_tokens": targets, "weights": weights}
            data.append(wire.Datum(tokens=wire.Array.of(tokens[:-1]), inputs=inputs))
        return wire.ForwardBackward(data=data, loss_fn="cross_entropy")

    def alone(self) -> dict[str, tuple[list[object], str]]:
        """What each is told, and its end, without the other."""
        found = {}
        for job in ("a", "b"):
            self._seen[job] = 0
            self._create(job)
            told = [each for who, work in TURNS if who == job for each in self._run(job, work)]
            found[job] = told, self.engine.digest()
        return found

    def by_turns(self) -> dict[str, tuple[list[object], str]]:
        """The same while they take turns."""
        told: dict[str, list[object]] = {"a": [], "b": []}
        for number, job in enumerate(told):
            self._seen[job] = 0
            self._create(job)
            self.engine.save_image(self._slabs[number], deployment=job, progress=(0, 0))
        self._resident = "b"
        for who, work in TURNS:
            if who != self._resident:
                self._switch()
            told[who] += self._run(who, work)
        found = {self._resident: (told[self._resident], self.engine.digest())}
        self._switch()
        found[self._resident] = told[self._resident], self.engine.digest()
        return found

    def _switch(self) -> int:
        """Out of the resident's state, into the spare slab; in comes the other's."""
        out = "ab".index(self._resident)
        coming = "ab"[1 - out]
        moved = self.engine.swap_images(
            self._slabs[2],
            self._slabs[1 - out],
            outgoing=self._resident,
            progress=(1, 0),
            incoming=coming,
        )
        self._slabs[out], self._slabs[2] = self._slabs[2], self._slabs[out]
        self._resident = coming
        return moved

    def switches(self, rounds: int) -> Found:
        """How fast they are, with all of a call's own work."""
        rates = []
        for number in range(-1, max(3, rounds)):
            moved = 0

            def act() -> None:
                nonlocal moved
                moved = self._switch()

            seconds = self._device.timed(act)
            if number >= 0:
                rates.append(moved / seconds / 1e9)
        middle = statistics.median(rates)
        return Found(
            what=f"switch of {moved / 2e9:.2f} GB out and in at once, headers and counters too",
            measured=f"{middle:.1f} GB/s ({min(rates):.1f}-{max(rates):.1f})",
            values={"gb_per_s": middle, "bytes": float(moved)},
        )

    def sleeps(self, before: int) -> list[Found]:
        """What it keeps of the device, and whether it goes on."""
        self.engine.save_image(self._slabs[2], deployment=self._resident, progress=(2, 0))
        digest = self.engine.digest()
        awake = self.engine.memory().used
        asleep = self.engine.sleep().used
        left = self._device.taken() - before if self._device.cuda else asleep
        self.engine.wake()
        self.engine.load_image(self._slabs[2], deployment=self._resident)
        same = self.engine.digest() == digest
        allowed = 16 * self._model.parameters // 50
        return [
            Found(
                what="asleep, it keeps of the device (all of it, and since it was built)",
                measured=f"{asleep / 1e6:.0f} of {awake / 1e6:.0f} MB, {left / 1e6:.0f} MB",
                wanted="at most 2 % of an image",
                holds=left <= allowed,
                values={"bytes": float(left)},
            ),
            Found(
                what="awake again, its state",
                measured="bit-identical" if same else "differs",
                wanted="bit-identical",
                holds=same,
            ),
        ]
