"""A rank of a gang for the tests: ``python -m tests.engines.gang MODEL OUT RANK WORLD PORT``.

Runs one script of calls, the same on every rank, and leaves what it was told in ``OUT``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines import skeleton
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory.swap import SWAP_DIR
from tests.engines.training import CREATE, adam, grpo, rank_spec, supervised, tiny_spec

OPTIMIZER = {"offload_optimizer": "cpu"}
#: Engine options by layout.
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "1-optimizer": {"zero_stage": 1, **OPTIMIZER},
    "2-optimizer": {"zero_stage": 2, **OPTIMIZER},
    "3-optimizer-param": {"zero_stage": 3, **OPTIMIZER, "offload_param": "cpu"},
    "1-matrices": {"zero_stage": 1, "decay_vectors": False},
    "2-matrices": {"zero_stage": 2, "decay_vectors": False},
    "3-matrices": {"zero_stage": 3, "decay_vectors": False},
    "3-swapped": {"zero_stage": 3, "offload_optimizer": "nvme"},
    "3-swapped-matrices": {
        "zero_stage": 3,
        "offload_optimizer": "nvme",
        "decay_vectors": False,
    },
    "3-swapped-param": {"zero_stage": 3, "offload_optimizer": "nvme", "offload_param": "cpu"},
}
#: What a gang of so many ranks runs: layout and dtype.
PROGRAMS: dict[int, list[str]] = {
    1: [f"{layout}-float32" for layout in LAYOUTS],
    2: [
        *(f"{stage}-{dtype}" for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")),
        "1-optimizer-float32",
        "2-optimizer-bfloat16",
        "3-optimizer-param-float32",
        "1-matrices-float32",
        "2-matrices-bfloat16",
        "3-matrices-float32",
        "3-swapped-float32",
        "3-swapped-param-bfloat16",
        "3-swapped-matrices-float32",
    ],
    4: [
        "1-float32",
        "2-float32",
        "3-float32",
        "3-optimizer-param-bfloat16",
        "3-swapped-float32",
    ],
}
#: Bytes of the smallest tensor that a rank moves to the disk.
SMALLEST_SWAPPED = 4096
#: More than a rank's share, fewer datums than ranks, and groups of a shared prompt.
CALLS = [supervised(1, 5, 9, 20, 31), supervised(2, 7), grpo(3, group=5), grpo(4, group=4)]


def swap_small_tensors() -> None:
    """Have DeepSpeed move the tiny model's state as if it were a large one's, in several parts;
    gradients of a page or more too, many of them at places that no disk takes as they are."""
    from deepspeed.runtime.swap_tensor import aio_config, optimizer_utils

    aio_config.AIO_DEFAULT_DICT["block_size"] = SMALLEST_SWAPPED
    optimizer_utils.MIN_AIO_BYTES = SMALLEST_SWAPPED
    skeleton._SUB_GROUP_ELEMENTS = 1 << 16  # type: ignore[misc]


def learn(engine: DeepSpeedEngine) -> list[wire.TrainOutput | wire.OptimOutput]:
    """Two optimizer steps of two calls each, clipped."""
    told: list[wire.TrainOutput | wire.OptimOutput] = []
    for number, body in enumerate(CALLS):
        told.append(engine.forward_backward(body))
        if number % 2:
            told.append(engine.optim_step(adam(grad_clip_norm=5.0, eps=1e-4)))
    return told


def learn_by_turns(engine: DeepSpeedEngine, images: Path, rank: int) -> str:
    """The same calls, with another deployment's open step between any two."""
    slabs = {name: images / f"{name}.{rank}" for name in "ab"}
    for name, slab in slabs.items():
        engine.create(name, CREATE)
        engine.save_image(slab, deployment=name, progress=(0, 0))
    for number, body in enumerate(CALLS):
        for name, slab in slabs.items():
            engine.load_image(slab, deployment=name)
            engine.forward_backward(body if name == "a" else CALLS[-1 - number])
            if name == "a" and number % 2:
                engine.optim_step(adam(grad_clip_norm=5.0, eps=1e-4))
            engine.save_image(slab, deployment=name, progress=(number, 0))
    engine.load_image(slabs["a"], deployment="a")
    return engine.digest()


def sentence_of(engine: DeepSpeedEngine, body: wire.ForwardBackward) -> str:
    try:
        engine.forward_backward(body)
    except BadInput as error:
        return str(error)
    return ""


def overflowing() -> wire.ForwardBackward:
    """A loss that is not finite on one rank only."""
    body = grpo(5, group=2, loss_fn="importance_sampling")
    first = body.data[0]
    huge = wire.Array.of(first.inputs["logprobs"].numpy() * 1000)
    data = [wire.Datum(tokens=first.tokens, inputs={**first.inputs, "logprobs": huge})]
    return wire.ForwardBackward(data=data, loss_fn=body.loss_fn)


def run(model: Path, out: Path, rank: int, world: int, port: int) -> dict[str, Any]:
    """All layouts of the program in one process."""
    os.environ[SWAP_DIR] = str(out / "swap")
    swap_small_tensors()
    report: dict[str, Any] = {}
    for name in PROGRAMS[world]:
        layout, _, dtype = name.rpartition("-")
        spec = rank_spec(
            tiny_spec(model, dtype),
            rank=rank,
            world=world,
            port=port,
            max_tokens_per_microbatch=32,
            **LAYOUTS[layout],
        )
        engine = DeepSpeedEngine(spec)
        engine.create("a", CREATE)
        told = learn(engine)
        digest = engine.digest()
        folder = out / name
        folder.mkdir(exist_ok=True)
        engine.publish(wire.Publish(snapshot="s"), folder / "weights.safetensors")
        saved = engine.save_state(wire.SaveState(path=str(folder / "checkpoint"), uri="u"))
        bad = sentence_of(engine, overflowing())
        unchanged = engine.digest() == digest
        engine.create("b", CREATE)
        engine.load_state(wire.LoadState(path=str(folder / "checkpoint"), uri="u", optimizer=True))
        report[name] = {
            "logprobs": [
                [array.numpy().tolist() for array in output.logprobs]
                for output in told
                if isinstance(output, wire.TrainOutput)
            ],
            "metrics": [output.metrics for output in told],
            "digest": digest,
            "by_turns": learn_by_turns(engine, folder, rank),
            "restored": None,
            "saved_bytes": saved.bytes,
            "bad": bad,
            "unchanged": unchanged,
        }
        engine.load_state(wire.LoadState(path=str(folder / "checkpoint"), uri="u", optimizer=True))
        report[name]["restored"] = engine.digest()
    return report


if __name__ == "__main__":
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world, port = (int(word) for word in sys.argv[3:6])
    (out / f"report.{rank}.json").write_text(json.dumps(run(folder, out, rank, world, port)))
