"""The ledger beside Slurm's accounting, and what Slurm's records say of jobs, on a real Slurm."""

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import make_model_folder
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import Partition
from tests.slurm_live.test_partition import SLOW, SLOW_SAMPLES, script

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

_numbers = itertools.count()


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    folder = cluster.folder / f"accounts-model-{os.getpid()}"
    return make_model_folder(folder, max_position_embeddings=512)


@pytest.fixture
def partition(cluster: Cluster, model: Path, request: pytest.FixtureRequest) -> Iterator[Partition]:
    folder = cluster.folder / f"accounts{next(_numbers)}"
    more = getattr(request, "param", {})
    made = Partition(cluster, folder, model, train=SLOW, rollout=SLOW_SAMPLES, **more)
    try:
        made.start()
        yield made
    finally:
        made.close()


def notes(partition: Partition, job: str) -> tuple[str, str]:
    """AdminComment and Comment, as an accountant sees them."""
    asked = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "AdminComment,Comment"]
    admin, _, own = partition.cluster.run("root", asked).stdout.strip().partition("|")
    return admin, own


def told(partition: Partition, job: str) -> str:
    """Wait for our line."""
    wait_for(
        lambda: notes(partition, job)[0].startswith("plexrl: job"),
        lambda: f"what job {job} used: {notes(partition, job)}; {partition.log()[-2000:]}",
        seconds=40,
    )
    return notes(partition, job)[0]


def reconciled(partition: Partition) -> dict[str, dict[str, Any]]:
    """The report's rows by hold, as columns of text."""
    done = partition.plexrl("root", "sreport", "reconcile", "-P")
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    rows = [dict(zip(first.split("|"), line.split("|"), strict=True)) for line in lines]
    return {row["hold_id"]: row for row in rows}


def agrees(partition: Partition, hold: str, *, incarnations: int, late_us: int = 0) -> None:
    """Wait for the hold's last record, then compare; ``late_us`` beyond what is allowed."""
    last = f"select count(*) from slurm_usage where hold_id = '{hold}' and end_us is not null"
    wait_for(
        lambda: partition.query(last) == [(incarnations,)],
        lambda: f"{partition.query('select * from slurm_usage')}; {partition.log()[-3000:]}",
        seconds=90,
    )
    row = reconciled(partition)[hold]
    allowed_us = int(row["allowed_gpu_us"])
    difference_us = abs(int(row["difference_gpu_us"]))
    assert (row["agrees"] == "yes") is (difference_us <= allowed_us), json.dumps(row)
    assert difference_us <= allowed_us + late_us, json.dumps(row)
    assert int(row["incarnations"]) == incarnations, json.dumps(row)
    assert int(row["sacct_gpu_us"]) > 0, json.dumps(row)


def end_hold(partition: Partition, hold: str) -> None:
    """As an admin who cancels it in Slurm."""
    slurm_id = partition.holds()[hold]["slurm_id"]
    partition.cluster.run("root", ["scancel", slurm_id])
    wait_for(lambda: hold not in partition.holds(), f"the end of {hold}", seconds=60)


def test_slurm_shows_what_a_job_used_beside_its_own_comment(partition: Partition) -> None:
    job = partition.submit("plxalice", script(3), "--comment=mine: 100 % of it")
    assert partition.wait_job(job, "completed", "failed")["state"] == "completed"
    line = told(partition, job)
    assert line.startswith(f"plexrl: job {job}, busy "), line
    assert " gpu-s, switch " in line and line.endswith(" %"), line
    assert float(line.split("busy ")[1].split()[0]) > 0
    assert notes(partition, job)[1] == "mine: 100 % of it"
    end_hold(partition, "h1")
    agrees(partition, "h1", incarnations=2)
    assert partition.flaws() == []


def test_what_ends_while_the_daemon_is_away_is_written_by_the_next_one(
    partition: Partition,
) -> None:
    partition.kill_daemon()
    partition.cluster.run("root", ["scancel", "-u", "plxsvc"])
    wait_for(lambda: not partition.cluster.steps(), "the end of the hold", seconds=60)
    partition.start()
    agrees(partition, "h1", incarnations=2)
    job = partition.submit("plxbob", script(1))
    partition.wait_job(job, "completed", "failed")
    partition.kill_daemon()
    partition.start()
    told(partition, job)
    before = partition.log().count("usage_told")
    partition.kill_daemon()
    partition.start()
    seen = partition.query("select count(*) from job_events where kind = 'accounted'")
    wait_for(
        lambda: (
            partition.query("select count(*) from job_events where kind = 'accounted'") == [(1,)]
        ),
        lambda: f"the line in the job's story: {seen}; {partition.log()[-2000:]}",
        seconds=40,
    )
    assert partition.log().count("usage_told") == before
    assert partition.flaws() == []


@pytest.mark.parametrize("partition", [{"nodes": (2, 2)}], indirect=True)
def test_the_books_agree_with_slurms_after_the_loss_of_a_node(partition: Partition) -> None:
    hold = partition.holds()["h1"]
    job = partition.submit("plxalice", script(2))
    partition.wait_job(job, "completed", "failed")
    node = [wpg["node"] for wpg in partition.wpgs().values() if wpg["pool"] == "rollout"][-1]
    assert node in hold["nodes"]
    partition.cluster.lose_node(node)
    try:
        wait_for(
            lambda: partition.holds().get("h1", {"lost_nodes": 1})["lost_nodes"] == 1,
            lambda: f"the loss of {node}: {partition.log()[-2000:]}",
            seconds=90,
        )
    finally:
        partition.cluster.bring_back(node)
    if "h1" in partition.holds():
        end_hold(partition, "h1")
    # Slurm ends what it counts of each component, and begins again with the nodes that are left.
    agrees(partition, "h1", incarnations=4)
    assert partition.flaws() == []


def test_the_books_agree_with_slurms_after_a_requeue(partition: Partition) -> None:
    slurm_id = partition.holds()["h1"]["slurm_id"]
    time.sleep(2)  # less than a second is none in Slurm's books
    partition.cluster.run("root", ["scontrol", "requeue", slurm_id])
    wait_for(lambda: partition.holds()["h1"]["state"] != "up", "the requeue", seconds=60)
    partition.wait_up()
    end_hold(partition, "h1")
    # Of a requeue the daemon hears when it looks next, and the two GPUs are booked up to then.
    agrees(partition, "h1", incarnations=4, late_us=2 * 1_000_000)
    assert partition.flaws() == []
