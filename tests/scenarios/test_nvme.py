"""More deployments on one WPG than fit into the host tier: the coldest wait on NVMe."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.model_folders import make_hollow_folder
from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition, kill, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

DEPLOYMENTS, STEPS, IN_MEMORY = 8, 3, 3
SLACK = 1 << 20


def learn(job: Job, number: int) -> list[Any]:
    """A run whose data only it has; what it saw, and the weights at its end."""
    seen: list[Any] = []
    training = job.service().create_lora_training_client(base_model="tiny", rank=0, seed=3).result()
    for step in range(STEPS):
        data = [datum(4, 5 + step, 10 + number)]
        result = training.forward_backward(data, "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        seen.append(result.loss_fn_outputs[0]["logprobs"].tolist())
    training.save_weights_for_sampler("end").result()
    return [*seen, job.partition.published(job, "end")]


#: Of a training image of the model: 20 for each parameter.
IMAGE = 4_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hollow_folder(tmp_path_factory.mktemp("models") / "tiny", parameters=IMAGE // 20)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[list[Any]]:
    """What each run sees when no other is there."""
    seen = []
    with running(tmp_path_factory.mktemp("alone"), model=model) as partition:
        for number in range(DEPLOYMENTS):
            job = Job(partition, seed=number, models=["tiny"])
            seen.append(learn(job, number))
            job.cancel()
    return seen


class Watch:
    """Reads how many bytes the images in memory take, for as long as it runs."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._over = partition, threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.01):
            sizes = []
            for path in self._partition.images():
                if path.exists():
                    sizes.append(path.stat().st_size)
            self.most = max(self.most, sum(sizes))

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def crowded(tmp_path: Path, model: Path) -> Iterator[Partition]:
    """A partition with memory for three images of eight."""
    settings = {
        "host_bytes": IN_MEMORY * IMAGE + SLACK,
        "nvme_dir": str(tmp_path / "nvme"),
        "nvme_bytes": (DEPLOYMENTS + 1 - IN_MEMORY) * IMAGE + SLACK,
    }
    with running(tmp_path, model=model, train={"image_bytes": IMAGE}, settings=settings) as one:
        yield one


def left_memory(partition: Partition) -> int:
    return said(partition, "image_left_memory")


def said(partition: Partition, event: str) -> int:
    logs = partition.folder.glob("state/holds/*.log")
    return sum(log.read_text().count(event) for log in logs)


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "agent killed"])
def test_eight_deployments_with_memory_for_three_learn_what_each_learns_alone(
    crowded: Partition, alone: list[list[Any]], killed: bool
) -> None:
    jobs = [Job(crowded, seed=number, models=["tiny"]) for number in range(DEPLOYMENTS)]
    copies = crowded.folder / "nvme" / "test" / "images"
    with Watch(crowded) as watch, ThreadPoolExecutor(DEPLOYMENTS) as pool:
        runs = [pool.submit(learn, job, number) for number, job in enumerate(jobs)]
        if killed:
            wait_until(lambda: left_memory(crowded) >= 5, name="images to leave memory")
            assert not all(run.done() for run in runs)
            kill(crowded.agent_pid())
        seen = [run.result(timeout=120) for run in runs]
    assert seen == alone
    assert left_memory(crowded) >= DEPLOYMENTS - IN_MEMORY
    assert said(crowded, "image_prefetched") > 0
    assert list(copies.rglob("manifest.json"))
    assert 2 * IMAGE < watch.most <= IN_MEMORY * IMAGE + SLACK
    assert crowded.flaws() == []
    for job in jobs:
        job.cancel()
    wait_until(lambda: not list(copies.rglob("manifest.json")), name="the copies to go")


def test_a_partition_without_nvme_admits_fewer(tmp_path: Path, model: Path) -> None:
    settings = {"host_bytes": IN_MEMORY * IMAGE + SLACK}
    with running(tmp_path, model=model, settings=settings) as partition:
        for number in range(IN_MEMORY - 1):
            Job(partition, seed=number, models=["tiny"])
        with pytest.raises(AssertionError, match="the job to run"):
            _impatient(partition)


def _impatient(partition: Partition) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.scenarios.partition.wait_until", _short)
        Job(partition, seed=9, models=["tiny"])


def _short(what: Any, *, name: str, seconds: float = 2.0) -> Any:
    return wait_until(what, seconds=seconds, name=name)
