"""How fast does a deployment switch, against a memcpy of the same bytes by the same threads?

    python benchmarks/switch_bandwidth.py [--json] [--rounds N] [--size 100m|tiny] [--open]

One skeleton, two images in shared memory (1.4 GB each at 100M parameters in bf16). Every round
moves one out and the other in, and between them copies as many bytes between two buffers of
ordinary memory with the same function. ``--open``: with the gradients of an open step.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
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
from plexrl_slurm.engines.movers import copy_bytes

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
        name=size,
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


def timed(action: Callable[[], int]) -> tuple[int, float]:
    """What the action moved, and the seconds it took."""
    start = time.perf_counter()
    moved = action()
    return moved, time.perf_counter() - start


def measure(folder: Path, slabs: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of every round."""
    model = make_model(folder, arguments.size)
    engine = make_engine(model)
    paths = [slabs / "a", slabs / "b"]
    for path in paths:
        engine.create(path.name, wire.Create(base_model=model.name))
        learn(engine, step=True)
        if arguments.open:
            learn(engine, step=False)
        size = engine.save_image(path, deployment=path.name, progress=(1, 0))
    buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    rates: dict[str, list[float]] = {"load": [], "memcpy": [], "save": []}
    for number in range(-2, arguments.rounds):  # two rounds to warm everything up
        path = paths[number % 2]
        actions: dict[str, Callable[[], int]] = {
            "load": lambda path=path: engine.load_image(path, deployment=path.name),
            "memcpy": lambda: copy_bytes(buffers[0], buffers[1]),
            "save": lambda path=path: engine.save_image(
                path, deployment=path.name, progress=(1, 0)
            ),
        }
        for name, action in actions.items():
            moved, seconds = timed(action)
            if number >= 0:
                rates[name].append(moved / seconds / 1e9)
    rates["bytes"] = [float(size)]
    return rates


def report(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Median, worst and best of each, and the shares of memcpy."""
    answer: dict[str, Any] = {"bytes": int(rates.pop("bytes")[0]), "threads": 1}
    for name, values in rates.items():
        answer[name] = {
            "median": round(statistics.median(values), 2),
            "min": round(min(values), 2),
            "max": round(max(values), 2),
        }
    for name in ("load", "save"):
        shares = [
            100 * rate / copy for rate, copy in zip(rates[name], rates["memcpy"], strict=True)
        ]
        answer[f"{name}_percent_of_memcpy"] = round(statistics.median(shares), 1)
    both = [
        100 * 2 / (1 / load + 1 / save) / copy
        for load, save, copy in zip(rates["load"], rates["save"], rates["memcpy"], strict=True)
    ]
    answer["switch_percent_of_memcpy"] = round(statistics.median(both), 1)
    return answer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=11)
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
    print(f"image of {answer['bytes'] / 1e9:.2f} GB, one thread, GB/s")
    print(f"{'':8}{'median':>8}{'min':>8}{'max':>8}{'% of memcpy':>13}")
    for name in ("memcpy", "load", "save"):
        row = answer[name]
        share = answer.get(f"{name}_percent_of_memcpy", 100.0)
        print(f"{name:8}{row['median']:>8}{row['min']:>8}{row['max']:>8}{share:>13}")
    print(f"in and out together: {answer['switch_percent_of_memcpy']} % of memcpy")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
