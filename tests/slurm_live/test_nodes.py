"""A training WPG over two nodes of a real Slurm: one gang, whatever dies on either."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import make_model_folder
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import Partition, kill
from tests.slurm_live.test_holds import begin, end
from tests.slurm_live.test_partition import SLOW, SLOW_SAMPLES, script, seen

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STEPS = 12


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    folder = cluster.folder / f"nodes-model-{os.getpid()}"
    return make_model_folder(folder, max_position_embeddings=512)


@pytest.fixture
def partition(cluster: Cluster, model: Path) -> Iterator[Partition]:
    number = sum(1 for _ in cluster.folder.glob("n[0-9]*"))
    made = Partition(
        cluster,
        cluster.folder / f"n{number}",
        model,
        train=SLOW,
        rollout=SLOW_SAMPLES,
        nodes=(2, 1),
        train_shape={"gpus": 2, "nodes": 2},
    )
    try:
        made.start()
        yield made
        assert made.flaws() == [], made.log()[-3000:]
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, model: Path) -> list[Any]:
    """What the job of these tests sees on one node."""
    made = Partition(cluster, cluster.folder / "one-node", model)
    try:
        made.start()
        job = made.submit("plxalice", script(STEPS))
        ended = made.wait_job(job, "completed", "failed", "cancelled", seconds=120)
        assert ended["state"] == "completed", made.output("plxalice", job)
        return seen(made, "plxalice", job)
    finally:
        made.close()


def gang(partition: Partition) -> dict[str, Any]:
    (wpg,) = [wpg for name, wpg in partition.wpgs().items() if name.startswith("train")]
    return wpg


def renewed(partition: Partition, before: list[int]) -> bool:
    """Whether all its ranks are others now."""
    after = gang(partition)["pids"]
    return len(after) == 2 and not {*before} & {*after}


def test_a_rank_and_an_agent_die_on_the_second_node(
    partition: Partition, undisturbed: list[Any]
) -> None:
    nodes = gang(partition)["node"].split(",")
    assert len(set(nodes)) == 2 and gang(partition)["gpus"] == 2
    job = begin(partition)
    before = gang(partition)["pids"]
    kill(before[1])
    wait_for(lambda: renewed(partition, before), partition.what, seconds=60)
    agents, before = partition.agent_pids(), gang(partition)["pids"]
    (second,) = [name for name in agents if name.startswith("h1.0.") and name.endswith(nodes[1])]
    kill(agents[second])
    wait_for(lambda: renewed(partition, before), partition.what, seconds=60)
    assert end(partition, job) == undisturbed


def test_a_job_survives_the_loss_of_one_of_its_nodes(
    partition: Partition, undisturbed: list[Any]
) -> None:
    """Both nodes have written the durable image, and two others read it."""
    job = begin(partition, step=5)
    lost = gang(partition)["node"].split(",")[1]
    try:
        partition.cluster.lose_node(lost)
        assert end(partition, job, seconds=240) == undisturbed
        with partition.client() as client:
            told = client.explain(partition.job(job)["job_id"])
        assert any(line["kind"] == "moved" for line in told["story"]), told
        assert lost not in gang(partition)["node"].split(",")
        durable = partition.folder / "state" / "durable"
        assert not list(durable.glob("*/.*.part"))
    finally:
        partition.cluster.bring_back(lost)
