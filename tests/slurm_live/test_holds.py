"""Holds on a real Slurm: losses, renewal, replacement, preemption; jobs only wait."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.journal import replay
from plexrl_slurm.model_folder import read_model_folder
from tests.model_folders import make_model_folder
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import Partition, freeze, thaw
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
def partition(cluster: Cluster, model: Path, request: pytest.FixtureRequest) -> Iterator[Partition]:
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


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def shorten(partition: Partition, hold: dict[str, Any], minutes: int = 1) -> None:
    """The limit of a hold is near from now on."""
    words = ["scontrol", "update", f"JobId={hold['slurm_id']}", f"TimeLimit={minutes}"]
    partition.cluster.run("root", words)


TWO_NODES = {"nodes": (2, 2)}


@pytest.mark.parametrize("partition", [TWO_NODES], indirect=True)
@pytest.mark.parametrize("pool", ["train", "rollout"])
def test_a_job_survives_the_loss_of_its_node(
    partition: Partition, undisturbed: list[Any], pool: str
) -> None:
    """The training node is the one that runs the batch script as well."""
    job = begin(partition)
    lost = home(partition, pool)
    try:
        partition.cluster.lose_node(lost["node"])
        assert end(partition, job) == undisturbed
        hold = partition.holds()["h1"]
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
def test_a_hold_is_extended_before_its_limit(partition: Partition, undisturbed: list[Any]) -> None:
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


@pytest.mark.parametrize("partition", [{"gpus": 2}], indirect=True)
def test_a_hold_is_replaced_for_a_wpg_that_the_settings_got_since(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition, step=1)
    (old,) = partition.holds().values()
    partition.stop_daemon()
    settings = partition.config.read_text()
    partition.config.write_text(settings.replace("count = 1\n", "count = 2\n", 1))
    partition.start(up=False)
    lacking = f"hold {old['id']} was made before the settings had WPG train-1: it is replaced"
    assert lacking in " ".join(partition.nodes()["trouble"])
    wait_for(lambda: old["id"] not in partition.holds(), partition.what, seconds=90)
    (new,) = partition.holds().values()
    assert new["replaces"] == old["id"] and new["state"] == "up"
    pools = [wpg["pool"] for wpg in partition.wpgs().values()]
    assert sorted(pools) == ["rollout", "train", "train"]
    assert partition.nodes()["trouble"] == []
    assert end(partition, job) == undisturbed


@pytest.mark.parametrize("partition", [TWO_NODES], indirect=True)
def test_an_agent_that_was_declared_lost_is_refused_when_it_comes_back(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition)
    lost = home(partition, "train")
    (name,) = [name for name in partition.agent_pids() if name.endswith(f".0.{lost['node']}")]
    pid = partition.agent_pids()[name]
    rank = partition.rank_pid(lost["id"])
    try:
        for each in (rank, pid):
            freeze(each)
        partition.cluster.kill_slurmd(lost["node"])
        assert end(partition, job) == undisturbed
        assert name not in partition.agent_pids()
        with suppress(ProcessLookupError):  # Slurm may have ended it meanwhile
            thaw(rank)
        thaw(pid)
        wait_for(lambda: not alive(pid), "the end of the agent", seconds=20)
        assert f"agent_refused agent={name}" in partition.log()
        assert list(partition.cluster.host_dir.glob(f"rlvr/{lost['node']}/h1.0/*")) == []
    finally:
        partition.cluster.start_slurmd(lost["node"])


def occupy(partition: Partition, but: int) -> str:
    """A job of root's that takes all GPUs except for some."""
    cluster = partition.cluster
    taken = sum(len(hold["nodes"]) for hold in partition.holds().values())
    free = 16 - taken - but
    jobs = ["#!/bin/bash", "sleep 600"]
    ids = [
        cluster.sbatch("root", "-p", "gpu", "--gres=gpu:1", "-c1", "--mem=50", script=jobs[1])
        for _ in range(free)
    ]
    for each in ids:
        cluster.wait_job(each, "RUNNING")
    return " ".join(ids)


@pytest.mark.parametrize("partition", [{"hold": {**SHORT, "renewal": "replace"}}], indirect=True)
def test_on_a_full_cluster_a_hold_makes_room_for_its_replacement(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition)
    (old,) = partition.holds().values()
    others = occupy(partition, 0)
    try:
        shorten(partition, old, minutes=2)
        wait_for(lambda: old["id"] not in partition.holds(), partition.what, seconds=150)
        (new,) = partition.holds().values()
        assert new["replaces"] == old["id"]
        assert end(partition, job) == undisturbed
    finally:
        partition.cluster.run("root", ["scancel", *others.split()])


