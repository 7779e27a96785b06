"""The private cluster itself: what the other live tests rely on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_live import processes
from tests.slurm_live.cluster import Cluster, CommandFailed, wait_for
from tests.slurm_live.stuck import free_gpus, taken_gpus, unstick
from tests.tree import ROOT

pytestmark = pytest.mark.slurm

TWO_NODES = ("-p", "gpu", "-N2", "-w", "n[3-4]", "--gres=gpu:1", "--no-kill")


@pytest.fixture
def small() -> Iterator[Cluster]:
    """A cluster of the test's own, without accounting: up in a fifth of a second."""
    made = Cluster.temporary(nodes=2, gpus=2, database=False)
    with made:
        yield made
    shutil.rmtree(made.folder)


def of(cluster: Cluster) -> set[processes.Process]:
    """Everything that has to do with the cluster, found by what it was started with."""
    return processes.with_environment({"SLURM_CONF": str(cluster.slurm_conf)})


def test_a_users_job_runs_as_that_user_with_the_gpus_it_asked_for(cluster: Cluster) -> None:
    script = 'id -un; echo "$CUDA_VISIBLE_DEVICES on $SLURMD_NODENAME"'
    words = ("-p", "gpu", "--gres=gpu:h200:2", "-w", "n2", "-o", "out")
    job = cluster.sbatch("plxalice", *words, script=script)
    cluster.wait_job(job, "COMPLETED")
    assert (cluster.home("plxalice") / "out").read_text() == "plxalice\n0,1 on n2\n"


def test_the_accounts_are_enforced_and_the_service_user_is_an_operator(cluster: Cluster) -> None:
    with pytest.raises(CommandFailed, match="Invalid account"):
        cluster.sbatch("plxbob", "-A", "service")
    job = cluster.sbatch("plxbob", "--hold")
    cluster.run("plxsvc", ["scontrol", "release", job])
    cluster.wait_job(job, "RUNNING")
    with pytest.raises(CommandFailed, match=r"denied|Invalid user id"):
        cluster.run("plxalice", ["scancel", job])
    cluster.run("plxsvc", ["scancel", job])
    cluster.wait_job(job, "CANCELLED")


def test_the_components_of_a_het_job_have_gpus_on_their_own_nodes(cluster: Cluster) -> None:
    train = ("-p", "gpu", "-w", "n1", "--gres=gpu:4")
    rollout = ("-p", "gpu", "-N2", "-w", "n[2-3]", "--gres=gpu:h200:3")
    job = cluster.sbatch("plxsvc", *train, ":", *rollout)
    cluster.wait_job(job, "RUNNING")
    asked = ["squeue", "-h", "-j", job, "-O", "NodeList:20,tres-alloc:90"]
    said = sorted(line.split() for line in cluster.run("root", asked).stdout.splitlines())
    assert [nodes for nodes, _ in said] == ["n1", "n[2-3]"]
    gpus = [dict(part.split("=") for part in tres.split(","))["gres/gpu"] for _, tres in said]
    assert gpus == ["4", "6"]
    cluster.run("plxsvc", ["scancel", job])
    cluster.wait_job(job, "CANCELLED")


def test_losing_a_node_shrinks_a_no_kill_job_and_leaves_nothing_on_the_node(
    cluster: Cluster,
) -> None:
    task = "touch on.$SLURMD_NODENAME; exec sleep 600"
    job = cluster.sbatch("plxalice", *TWO_NODES, script=f"srun --no-kill bash -c '{task}'")
    signs = [cluster.home("plxalice") / f"on.{name}" for name in ("n3", "n4")]
    wait_for(lambda: all(path.exists() for path in signs), "its tasks run")
    left = [top / "n4" / "image" for top in (cluster.host_dir, cluster.nvme_dir)]
    for path in left:
        path.write_text("lost with the node")

    def there(name: str) -> set[processes.Process]:
        marks = {"SLURM_CONF": str(cluster.slurm_conf), "SLURMD_NODENAME": name}
        return processes.with_environment(marks)

    here, lost = there("n3"), there("n4")
    assert len(lost) >= 2  # slurmd, the task
    cluster.lose_node("n4")
    assert [path.exists() for path in left] == [False, False]
    assert there("n4") == set()
    assert here <= there("n3")

    where = ["squeue", "-h", "-j", job, "-o", "%T %N"]
    wait_for(lambda: cluster.run("root", where).stdout == "RUNNING n3\n", "n3 alone", seconds=60)
    assert cluster.node_state("n4").endswith("*")
    cluster.bring_back("n4")
    cluster.wait_node("n4", "idle")
    assert [path.parent.is_dir() for path in left] == [True, True]
    cluster.run("root", ["scancel", job])
    cluster.wait_job(job, "CANCELLED")


