"""Twenty deployments on one WPG with memory for three: none fails, and none learns otherwise."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.model_folders import make_hollow_folder
from tests.scenarios.partition import Job, running
from tests.scenarios.test_nvme import IN_MEMORY, SLACK, Watch, learn, left_memory

#: The SDK leaves its connections to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

DEPLOYMENTS = 20
#: Of the model; its sampling weights, which stay in memory, take four for each.
PARAMETERS = 200_000
IMAGE = 5_500_000


def test_twenty_deployments_with_memory_for_three_learn_what_each_learns_alone(
    tmp_path: Path,
) -> None:
    model = make_hollow_folder(tmp_path / "tiny", parameters=PARAMETERS)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    alone = []
    (tmp_path / "alone").mkdir()
    with running(tmp_path / "alone", model=model) as partition:
        for number in range(DEPLOYMENTS):
            job = Job(partition, seed=number, models=["tiny"])
            alone.append(learn(job, number))
            job.cancel()
    settings = {
        "host_bytes": IN_MEMORY * IMAGE + SLACK,
        "nvme_dir": str(tmp_path / "nvme"),
        "nvme_bytes": (DEPLOYMENTS + 1 - IN_MEMORY) * IMAGE + SLACK,
    }
    (tmp_path / "many").mkdir()
    with running(
        tmp_path / "many", model=model, train={"image_bytes": IMAGE}, settings=settings
    ) as partition:
        jobs = [Job(partition, seed=number, models=["tiny"]) for number in range(DEPLOYMENTS)]
        with Watch(partition) as watch, ThreadPoolExecutor(DEPLOYMENTS) as pool:
            runs = [pool.submit(learn, job, number) for number, job in enumerate(jobs)]
            together = [run.result(timeout=240) for run in runs]
        assert together == alone
        assert left_memory(partition) >= DEPLOYMENTS - IN_MEMORY
        assert 2 * IMAGE < watch.most <= IN_MEMORY * IMAGE + SLACK
        assert all(job.row()["state"] == "running" for job in jobs)
        assert partition.flaws() == []
