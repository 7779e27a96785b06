"""The partition on a real Slurm, with engines that are fake: holds, users' jobs, losses."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import make_model_folder
from tests.slurm_live import python
from tests.slurm_live.cluster import Cluster
from tests.slurm_live.partition import Partition

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

_numbers = itertools.count()
SLOW = {"delay_us": {"forward_backward": 100_000, "optim_step": 100_000}}
SLOW_SAMPLES = {"delay_us": {"sample": 100_000}}


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    folder = cluster.folder / f"model-{os.getpid()}"
    return make_model_folder(folder, max_position_embeddings=512)


def make(cluster: Cluster, model: Path, name: str, **options: Any) -> Partition:
    options = {"train": SLOW, "rollout": SLOW_SAMPLES} | options
    return Partition(cluster, cluster.folder / name, model, **options)


@pytest.fixture
def partition(cluster: Cluster, model: Path, request: pytest.FixtureRequest) -> Iterator[Partition]:
    made = make(cluster, model, f"p{next(_numbers)}", **getattr(request, "param", {}))
    try:
        made.start()
        yield made
    finally:
        made.close()


def script(steps: int, pause_s: float = 0.0) -> str:
    exports = "\n".join(f"export {k}='{v}'" for k, v in python.environment().items())
    return (
        f"#!/bin/bash\n#SBATCH --ntasks=1\n#PLEXRL --model=tiny --seed=5\n{exports}\n"
        f"exec {python.interpreter()} -m tests.slurm_live.controller {steps} {pause_s}\n"
    )


def seen(partition: Partition, user: str, job: str) -> list[Any]:
    lines = [line for line in partition.output(user, job).splitlines() if line.startswith("[")]
    assert lines, partition.output(user, job)
    found: list[Any] = json.loads(lines[-1])
    return found


def step_of(partition: Partition, user: str, job: str) -> int:
    """Last step that the controller has begun; -1 for none."""
    lines = partition.output(user, job).splitlines()
    steps = [int(line.split()[1]) for line in lines if line.startswith("step ")]
    return max(steps, default=-1)


def run(partition: Partition, steps: int = 3) -> list[Any]:
    """What a job sees that nothing disturbs."""
    job = partition.submit("plxalice", script(steps))
    ended = partition.wait_job(job, "completed", "failed", "cancelled")
    assert ended["state"] == "completed", partition.output("plxalice", job)
    return seen(partition, "plxalice", job)


def test_a_users_job_runs_on_a_hold_and_everything_is_booked(partition: Partition) -> None:
    (hold,) = partition.holds().values()
    shown = partition.cluster.run("root", ["squeue", "-h", "-o", "%i %u %j %T"]).stdout
    assert f"{hold['slurm_id']}+0 plxsvc plexrl-hold-rlvr RUNNING" in shown
    assert hold["state"] == "up" and len(hold["nodes"]) == 2
    job = partition.submit("plxalice", script(3))
    ended = partition.wait_job(job, "completed", "failed", "cancelled")
    assert ended["state"] == "completed", partition.output("plxalice", job)
    assert ended["user"] == "plxalice" and ended["account"] == "research"
    assert len(seen(partition, "plxalice", job)) == 3 * 8 + 1
    assert partition.flaws() == []
    busy = dict(partition.query("select activity, sum(gpu_us) from ledger group by activity"))
    assert busy["busy"] > 0
