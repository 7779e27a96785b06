"""How fast does a deployment switch, against a memcpy of the same bytes?

    python benchmarks/state_switch.py [--json] [--rounds N] [--size 100m|tiny] [--open]

One DeepSpeed skeleton and three slabs in shared memory (1.4 GB each at 100M parameters in bf16).
Every round moves one deployment out while another comes in, as a rank does it: once with one
thread and once with two; and copies as many bytes between buffers of ordinary memory with one
thread, and with two. The order changes from round to round. ``--open``: with the gradients of an
open step.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.engines.movers import Mover, copy_bytes

SIZES = {"tiny": (312_448, 64, "float32"), "100m": (100_702_464, 4096, "bfloat16")}


def make_model(folder: Path, size: str) -> ModelSpec:
    """A random model made by ``examples/make_models.py``, and its catalogue entry."""
    source = Path(__file__).parents[1] / "examples" / "make_models.py"
    found = spec_from_file_location("make_models", source)
    if found is None or found.loader is None:
        raise SystemExit(f"{source} cannot be imported")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    module.make(folder / size, size)
    parameters, vocabulary, dtype = SIZES[size]
    return ModelSpec(
        name="model",
        path=str(folder / size),
        dtype=dtype,
        max_context_length=512,
        vocab_size=vocabulary,
        parameters=parameters,
        architecture=size,
    )


def make_engine(model: ModelSpec) -> DeepSpeedEngine:
    """A gang of one rank and one thread."""
    return DeepSpeedEngine(
        RankSpec(
            wpg="train-0",
            engine="deepspeed",
            rank=0,
            world=1,
            gpus=1,
            master_port=0,
            agent="",
            models={model.name: model},
            options={},
        )
    )


def learn(engine: DeepSpeedEngine, *, step: bool) -> None:
    """Enough for all moments (``step``) or gradients to exist."""
    tokens = wire.Array.of(np.arange(4, 36, dtype=np.int64))
    weights = wire.Array.of(np.ones(32, dtype=np.float32))
    datum = wire.Datum(tokens=tokens, inputs={"target_tokens": tokens, "weights": weights})
    engine.forward_backward(wire.ForwardBackward(data=[datum], loss_fn="cross_entropy"))
    if step:
        engine.optim_step(wire.OptimStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 1.0))


class Memory:
    """As many bytes as a switch moves, in ordinary memory: half of them each way."""

    def __init__(self, size: int) -> None:
        self._buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(3)]
        self.bytes = 2 * size

    def copy(self) -> int:
        here, there, third = self._buffers
        return copy_bytes(there, here) + copy_bytes(here, third)

    def copy_together(self) -> int:
        here, there, third = self._buffers
        thread = threading.Thread(target=copy_bytes, args=(there, here))
        thread.start()
        copy_bytes(third, here)
        thread.join()
        return self.bytes


class Turns:
    """Two deployments, of which one is resident, and a spare slab."""

    def __init__(self, engine: DeepSpeedEngine, slabs: Path, *, leave_open: bool) -> None:
        self._engine = engine
        self._slabs = {name: slabs / name for name in ("a", "b", "spare")}
        for name in ("a", "b"):
            engine.create(name, wire.Create(base_model="model"))
            learn(engine, step=True)
            if leave_open:
                learn(engine, step=False)
            self.bytes = engine.save_image(self._slabs[name], deployment=name, progress=(1, 0))
        self._resident, self._other = "b", "a"

    def switch(self, threads: int) -> int:
        self._engine._mover = Mover(threads=threads)
        slabs, out, into = self._slabs, self._resident, self._other
        moved = self._engine.swap_images(
            slabs["spare"], slabs[into], outgoing=out, progress=(1, 0), incoming=into
        )
        slabs[out], slabs["spare"] = slabs["spare"], slabs[out]
        self._resident, self._other = into, out
        return moved


def measure(folder: Path, slabs: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of every round."""
    turns = Turns(make_engine(make_model(folder, arguments.size)), slabs, leave_open=arguments.open)
    memory = Memory(turns.bytes)
    actions: dict[str, Callable[[], int]] = {
        "memcpy": memory.copy,
        "switch": lambda: turns.switch(1),
        "memcpy_two": memory.copy_together,
        "switch_two": lambda: turns.switch(2),
    }
    rates: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(-2, arguments.rounds):  # two rounds to warm everything up
        order = list(actions) if number % 2 else list(reversed(actions))
        for name in order:
            start = time.perf_counter()
            moved = actions[name]()
            if number >= 0:
                rates[name].append(moved / (time.perf_counter() - start) / 1e9)
    rates["bytes"] = [float(turns.bytes)]
    return rates


def report(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Spread of each, and of the ratios of those of one round."""
    answer: dict[str, Any] = {"bytes": int(rates.pop("bytes")[0])}
    answer |= {name: spread(values, 2) for name, values in rates.items()}
    for name, above, below in (
        ("percent_of_memcpy", "switch", "memcpy"),
        ("two_percent_of_memcpy", "switch_two", "memcpy"),
        ("two_percent_of_memcpy_two", "switch_two", "memcpy_two"),
        ("two_threads_percent_of_one", "switch_two", "switch"),
    ):
        pairs = zip(rates[above], rates[below], strict=True)
        answer[name] = spread([100 * ours / theirs for ours, theirs in pairs], 1)
    return answer


def spread(values: list[float], digits: int) -> dict[str, float]:
    """Median and quartiles, worst and best."""
    low, middle, high = statistics.quantiles(values, n=4)
    named = {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", choices=sorted(SIZES), default="100m")
    parser.add_argument("--open", action="store_true", help="move open gradients too")
    parser.add_argument("--models", type=Path, help="keep the model here")
    parser.add_argument("--slabs", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with (
        tempfile.TemporaryDirectory() as models,
        tempfile.TemporaryDirectory(dir=arguments.slabs) as slabs,
    ):
        folder = arguments.models or Path(models)
        answer = report(measure(folder, Path(slabs), arguments))
    if arguments.json:
        print(json.dumps(answer))
        return
    print(f"images of {answer['bytes'] / 1e9:.2f} GB, one out and one in; GB/s, then percent")
    print(f"{'':28}{'median':>8}{'quartiles':>16}{'range':>16}")
    for name, row in answer.items():
        if name != "bytes":
            quartiles, ends = f"{row['q1']}-{row['q3']}", f"{row['min']}-{row['max']}"
            print(f"{name:28}{row['median']:>8}{quartiles:>16}{ends:>16}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
