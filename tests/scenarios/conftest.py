"""Partitions with fake engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_folders import make_model_folder
from tests.scenarios.partition import Partition, running

#: A function takes long enough to be killed in the middle.
SLOW = {"delay_us": {"forward_backward": 150_000, "optim_step": 100_000}}
SLOW_SAMPLES = {"delay_us": {"sample": 200_000}}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512
    )


@pytest.fixture
def partition(tmp_path: Path, model: Path) -> Iterator[Partition]:
    with running(tmp_path, model=model, train=SLOW, rollout=SLOW_SAMPLES) as one:
        yield one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each starts processes, and waits for them."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
