"""One real cluster for all the live tests of a session (see tests/slurm_live/cluster.py)."""

import shutil
from collections.abc import Iterator

import pytest

from tests.slurm_live.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four nodes of four GPUs, one without (c1), accounting; tests leave it as they found it."""
    made = Cluster.temporary(gpuless_nodes=1)
    try:
        with made:
            yield made
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)
