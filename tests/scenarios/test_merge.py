"""Two half-empty training WPGs become one while somebody waits, and nobody learns anything else."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.controller import train
from tests.scenarios.partition import Job, Partition, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

#: Of whom nothing is known, nobody is beside; of whom something is known, two are.
SHARING = {
    "placement": "fit",
    "max_slowdown": 4.0,
    "regroup_seconds": 1,
    "guess": {
        "train_share": 0.94,
        "sample_share": 0.01,
        "step_seconds": 60,
        "switch_seconds": 0.1,
    },
}
STEPS = 50


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What the SDK left is collected while its warnings are ignored."""
    yield
    gc.collect()


def alone(folder: Path, model: Path, seed: int) -> list[Any]:
    folder.mkdir()
    with running(folder, model=model) as partition:
        return train(Job(partition, seed=seed, models=["tiny"]), steps=STEPS)


def home(job: Job) -> str:
    ((found,),) = job.partition.query(
        f"select json_extract(homes, '$.train') from jobs where id = {job.id}"
    )
    return str(found)


def is_known(partition: Partition, jobs: list[Job]) -> bool:
    """Whether each is believed to be as its own steps were."""
    with partition.client() as client:
        return all(client.explain(job.id)["habits"]["from"] == "its own steps" for job in jobs)


def test_a_wpg_is_made_free_for_who_waits_and_all_learn_as_alone(
    tmp_path: Path, model: Path
) -> None:
    more = f"""
[[wpg]]
pool = "train"
engine = "fake_train"
gpus = 1

[[model]]
name = "other"
path = "{model}"
dtype = "float32"
max_context_length = 256
"""
    with (
        running(
            tmp_path, model=model, sharing=SHARING, hold={"durable_every": 5}, tables=more
        ) as partition,
        ThreadPoolExecutor() as pool,
    ):
        jobs = [Job(partition, seed=seed, models=["tiny"]) for seed in (1, 2)]
        assert [home(job) for job in jobs] == ["train-0", "train-1"]
        seen = [pool.submit(train, job, steps=STEPS, pause_s=0.3) for job in jobs]
        wait_until(lambda: is_known(partition, jobs), name="five steps of each")
        third = Job(partition, seed=3, models=["other"])
        assert home(third) not in {home(job) for job in jobs}
        assert home(jobs[0]) == home(jobs[1])
        moved = next(job for job in jobs if home(job) != f"train-{jobs.index(job)}")
        with partition.client() as client:
            told = str(client.explain(moved.id))
        assert f"so that {home(third)} is free for jobs that wait" in told
        assert not any(future.done() for future in seen), "they had ended before it was merged"
        shared = [future.result() for future in seen]
        assert partition.flaws() == []
    assert shared == [alone(tmp_path / str(seed), model, seed) for seed in (1, 2)]