@pytest.mark.parametrize("partition", [{"slurm_partition": "preemptable"}], indirect=True)
def test_a_hold_that_slurm_preempts_comes_back_and_goes_on(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition)
    (hold,) = partition.holds().values()
    others = [
        partition.cluster.sbatch(
            "root", "-p", "gpu", "--gres=gpu:4", "-c1", "--mem=50", "-w", node, script="sleep 4"
        )
        for node in hold["nodes"]
    ]
    for each in others:
        partition.cluster.wait_job(each, "RUNNING", "COMPLETED")
    assert end(partition, job) == undisturbed
    assert list(partition.holds()) == [hold["id"]]
    told = partition.log()
    assert "hold_requeued" in told


def test_an_outage_of_slurmctld_is_a_pause(partition: Partition, undisturbed: list[Any]) -> None:
    job = begin(partition, step=1)
    pids = partition.agent_pids()
    partition.cluster.kill_slurmctld()
    try:
        wait_for(lambda: partition.nodes()["trouble"], "that it is noticed", seconds=60)
        assert step_of(partition, "plxalice", job) < STEPS
    finally:
        partition.cluster.start_slurmctld()
    assert end(partition, job) == undisturbed
    assert partition.agent_pids() == pids
    wait_for(lambda: not partition.nodes()["trouble"], "that it is over", seconds=60)


def test_a_daemon_that_is_killed_adopts_its_hold_in_the_middle_of_a_job(
    partition: Partition, undisturbed: list[Any]
) -> None:
    job = begin(partition)
    pids = partition.agent_pids()
    partition.kill_daemon()
    partition.start()
    assert partition.agent_pids() == pids
    assert end(partition, job) == undisturbed


def test_a_hold_that_waits_in_slurm_says_why(cluster: Cluster, model: Path) -> None:
    made = Partition(cluster, cluster.folder / "waits", model)
    others = occupy_all(cluster)
    try:
        made.start(up=False)
        wait_for(
            lambda: [hold for hold in made.holds().values() if hold["reason"] == "Resources"],
            made.what,
            seconds=30,
        )
        job = made.submit("plxalice", script(1))
        wait_for(lambda: "waits in Slurm (Resources)" in told(made, job), made.what, seconds=20)
        cluster.run("root", ["scancel", *others])
        assert made.wait_job(job, "completed", "failed", seconds=180)["state"] == "completed"
    finally:
        cluster.run("root", ["scancel", *others])
        made.close()


def occupy_all(cluster: Cluster) -> list[str]:
    """Jobs of root's on every GPU."""
    nodes = [name for name in cluster.nodes if name.startswith("n")]
    words = ["-p", "gpu", "--gres=gpu:4", "-c1", "--mem=50"]
    ids = [cluster.sbatch("root", *words, "-w", node, script="sleep 600") for node in nodes]
    for each in ids:
        cluster.wait_job(each, "RUNNING")
    return ids


def told(partition: Partition, job: str) -> str:
    """What ``explain`` says of a job."""
    with partition.client() as client:
        return " ".join(client.explain(partition.job(job)["job_id"])["sentences"])


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        ({"account": "nobody"}, "Invalid account or account/partition combination"),
        ({"qos": "golden"}, "Invalid qos specification"),
    ],
)
def test_a_hold_that_slurm_refuses_is_told_in_its_words_and_tried_again_later(
    cluster: Cluster, model: Path, hold: dict[str, Any], words: str
) -> None:
    made = Partition(cluster, cluster.folder / f"refused-{next(iter(hold))}", model, hold=hold)
    try:
        made.start(up=False)
        wait_for(lambda: made.nodes()["trouble"], made.what, seconds=30)
        assert words in " ".join(made.nodes()["trouble"])
        assert made.log().count("hold_refused") <= 2
        job = made.submit("plxalice", script(1))
        wait_for(lambda: words in told(made, job), made.what, seconds=20)
    finally:
        made.close()


def test_holds_come_when_jobs_wait_and_go_when_nothing_needs_them(
    cluster: Cluster, model: Path
) -> None:
    made = Partition(
        cluster,
        cluster.folder / "scale",
        model,
        train=SLOW,
        rollout=SLOW_SAMPLES,
        hold={"max": 2, "scale_up_after_seconds": 1, "idle_release_seconds": 3},
        partition={"host_bytes": room_for_one(model)},
    )
    try:
        made.start()
        jobs = [
            made.submit(user, script(STEPS), "--nodelist=c1") for user in ("plxalice", "plxbob")
        ]
        for job in jobs:
            assert made.wait_job(job, "completed", "failed", seconds=90)["state"] == "completed"
        homes = made.query("select distinct wpg from deployments")
        assert len(homes) == 2, homes
        wait_for(lambda: len(made.holds()) == 1, made.what, seconds=30)
        assert made.query("select count(*) from holds") == [(2,)]
        wait_for(lambda: made.flaws() == [], lambda: f"no flaws: {made.flaws()}", seconds=10)
    finally:
        made.close()


