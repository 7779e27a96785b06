"""A rank of a gang that loses one of its ranks in the middle of a backward pass, or goes on after.

``python -m tests.engines.dying MODEL OUT RANK WORLD PORT``; what to do is in ``OUT/steps.json``.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory.swap import SWAP_DIR
from tests.engines.gang import LAYOUTS, swap_small_tensors
from tests.engines.training import CREATE, adam, rank_spec, supervised, tiny_spec

#: What a rank ends with that has lost another.
LEFT_ALONE = 3


def learn(engine: DeepSpeedEngine, seed: int) -> None:
    engine.forward_backward(supervised(seed, 5, 9, 14))


def step(engine: DeepSpeedEngine) -> None:
    engine.optim_step(adam(weight_decay=0.1, eps=1e-6, grad_clip_norm=1.0))


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank(engine: DeepSpeedEngine, slab: Path, rank: int) -> None:
    """A step, half of the next one, an image; then rank 1 dies between two layers' gradients."""
    engine.create("a", CREATE)
    learn(engine, 1)
    step(engine)
    learn(engine, 2)
    engine.save_image(slab, deployment="a", progress=(4, 0))
    if rank == 1:
        skeleton = engine._skeleton
        assert skeleton is not None
        skeleton.policy.model.model.layers[0].register_full_backward_hook(die)
    try:
        learn(engine, 3)
    except RuntimeError:
        os._exit(LEFT_ALONE)


def go_on(engine: DeepSpeedEngine, slab: Path) -> dict[str, str]:
    """Replay from the image; and all of it undisturbed."""
    engine.load_image(slab, deployment="a")
    learn(engine, 3)
    step(engine)
    learn(engine, 4)
    step(engine)
    replayed = engine.digest()
    engine.create("undisturbed", CREATE)
    for seed in (1, 2, 3, 4):
        learn(engine, seed)
        if seed != 2:
            step(engine)
    return {"replayed": replayed, "undisturbed": engine.digest()}


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world, port = (int(word) for word in sys.argv[3:6])
    plan = json.loads((out / "steps.json").read_text())
    images = Path(plan["images"])
    os.environ[SWAP_DIR] = str(images / "swap")
    swap_small_tensors()
    layout, _, dtype = plan["layout"].rpartition("-")
    spec = rank_spec(tiny_spec(model, dtype), rank=rank, world=world, port=port, **LAYOUTS[layout])
    engine, slab = DeepSpeedEngine(spec), images / f"slab.{rank}"
    if plan["die"]:
        lose_a_rank(engine, slab, rank)
    else:
        report = go_on(engine, slab)
        (out / f"report.{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
