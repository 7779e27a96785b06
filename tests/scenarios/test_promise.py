"""Promises and what they go by: a third job waits, is told why, and comes in when one ends."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plexrl_slurm.cli.main import cli
from plexrl_slurm.slurm.port import BatchJob
from tests.scenarios.controller import train
from tests.scenarios.partition import Job, Partition, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

#: Two such jobs keep a promise of 1.07 on one WPG of each pool, three do not.
SHARING = {"placement": "fit", "max_slowdown": 1.07}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What the SDK left is collected while its warnings are ignored."""
    yield
    gc.collect()


def submit(partition: Partition) -> tuple[int, str]:
    """A job of which nobody waits that it runs: row and Slurm's number."""
    with partition.client() as client:
        row = client.submit(
            {
                "partition": "test",
                "name": "third",
                "account": "a",
                "models": ["tiny"],
                "priority": 1,
                "seed": 3,
                "script": "sleep",
                "options": {},
            }
        )
        number = partition.slurm.submit(
            BatchJob(
                name="third",
                script="#!/bin/sh\nexec sleep 600\n",
                workdir=partition.folder,
                environment={"PATH": "/usr/bin:/bin"},
            ),
            hold=True,
        )
        client.bind(int(row["job_id"]), number)
    return int(row["job_id"]), number


def plexrl(partition: Partition, *words: str) -> str:
    result = CliRunner().invoke(cli, [*words, "--config", str(partition.config)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_third_waits_for_a_promise_and_comes_when_one_ends(tmp_path: Path, model: Path) -> None:
    sharing: dict[str, Any] = SHARING | {"guess": {"train_share": 0.2, "step_seconds": 60}}
    with running(tmp_path, model=model, sharing=sharing) as partition:
        first, _second = (Job(partition, seed=seed, models=["tiny"]) for seed in (1, 2))
        third, number = submit(partition)
        with partition.client() as client:
            wait_until(lambda: client.job(number)["reason_word"] == "Promise", name="the promise")
            told = client.explain(third)
        (obstacle,) = [each for each in told["obstacles"] if each["pool"] == "train"]
        assert obstacle["kind"] == "promise"
        assert "times as long as alone, and 1.07 was promised" in told["sentences"][0]
        assert f"{number} " in plexrl(partition, "squeue")
        assert "(Promise)" in plexrl(partition, "squeue")
        assert "was promised" in plexrl(partition, "explain", number)
        assert "MaxSlowdown=1.07" in plexrl(partition, "show", "job", number)
        first.cancel()
        with partition.client() as client:
            wait_until(lambda: client.job(number)["state"] == "running", name="the third to run")
            assert client.explain(third)["obstacles"] == []
            row = json.dumps(client.job(number))
            assert "train-0" in row


def test_what_a_job_is_like_is_learned_and_believed_of_the_next_one(
    tmp_path: Path, model: Path
) -> None:
    slow = {"delay_us": {"forward_backward": 30_000, "optim_step": 20_000}}
    with running(tmp_path, model=model, train=slow, sharing=SHARING) as partition:
        first = Job(partition, seed=1, models=["tiny"])
        with partition.client() as client:
            assert client.explain(first.id)["habits"]["from"] == "a guess"
            train(first, steps=8)
            habits = client.explain(first.id)["habits"]
        assert habits["from"] == "its own steps"
        assert habits["steps"] >= 5
        assert 80_000 <= habits["train_us"] < habits["step_us"]
        assert 30_000 <= habits["function_us"] < habits["train_us"]
        assert "(by its own steps)" in plexrl(partition, "explain", str(first.slurm_id))
        first.cancel()
        partition.stop_daemon()
        partition.start()
        again = Job(partition, seed=2, models=["tiny"])
        with partition.client() as client:
            known = client.explain(again.id)["habits"]
        assert known["from"] == "earlier jobs"
        assert known["train_us"] == pytest.approx(habits["train_us"], rel=0.5)
        ((steps,),) = partition.query("select json_extract(learned, '$.steps') from profiles")
        assert steps >= 5
