"""Images of a WPG over two agents leave their memory, and come back as they were."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.cli.client import Refused
from tests.scenarios.partition import Partition, running, wait_until
from tests.scenarios.test_damaged_images import STEPS, Learner, both_halves

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves goes while its warnings are ignored."""
    yield
    gc.collect()


def learned(folder: Path, model: Path, to: str) -> list[list[Any]]:
    """What two jobs see that take turns; ``to``: where their images go between the halves."""
    folder.mkdir()
    settings = {
        "image_every": 1, "nvme_dir": str(folder / "nvme"), "nvme_bytes": "64MiB",
    }  # fmt: skip
    with running(
        folder, model=model, settings=settings, train_gpus=2, train_nodes=2,
        hold={"durable_every": 2},
    ) as partition:  # fmt: skip
        learners = [Learner(partition, number) for number in range(2)]
        found = both_halves(learners, lambda: evict(partition, learners, to) if to else None)
        assert partition.flaws() == []
    return found


def evict(partition: Partition, learners: list[Learner], to: str) -> None:
    assert STEPS >= 2, "there is something durable"

    def gone() -> bool:
        try:
            with partition.client() as client:
                (row,) = client.evict_state(waiting[0].job.id, deployment="", to=to)["evicted"]
        except Refused as problem:
            if "try again" not in str(problem):
                raise
            return False
        assert row["bytes"] > 0 and "," in row["node"]
        waiting.pop(0)
        return not waiting

    waiting = list(learners)
    wait_until(gone, seconds=30, name="images to leave")


def test_evicted_shares_come_back_as_they_were(tmp_path: Path, model: Path) -> None:
    calm = learned(tmp_path / "calm", model, "")
    for to in ("durable", "nvme"):
        assert learned(tmp_path / to, model, to) == calm
