"""A rank that loads and saves checkpoints: ``python -m tests.engines.dealing MODEL OUT RANK ...``.

What to do is in ``OUT/steps.json``; what came of it, by step, goes to ``OUT/report.RANK.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from tests.engines.gang import LAYOUTS
from tests.engines.training import CREATE, adam, rank_spec, supervised, tiny_spec


def train(engine: DeepSpeedEngine, seed: int) -> None:
    engine.forward_backward(supervised(seed, 5, 9, 14))
    engine.optim_step(adam(weight_decay=0.1, eps=1e-6))


def run(model: Path, out: Path, rank: int, world: int, port: int) -> list[dict[str, str]]:
    """Each step: build the layout, load or learn, note the digest, save, learn on."""
    report = []
    steps: list[dict[str, Any]] = json.loads((out / "steps.json").read_text())
    for step in steps:
        spec = tiny_spec(model, step.get("dtype", "bfloat16"))
        options = {**LAYOUTS[step["layout"]], **step.get("options", {})}
        engine = DeepSpeedEngine(rank_spec(spec, rank=rank, world=world, port=port, **options))
        engine.create("a", CREATE)
        if "load" in step:
            engine.load_state(wire.LoadState(path=step["load"], uri="u", optimizer=True))
        else:
            train(engine, 1)
            train(engine, 2)
        told = {"loaded": engine.digest()}
        engine.publish(wire.Publish(snapshot="s"), Path(f"{step['save']}.safetensors"))
        engine.save_state(wire.SaveState(path=step["save"], uri="u"))
        train(engine, 3)
        report.append(told | {"trained": engine.digest()})
    return report


if __name__ == "__main__":
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world, port = (int(word) for word in sys.argv[3:6])
    (out / f"report.{rank}.json").write_text(json.dumps(run(folder, out, rank, world, port)))
