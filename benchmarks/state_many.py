"""Twenty deployments on one WPG with room for three in host memory: does each learn as alone?

    python -m benchmarks.state_many [--json] [--deployments 20] [--steps 3] [--folder DIR]

DeepSpeed trains the tiny model (312,448 parameters, bf16). Each deployment has data of its own;
alone on the partition first, one after the other, then all at once with memory for three images
and the rest on the disk at ``--folder``. Compared bit by bit: the logprobs and norms of every
step, and the files of a checkpoint at the end (weights, master weights, moments).
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

from tinker import types

from benchmarks.state_switch import make_model
from plexrl_slurm.settings import read_site
from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition
from tests.scenarios.test_nvme import Watch, left_memory

PARAMETERS = 312_448
#: With the gradients of an open step: weights, master weights, two moments, gradients.
IMAGE = PARAMETERS * (2 + 4 + 4 + 4 + 2)
IN_MEMORY = 3
SLACK = 1 << 20


def learn(job: Job, number: int, steps: int) -> list[Any]:
    """Everything that a controller can see, and the checkpoint's files."""
    seen: list[Any] = []
    training = job.service().create_lora_training_client(base_model="tiny", rank=0, seed=3).result()
    for step in range(steps):
        for part in range(2):
            data = [datum(4, 5 + step, 10 + number, 6 + part), datum(7, 10 + number, 8)]
            result = training.forward_backward(data, "cross_entropy").result()
            seen += [each["logprobs"].tolist() for each in result.loss_fn_outputs]
        adam = types.AdamParams(learning_rate=1e-3)
        seen.append(sorted(training.optim_step(adam).result().metrics.items()))
    training.save_state("end").result()
    root = job.partition.folder / "state" / "checkpoints"
    files = sorted(root.glob(f"job{job.slurm_id}-*/*/end/*.safetensors"))
    if not files:
        raise SystemExit(f"job {job.slurm_id} left no checkpoint in {root}")
    return [*seen, [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]]


def make_partition(folder: Path, model: Path, settings: Mapping[str, Any]) -> Partition:
    """One training WPG with DeepSpeed, of the model in bf16."""
    folder.mkdir()
    partition = Partition(
        folder, model=model, settings=settings, engines=("deepspeed", "fake_sample")
    )
    text = partition.config.read_text()
    partition.config.write_text(text.replace('dtype = "float32"', 'dtype = "bfloat16"'))
    partition.site = read_site(partition.config)
    return partition


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def alone(folder: Path, model: Path, asked: argparse.Namespace) -> tuple[list[Any], float]:
    """What each sees by itself, and the seconds of all."""
    partition, seen = make_partition(folder, model, {}), []
    try:
        partition.start(seconds=240)
        started = time.monotonic()
        for number in range(asked.deployments):
            job = Job(partition, seed=number, models=["tiny"])
            seen.append(learn(job, number, asked.steps))
            job.cancel()
            say(f"{number + 1} of {asked.deployments} alone")
        return seen, time.monotonic() - started
    finally:
        partition.close()


def together(folder: Path, model: Path, asked: argparse.Namespace, alone: list[Any]) -> Any:
    """All at once, and what became of it."""
    settings = {
        "host_bytes": IN_MEMORY * IMAGE + SLACK,
        "nvme_dir": str(folder / "nvme"),
        "nvme_bytes": (asked.deployments + 1) * (IMAGE + SLACK),
    }
    partition = make_partition(folder, model, settings)
    try:
        partition.start(seconds=240)
        jobs = [Job(partition, seed=n, models=["tiny"]) for n in range(asked.deployments)]
        say(f"{len(jobs)} jobs run")
        started = time.monotonic()
        with Watch(partition) as watch, ThreadPoolExecutor(asked.deployments) as pool:
            runs = [pool.submit(learn, job, n, asked.steps) for n, job in enumerate(jobs)]
            failed, same = 0, 0
            for run, wanted in zip(runs, alone, strict=True):
                if run.exception() is not None:
                    say(f"failed: {run.exception()}")
                    failed += 1
                else:
                    same += run.result() == wanted
        return {
            "deployments": asked.deployments,
            "steps": asked.steps,
            "failed": failed,
            "bit_identical": same,
            "seconds": round(time.monotonic() - started, 1),
            "images_that_left_memory": left_memory(partition),
            "most_bytes_in_memory": watch.most,
            "room_bytes": IN_MEMORY * IMAGE + SLACK,
            "image_bytes": IMAGE,
            "flaws_in_the_ledger": len(partition.flaws()),
        }
    finally:
        partition.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deployments", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on a disk")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        make_model(Path(name), "tiny")
        model = Path(name) / "tiny"
        wanted, alone_s = alone(Path(name) / "alone", model, asked)
        answer = together(Path(name) / "many", model, asked, wanted)
    answer["alone_seconds"] = round(alone_s, 1)
    if asked.json:
        print(json.dumps(answer))
    else:
        for key, value in answer.items():
            print(f"{key.replace('_', ' '):28}{value:>12}")
    good = answer["failed"] == 0 and answer["bit_identical"] == asked.deployments
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
