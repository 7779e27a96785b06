"""A training WPG over two agents: one gang for the controller, whatever dies on either node."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory.slab import read_header
from tests.scenarios.conftest import SLOW, SLOW_SAMPLES
from tests.scenarios.controller import train
from tests.scenarios.partition import Job, Partition, kill, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

Disturb = Callable[[Partition], None]
SECOND = "localhost-2"


@pytest.fixture
def partition(tmp_path: Path, model: Path) -> Iterator[Partition]:
    with running(
        tmp_path,
        model=model,
        train=SLOW,
        rollout=SLOW_SAMPLES,
        train_gpus=2,
        train_nodes=2,
        settings={"image_every": 1},
    ) as one:
        yield one


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[list[Any], Any]:
    """What a run on one agent sees, and the weights that it ends with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with running(folder, model=model, train=SLOW, rollout=SLOW_SAMPLES, train_gpus=2) as partition:
        job = Job(partition, seed=7, models=["tiny"])
        return train(job), partition.published(job, "end")


def pids(partition: Partition, wpg: str) -> list[int]:
    (view,) = [view for view in partition.nodes()["wpgs"] if view["id"] == wpg]
    return [int(pid) for pid in view["pids"]]


def _rank(rank: int) -> Disturb:
    def strike(partition: Partition) -> None:
        before, others = pids(partition, "train-0"), pids(partition, "rollout-0")
        agents = [partition.agent_pid(node) for node in ("localhost", SECOND)]
        kill(before[rank])
        wait_until(
            lambda: len(after := pids(partition, "train-0")) == 2 and not {*before} & {*after},
            name="both ranks to be new ones",
        )
        assert pids(partition, "rollout-0") == others
        assert [partition.agent_pid(node) for node in ("localhost", SECOND)] == agents

    return strike


def _agent(node: str) -> Disturb:
    def strike(partition: Partition) -> None:
        other = SECOND if node == "localhost" else "localhost"
        before = pids(partition, "train-0")
        agents = partition.agent_pid(node), partition.agent_pid(other)
        kill(agents[0])
        wait_until(
            lambda: len(after := pids(partition, "train-0")) == 2 and not {*before} & {*after},
            name="both ranks to be new ones",
        )
        assert partition.agent_pid(node) != agents[0]
        assert partition.agent_pid(other) == agents[1]

    return strike


def _daemon(partition: Partition) -> None:
    before = pids(partition, "train-0")
    partition.kill_daemon()
    time.sleep(0.5)
    partition.start()
    assert pids(partition, "train-0") == before, "a gang has to outlive its daemon"


@pytest.mark.parametrize(
    ("disturb", "at"),
    [
        pytest.param(_rank(0), 1, id="rank of the first node"),
        pytest.param(_rank(1), 2, id="rank of the second node"),
        pytest.param(_agent("localhost"), 1, id="agent of the first node"),
        pytest.param(_agent(SECOND), 2, id="agent of the second node"),
        pytest.param(_daemon, 1, id="daemon"),
    ],
)
def test_what_dies_on_either_node_changes_nothing_that_the_controller_sees(
    partition: Partition, undisturbed: tuple[list[Any], Any], disturb: Disturb, at: int
) -> None:
    job = Job(partition, seed=7, models=["tiny"])
    failures: list[BaseException] = []

    def strike() -> None:
        time.sleep(0.15)
        try:
            disturb(partition)
        except BaseException as error:
            failures.append(error)

    threads: list[threading.Thread] = []

    def between(step: int) -> None:
        if step == at:
            threads.append(threading.Thread(target=strike))
            threads[-1].start()

    seen = train(job, between=between)
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert threads, "nothing was disturbed"
    assert seen == undisturbed[0]
    assert partition.published(job, "end") == undisturbed[1]
    job.cancel()
    wait_until(lambda: job.row()["state"] == "cancelled", name="the job to end")
    partition.stop_daemon()
    assert partition.flaws() == []


def test_a_save_that_only_one_node_finishes_loses_no_image(
    tmp_path: Path, model: Path, undisturbed: tuple[list[Any], Any]
) -> None:
    """Rank 1 dies in its third image, when rank 0 may have written its own. Calls before the second
    one are forgotten: without the second image on both nodes nothing could go on."""
    marker = tmp_path / "died"
    options = SLOW | {
        "crash_on": [{"kind": "save_image", "count": 3, "rank": 1}],
        "crash_marker": str(marker),
    }
    with running(
        tmp_path,
        model=model,
        train=options,
        rollout=SLOW_SAMPLES,
        train_gpus=2,
        train_nodes=2,
        settings={"image_every": 1},
    ) as partition:
        job = Job(partition, seed=7, models=["tiny"])
        assert train(job) == undisturbed[0]
        assert marker.exists()
        assert partition.published(job, "end") == undisturbed[1]
        assert progresses(partition, "test") & progresses(partition, f"test.{SECOND}")
        job.cancel()
        wait_until(lambda: job.row()["state"] == "cancelled", name="the job to end")
        partition.stop_daemon()
        assert partition.flaws() == []


def progresses(partition: Partition, folder: str) -> set[tuple[int, int]]:
    """Of the complete images in the host tier of one agent, by what its agent would find."""
    found = set()
    for number in (0, 1):
        images = partition.host / folder / "images" / "train-0" / f"world-2.ranks-{number}-{number}"
        for path in images.glob("slot-*"):
            with contextlib.suppress(BadImage):
                found.add(read_header(path).progress)
    return found
