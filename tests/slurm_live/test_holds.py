"""Holds on a real Slurm: losses, renewal, replacement, preemption. No job notices but by waiting."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import make_model_folder
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import Partition, freeze, kill, thaw
from tests.slurm_live.test_partition import SLOW, SLOW_SAMPLES, script, seen, step_of

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 12
#: A limit that is near as soon as somebody shortens it.
SHORT = {"time_limit": "30", "renew_before_seconds": 60}


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    folder = cluster.folder / f"holds-model-{os.getpid()}"
    return make_model_folder(folder, max_position_embeddings=512)


@pytest.fixture
def partition(
    cluster: Cluster, model: Path, request: pytest.FixtureRequest
) -> Iterator[Partition]:
    options: dict[str, Any] = {"train": SLOW, "rollout": SLOW_SAMPLES}
    options |= getattr(request, "param", {})
    number = sum(1 for _ in cluster.folder.glob("h[0-9]*"))
    made = Partition(cluster, cluster.folder / f"h{number}", model, **options)
    try:
        made.start()
        yield made
        assert made.flaws() == [], made.log()[-3000:]
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, model: Path) -> list[Any]:
    """What the job of these tests sees if nothing happens."""
    made = Partition(cluster, cluster.folder / "alone", model)
    try:
        made.start()
        job = made.submit("plxalice", script(STEPS))
        ended = made.wait_job(job, "completed", "failed", "cancelled")
        assert ended["state"] == "completed", made.output("plxalice", job)
        return seen(made, "plxalice", job)
    finally:
        made.close()


def begin(partition: Partition, *, step: int = 3) -> str:
    """A job that is in the middle of its work."""
    # Its controller runs where no GPU is: no node that these tests lose.
    job = partition.submit("plxalice", script(STEPS), "--nodelist=c1")
    wait_for(
        lambda: step_of(partition, "plxalice", job) >= step,
        lambda: f"step {step}: {partition.output('plxalice', job)}; {partition.log()[-2000:]}",
        seconds=60,
    )
    return job


def end(partition: Partition, job: str, seconds: float = 120) -> list[Any]:
    ended = partition.wait_job(job, "completed", "failed", "cancelled", seconds=seconds)
    assert ended["state"] == "completed", partition.output("plxalice", job)
    return seen(partition, "plxalice", job)


def home(partition: Partition, pool: str) -> dict[str, Any]:
    """The WPG of the only job in a pool."""
    (job,) = [job for job in partition.client().jobs() if job["state"] == "running"]
    (name,) = [name for name in job["wpgs"] if name.startswith(pool)]
    return partition.wpgs()[name]


def shorten(partition: Partition, hold: dict[str, Any], minutes: int = 1) -> None:
    """The limit of a hold is near from now on."""
    words = ["scontrol", "update", f"JobId={hold['slurm_id']}", f"TimeLimit={minutes}"]
    partition.cluster.run("root", words)


TWO_NODES = {"nodes": (2, 2), "gpus": 2}


@pytest.mark.parametrize("partition", [TWO_NODES], indirect=True)
def test_a_job_survives_the_loss_of_its_node(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition)
    lost = home(partition, "train")
    try:
        partition.cluster.lose_node(lost["node"])
        assert end(partition, job) == undisturbed
        (hold,) = partition.holds().values()
        assert hold["lost_nodes"] >= 1 and lost["node"] not in hold["nodes"]
        assert lost["id"] not in partition.wpgs()
        with partition.client() as client:
            told = client.explain(partition.job(job)["job_id"])
        assert any(line["kind"] == "moved" for line in told["story"]), told
        faults = partition.query("select node from node_faults")
        assert (lost["node"],) in faults
    finally:
        partition.cluster.bring_back(lost["node"])


@pytest.mark.parametrize("partition", [{"hold": SHORT}], indirect=True)
def test_a_hold_is_extended_before_its_limit(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition)
    (hold,) = partition.holds().values()
    shorten(partition, hold)
    wait_for(
        lambda: partition.holds()[hold["id"]]["limit_end_us"] > hold["limit_end_us"],
        partition.what,
        seconds=30,
    )
    assert end(partition, job) == undisturbed
    assert list(partition.holds()) == [hold["id"]]


@pytest.mark.parametrize("partition", [{"hold": {**SHORT, "renewal": "replace"}}], indirect=True)
def test_a_hold_is_replaced_before_its_limit_and_no_function_is_lost(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition)
    (old,) = partition.holds().values()
    shorten(partition, old)
    wait_for(
        lambda: old["id"] not in partition.holds(),
        partition.what,
        seconds=60,
    )
    (new,) = partition.holds().values()
    assert new["replaces"] == old["id"] and new["state"] == "up"
    assert end(partition, job) == undisturbed
    partition.cluster.wait_job(old["slurm_id"], "COMPLETED", "CANCELLED")