def test_a_restart_of_any_daemon_keeps_jobs_and_their_processes(small: Cluster) -> None:
    job = small.sbatch("plxalice", "-p", "gpu", "-w", "n1", script="echo $$ > pid; exec sleep 600")
    file = small.home("plxalice") / "pid"
    wait_for(lambda: file.exists() and file.read_text().strip(), "the job runs")
    small.kill_slurmctld()
    small.start_slurmctld()
    small.kill_slurmd("n1")
    small.start_slurmd("n1")
    assert small.state(job) == "RUNNING"
    assert Path(f"/proc/{file.read_text().strip()}").exists()


def test_stop_leaves_no_process_not_even_of_a_job_that_will_not_end(small: Cluster) -> None:
    stubborn = "trap '' TERM; setsid sleep 600 & touch up; while :; do sleep 1; done"
    job = small.sbatch("plxbob", "-p", "gpu", script=stubborn)
    small.sbatch("plxbob", "--hold")
    small.wait_job(job, "RUNNING")
    wait_for((small.home("plxbob") / "up").exists, "its processes")
    assert len(of(small)) >= 7
    small.stop()
    assert of(small) == set()
    assert not small.host_dir.exists()


def test_steps_that_slurm_cannot_end_are_ended_and_their_node_is_free_again(
    small: Cluster,
) -> None:
    job = small.sbatch("plxalice", "-p", "gpu", "-w", "n2", "--gres=gpu:2")
    small.wait_job(job, "RUNNING")
    assert taken_gpus(small) == {"n2": 2}
    wait_for(lambda: len(small.on_node("n2")) >= 2, "the step daemon and its task")
    frozen = small.on_node("n2")
    processes.freeze(frozen)
    small.run("root", ["scancel", job])
    assert "completing" in small.node_state("n2")
    said = unstick(small)
    assert all(f"{process.pid} T in" in said for process in frozen), said
    assert not small.on_node("n2")
    small.wait_node("n2", "idle")
    assert free_gpus(small) == ""
    small.wait_job(small.sbatch("plxalice", "-p", "gpu", "-w", "n2", "--gres=gpu:2"), "RUNNING")


def test_a_cluster_that_is_started_again_knows_its_past() -> None:
    made = Cluster.temporary(nodes=1)
    with made:
        job = made.sbatch("plxalice", script="true")
        made.wait_job(job, "COMPLETED")
    with made:
        wait_for(lambda: made.state(job) == "COMPLETED", "slurmctld knows the job")
        asked = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,Account"]
        assert made.run("plxalice", asked).stdout == "COMPLETED|research\n"
    shutil.rmtree(made.folder)


def test_what_a_killed_owner_left_is_ended_by_the_next_one() -> None:
    code = (
        "from tests.slurm_live.cluster import Cluster\n"
        "c = Cluster.temporary(nodes=1, database=False)\n"
        "c.start()\n"
        "c.sbatch('plxalice')\n"
        "print(c.folder, flush=True)\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        left = Cluster(owner.stdout.readline().strip(), nodes=1, database=False)
        os.kill(owner.pid, signal.SIGKILL)
    assert len(of(left)) >= 3
    shutil.rmtree(Cluster.temporary(nodes=1, database=False).folder)
    assert of(left) == set()
    assert not left.folder.exists()


def test_a_demo_cluster_is_started_and_stopped_by_different_processes() -> None:
    made = Cluster.temporary(nodes=1, database=False)

    def cli(verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "tests.slurm_live.cluster", verb, str(made.folder)]
        return subprocess.run(
            [*words, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )

    try:
        started = cli("start", "--nodes=1", "--no-database")
        assert started.returncode == 0, started.stderr
        assert f"SLURM_CONF={made.slurm_conf}" in started.stdout
        loaded = Cluster.load(made.folder)
        assert loaded.run("plxalice", ["sinfo", "-h", "-p", "gpu", "-o", "%N"]).stdout == "n1\n"
        assert cli("status").returncode == 0
    finally:
        assert cli("stop").returncode == 0
    assert of(made) == set()
    assert json.loads((made.folder / "cluster.json").read_text())["nodes"] == 1
    shutil.rmtree(made.folder)
    assert "no cluster was started" in cli("stop").stderr


def test_a_folder_that_users_cannot_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        processes.ClusterError, match=f"other users may not enter {tmp_path.parent}"
    ):
        Cluster(tmp_path / "c", database=False).start()
    with pytest.raises(processes.ClusterError, match="too long"):
        Cluster(f"/tmp/{'x' * 70}", database=False).start()


def test_a_daemon_that_cannot_start_is_named_with_its_last_words() -> None:
    broken = Cluster.temporary(nodes=1, database=False, extra=["NodeName=oops Nonsense=1"])
    with pytest.raises(processes.ClusterError, match=r"slurmctld ended: [\s\S]*Nonsense"):
        broken.start()
    assert of(broken) == set()
    shutil.rmtree(broken.folder)
