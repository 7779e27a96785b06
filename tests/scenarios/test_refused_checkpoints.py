"""A folder that refuses a checkpoint: its call fails with one sentence, and the job goes on."""

import gc
from collections.abc import Callable, Iterator

import pytest
import tinker

from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:DEPRECATED",
)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves goes while its warnings are ignored."""
    yield
    gc.collect()


def test_a_checkpoint_that_cannot_be_written_or_read_fails_its_call_and_no_rank(
    partition: Partition,
) -> None:
    job = Job(partition, seed=1, models=["tiny"])
    pid = partition.rank_pid("train-0")
    client = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
    client.forward_backward([datum(4, 5)], "cross_entropy").result()
    saved = client.save_state("good").result().path
    checkpoints = partition.folder / "state" / "checkpoints"
    away = checkpoints.rename(checkpoints.with_name("away"))
    checkpoints.touch()  # nobody, root neither, can write or read a folder in it
    said = []
    tried: list[Callable[[], object]] = [
        lambda: client.save_state("bad").result(),
        lambda: client.save_weights_for_sampler("bad").result(),
        lambda: client.load_state(saved).result(),
    ]
    for work in tried:
        with pytest.raises(tinker.RequestFailedError) as caught:
            work()
        said.append(str(caught.value))
    assert all("checkpoint" in each and "died" not in each for each in said), said
    assert all("cannot be written (" in each for each in said[:2]), said
    client.forward_backward([datum(4, 5)], "cross_entropy").result()
    checkpoints.unlink()
    away.rename(checkpoints)
    client.load_state(saved).result()
    client.save_state("bad").result()
    assert partition.rank_pid("train-0") == pid
    assert partition.flaws() == []
