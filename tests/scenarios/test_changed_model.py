"""Base weights that change under a job: refused with a sentence, never learned from."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker import types

from tests.model_folders import make_model_folder
from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition, kill, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves goes while its warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = make_model_folder(tmp_path / "tiny", max_position_embeddings=512)
    return folder / "model.safetensors"


@pytest.fixture
def partition(tmp_path: Path, weights: Path) -> Iterator[Partition]:
    with running(tmp_path, model=weights.parent) as one:
        yield one


def test_a_job_whose_base_weights_changed_is_not_rebuilt_from_others(
    partition: Partition, weights: Path
) -> None:
    job = Job(partition, seed=3, models=["tiny"])
    training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()

    def step() -> None:
        training.forward_backward([datum(4, 5, 6)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    step()
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + b"\x07")
    pid = partition.rank_pid("train-0")
    kill(pid)
    wait_until(lambda: _another(partition, pid), name="another rank")
    with pytest.raises(Exception, match=r"weights of model tiny .* were changed since"):
        step()
    fresh = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
    fresh.forward_backward([datum(4, 5, 6)], "cross_entropy").result()


def test_a_config_that_changed_is_not_learned_with(partition: Partition, weights: Path) -> None:
    job = Job(partition, seed=3, models=["tiny"])
    config = weights.parent / "config.json"
    before = config.read_text()
    make_model_folder(weights.parent, max_position_embeddings=512, rope_theta=5.0)
    pid = partition.rank_pid("train-0")
    kill(pid)

    def refused() -> bool:
        (view,) = [view for view in partition.nodes()["wpgs"] if view["id"] == "train-0"]
        return "config.json of model tiny" in view["reason"]

    wait_until(refused, name="the reason to be said")
    config.write_text(before)
    wait_until(lambda: _another(partition, pid), name="another rank")
    training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
    training.forward_backward([datum(4, 5, 6)], "cross_entropy").result()


def _another(partition: Partition, pid: int) -> bool:
    (view,) = [view for view in partition.nodes()["wpgs"] if view["id"] == "train-0"]
    return view["state"] not in ("starting", "down") and view["pids"][0] != pid