def test_jobs_that_turn_out_to_fit_on_one_hold_leave_the_other(
    cluster: Cluster, model: Path
) -> None:
    """A stranger is taken for one that needs a WPG alone."""
    made = Partition(
        cluster,
        cluster.folder / "vacant",
        model,
        train=SLOW,
        rollout=SLOW_SAMPLES,
        hold={"max": 2, "scale_up_after_seconds": 1, "idle_release_seconds": 2},
    )
    sharing = "[sharing]\nmax_slowdown = 4.0\nregroup_seconds = 1\n"
    guess = "[sharing.guess]\nstep_seconds = 2\ntrain_share = 0.6\nsample_share = 0.6\n"
    guess += "switch_seconds = 0.1\n"
    made.config.write_text(made.config.read_text() + sharing + guess)
    try:
        made.start()
        users = ("plxalice", "plxbob")
        jobs = [made.submit(user, script(48, 2.0), "--nodelist=c1") for user in users]
        wait_for(lambda: len(made.holds()) == 2, made.what, seconds=60)
        wait_for(lambda: len(made.holds()) == 1, made.what, seconds=120)
        assert [made.job(job)["state"] for job in jobs] == ["running", "running"], made.what()
        assert "others have had room for all who live on it for 2 s" in made.log()
        (hold,) = made.holds()
        homes = made.query("select wpg, count(*) from deployments group by wpg")
        assert [count for _, count in homes] == [2], homes
        assert made.wpgs()[homes[0][0]]["hold"] == hold
        for job in jobs:
            assert made.wait_job(job, "completed", "failed", seconds=180)["state"] == "completed"
        assert seen(made, users[0], jobs[0]) == seen(made, users[1], jobs[1])
        wait_for(lambda: made.flaws() == [], lambda: f"no flaws: {made.flaws()}", seconds=10)
        (journal,) = (made.folder / "state" / "journal").glob("*.jsonl")
        assert list(replay(journal))
        assert '["vacate",' in journal.read_text()
    finally:
        made.close()


def room_for_one(model: Path) -> int:
    """Bytes of the host tier in which one job's image fits beside its spare, and no second job."""
    found = read_model_folder(model, dtype="float32")
    spec = ModelSpec(
        name="tiny",
        path=str(model),
        dtype=found.dtype,
        max_context_length=256,
        vocab_size=found.vocab_size,
        parameters=found.parameters,
        architecture=found.architecture,
    )
    return spec.train_bytes * 5 // 2


def test_a_hold_that_no_daemon_remembers_is_cancelled(partition: Partition) -> None:
    (hold,) = partition.holds().values()
    stray = partition.cluster.sbatch(
        "plxsvc",
        "--job-name=plexrl-hold-rlvr",
        "--comment=plexrl hold h9 of partition rlvr",
        "--hold",
    )
    other = partition.cluster.sbatch("plxsvc", "--job-name=plexrl-hold-rlvr", "--hold")
    partition.cluster.wait_job(stray, "CANCELLED")
    assert partition.cluster.state(other) == "PENDING"
    assert list(partition.holds()) == [hold["id"]]
    assert partition.cluster.state(hold["slurm_id"]) == "RUNNING RUNNING"


def test_a_partition_that_is_taken_down_leaves_nothing_in_slurm(partition: Partition) -> None:
    job = begin(partition, step=0)
    (hold,) = partition.holds().values()
    with partition.client() as client:
        client.release()
    assert partition.daemon is not None and partition.daemon.wait(timeout=60) == 0
    partition.cluster.wait_job(hold["slurm_id"], "COMPLETED", "CANCELLED")
    partition.cluster.wait_job(job, "CANCELLED")
    assert partition.query("select state from holds") == [("ended",)]
    assert partition.query("select state from jobs") == [("cancelled",)]
    for node in hold["nodes"]:
        assert list(partition.cluster.host_dir.glob(f"rlvr/{node}/h1.*/*")) == []


def test_a_hold_that_slurm_cancels_leaves_no_memory_taken_and_is_followed_by_another(
    partition: Partition,
) -> None:
    (hold,) = partition.holds().values()
    partition.cluster.run("root", ["scancel", hold["slurm_id"]])
    wait_for(lambda: "h2" in partition.holds() and partition.up(), partition.what, seconds=60)
    for node in hold["nodes"]:
        assert list(partition.cluster.host_dir.glob(f"rlvr/{node}/h1.*/*")) == []
