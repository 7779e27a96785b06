"""``plexrl doctor`` on a real Slurm: nothing wrong, and several things that are."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_folders import make_model_folder
from tests.slurm_live import services
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.partition import Partition

pytestmark = pytest.mark.slurm

_numbers = itertools.count()


@pytest.fixture(scope="module")
def model(cluster: Cluster) -> Path:
    folder = cluster.folder / f"doctor-model-{os.getpid()}"
    return make_model_folder(folder, max_position_embeddings=512)


@pytest.fixture
def partition(cluster: Cluster, model: Path, request: pytest.FixtureRequest) -> Iterator[Partition]:
    """Its daemon does not run, unless the test starts it."""
    more = getattr(request, "param", {})
    made = Partition(cluster, cluster.folder / f"doctor{next(_numbers)}", model, **more)
    yield made
    if made.daemon is not None:
        made.close()


Lines = dict[str, list[tuple[str, str]]]


def doctor(partition: Partition, *, code: int, user: str = "root") -> Lines:
    """``(state, sentence)`` of each check, by name."""
    begun = time.monotonic()
    done = partition.plexrl(user, "doctor", "--json", seconds=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert time.monotonic() - begun < 60
    found: Lines = {}
    for line in json.loads(done.stdout):
        found.setdefault(line["check"], []).append((line["state"], line["sentence"]))
    return found


def failed(found: Lines) -> dict[str, str]:
    return {
        name: sentence
        for name, lines in found.items()
        for state, sentence in lines
        if state == "FAIL"
    }


@pytest.mark.parametrize("user", ["root", "plxsvc"])
def test_a_good_site_has_no_failure(partition: Partition, user: str) -> None:
    partition.start()
    found = doctor(partition, code=0, user=user)
    assert failed(found) == {}
    said = [sentence for lines in found.values() for _, sentence in lines]
    for words in (
        "the service user is plxsvc",
        "makes and reads credentials",
        "plxsvc has AdminLevel Operator",
        "holds run on account service",
        "Slurm has nodes for every component of a hold (2 GPUs)",
        "the clock of slurmctld's host and this host's agree",
        "answers and has this version's tables",
        "keys: readable by plxsvc only",
        "hold h1 (Slurm job ",
    ):
        assert any(words in sentence for sentence in said), (words, said)


def test_a_user_who_may_not_see_everything_is_told_so(partition: Partition) -> None:
    found = doctor(partition, code=1, user="plxbob")
    assert "you may not write in" in found["settings"][0][1]
    assert "run this as root or as the service user" in found["settings"][1][1]


@contextlib.contextmanager
def without_munged(cluster: Cluster) -> Iterator[None]:
    cluster._daemons.kill("munged")
    cluster.munge_socket.unlink(missing_ok=True)
    try:
        yield
    finally:
        argv = services.munged(cluster.folder / "munge", cluster.munge_socket)
        cluster._spawn("munged", argv, "munge")
        wait_for(cluster.munge_socket.is_socket, "munged", seconds=20)
        wait_for(cluster._answers, "slurmctld", seconds=20)


def test_a_munged_that_is_stopped(partition: Partition) -> None:
    with without_munged(partition.cluster):
        found = doctor(partition, code=1)
    assert "start munged on this host" in failed(found)["munge"]
    assert "start munged on this host" in failed(found)["slurmctld"]
    assert "because Slurm does not answer" in found["not checked"][0][1]


def test_a_slurmctld_that_is_down(partition: Partition) -> None:
    partition.cluster.stop_slurmctld()
    try:
        found = doctor(partition, code=1)
    finally:
        partition.cluster.start_slurmctld()
    assert list(failed(found)) == ["slurmctld"]
    assert "slurmctld does not answer: see `scontrol ping`" in failed(found)["slurmctld"]


def test_a_service_user_without_rights(partition: Partition) -> None:
    modify = ["sacctmgr", "-i", "modify", "user", "plxsvc", "set"]
    partition.cluster.run("root", [*modify, "adminlevel=none"])
    try:
        found = doctor(partition, code=1)
    finally:
        partition.cluster.run("root", [*modify, "adminlevel=operator"])
    assert list(failed(found)) == ["accounts"]
    remedy = "sacctmgr -i modify user plxsvc set AdminLevel=Operator"
    assert failed(found)["accounts"].endswith(remedy)
    partition.cluster.run("root", [*remedy.split()])
    assert failed(doctor(partition, code=0)) == {}


def test_a_partition_that_is_down(partition: Partition) -> None:
    update = ["scontrol", "update", "PartitionName=gpu"]
    partition.cluster.run("root", [*update, "State=DOWN"])
    try:
        found = doctor(partition, code=0)
    finally:
        partition.cluster.run("root", [*update, "State=UP"])
    states = [state for state, words in found["holds"] if "State=UP" in words]
    assert states == ["WARN", "WARN"]


@pytest.mark.parametrize("partition", [{"gpus": 9}], indirect=True)
def test_gpus_that_no_node_has(partition: Partition) -> None:
    found = doctor(partition, code=1)
    assert "(at most 4): lower gpus_per_node" in failed(found)["holds"]
    checked = partition.plexrl("root", "partition", "check")
    assert checked.returncode == 78
    assert "no hold could ever start" in checked.stderr


def test_check_asks_slurm_and_does_without(partition: Partition) -> None:
    checked = partition.plexrl("root", "partition", "check")
    assert checked.returncode == 0, checked.stderr
    text = partition.config.read_text()
    partition.config.write_text(text.replace("etc/slurm.conf", "etc/nowhere.conf"))
    checked = partition.plexrl("root", "partition", "check")
    assert checked.returncode == 0, checked.stderr
    assert "not compared with Slurm" in checked.stderr


def test_a_model_that_only_root_may_read(partition: Partition, cluster: Cluster) -> None:
    folder = make_model_folder(cluster.folder / f"closed-{os.getpid()}")
    folder.chmod(0o700)
    text = partition.config.read_text()
    start = text.index("path = ")
    partition.config.write_text(f'{text[:start]}path = "{folder}"\n')
    found = doctor(partition, code=1)
    assert failed(found)["settings"].startswith("to plxsvc, who runs the daemon: ")
    assert "model[0].path" in failed(found)["settings"]


def test_a_slurm_conf_that_is_missing(partition: Partition) -> None:
    text = partition.config.read_text()
    partition.config.write_text(text.replace("etc/slurm.conf", "etc/nowhere.conf"))
    found = doctor(partition, code=1)
    assert "set `conf` in [slurm] or SLURM_CONF to its path" in failed(found)["slurmctld"]
