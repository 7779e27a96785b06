"""Two accounts, one place: who has used less goes first, and every command says why."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plexrl_slurm.cli.main import cli
from plexrl_slurm.slurm.port import BatchJob
from tests.scenarios.conftest import SLOW, SLOW_SAMPLES
from tests.scenarios.controller import train
from tests.scenarios.partition import Job, Partition, running, wait_until

#: The SDK's sockets close when its event loop ends with the process.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
TABLES = """
[priority]
fairshare = 10000
decay_half_life = "1-00:00:00"

[accounts.physics]
shares = 1

[qos.normal]
max_jobs = 1

[qos.fast]
priority = 10
weight = 4

[limits.account.bio]
max_submit = 2
"""


@pytest.fixture
def partition(tmp_path: Path, model: Path) -> Iterator[Partition]:
    with running(tmp_path, model=model, train=SLOW, rollout=SLOW_SAMPLES, tables=TABLES) as one:
        yield one
    gc.collect()  # while the warnings of the SDK's sockets are for nobody


class Waiting(Job):
    """A job in an account, which is not waited for."""

    def __init__(self, partition: Partition, account: str, *, seconds: int = 600) -> None:
        self.partition = partition
        with partition.client() as client:
            row = client.submit(
                {
                    "partition": "test",
                    "name": account,
                    "account": account,
                    "models": ["tiny"],
                    "priority": 1,
                    "seed": 1,
                    "script": "sleep",
                    "options": {"time_limit_us": str(seconds * 1_000_000)},
                }
            )
            self.id, self.token = int(row["job_id"]), str(row["token"])
            self.url = str(row["env"]["TINKER_BASE_URL"])
            self.slurm_id = partition.slurm.submit(
                BatchJob(
                    name=account,
                    script=f"#!/bin/sh\nexec sleep {seconds}\n",
                    workdir=partition.folder,
                    environment={"PATH": os.environ["PATH"]},
                ),
                hold=True,
            )
            client.bind(self.id, self.slurm_id)

    def state(self) -> str:
        return str(self.row()["state"])


def plexrl(partition: Partition, *words: str) -> Result:
    command = ("--config", str(partition.config), *words)
    return CliRunner().invoke(cli, command, prog_name="plexrl", env={"COLUMNS": "200"})


def asked(partition: Partition, *words: str) -> list[dict[str, Any]]:
    done = plexrl(partition, *words, "--json")
    assert done.exit_code == 0, done.output
    return list(json.loads(done.stdout)["jobs"])


def test_the_account_that_has_used_less_goes_first_and_all_commands_tell_it(
    partition: Partition,
) -> None:
    first = Waiting(partition, "physics")
    wait_until(lambda: first.state() == "running", name="the first job to run")
    train(first, steps=2)
    again = Waiting(partition, "physics")
    other = Waiting(partition, "bio")

    def flipped() -> bool:
        return [each["slurm_id"] for each in asked(partition, "sprio")] == [
            other.slurm_id,
            again.slurm_id,
        ]

    wait_until(flipped, seconds=30, name="fair share to put the other account first")
    bio, physics = asked(partition, "sprio")
    assert bio["factors"]["fairshare"] == 1.0
    assert physics["factors"]["fairshare"] < 0.5
    assert bio["parts"]["fairshare"] == 10_000
    lines = plexrl(partition, "sprio").stdout.splitlines()
    assert lines[1].split()[:4] == [other.slurm_id, "test", other.row()["user"], "bio"]

    def held() -> bool:
        jobs = asked(partition, "squeue", "-t", "PD")
        words = {each["slurm_id"]: each["reason_word"] for each in jobs}
        return words == dict.fromkeys((again.slurm_id, other.slurm_id), "QOSGrpJobsLimit")

    wait_until(held, name="both to be looked at")
    assert "(QOSGrpJobsLimit)" in plexrl(partition, "squeue").stdout
    told = plexrl(partition, "explain", again.slurm_id).stdout
    assert "qos normal has 1 job running, and max_jobs is 1" in told
    assert "1 job goes before it in the queue; its priority is" in told

    starts = asked(partition, "squeue", "--start")
    assert [each["slurm_id"] for each in starts] == [other.slurm_id, again.slurm_id]
    began = first.row()["started_us"]
    expected = [each["expected_start_us"] for each in starts]
    assert abs(expected[0] - (began + 600_000_000)) < 1_000_000  # the daemon's clock, and the row's
    assert expected[1] == expected[0] + 600_000_000

    third = Waiting(partition, "bio")
    refused = plexrl(partition, "sbatch", "-A", "bio", "--model", "tiny", "--wrap", "true")
    assert refused.exit_code == 65
    assert "account bio has 2 jobs waiting or running, and max_submit is 2" in refused.stderr
    third.cancel()

    first.cancel()
    wait_until(lambda: other.state() == "running", name="the other account's job to run")
    assert again.state() == "pending"
    assert partition.flaws() == []


def test_a_daemon_that_is_killed_again_and_again_loses_no_waiting_job(
    partition: Partition,
) -> None:
    jobs = [Waiting(partition, account) for account in ("physics", "bio", "physics")]
    ended: list[str] = []
    for _ in jobs:
        partition.kill_daemon()
        partition.start()

        def running_now() -> list[Waiting]:
            return [job for job in jobs if job.state() == "running"]

        (job,) = wait_until(running_now, name="one of the jobs to run")
        job.cancel()
        ended.append(job.slurm_id)
    assert sorted(ended) == sorted(job.slurm_id for job in jobs)
