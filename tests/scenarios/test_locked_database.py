"""Another program keeps the database locked: whoever only asks is answered all the same."""

import gc
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.conftest import SLOW, SLOW_SAMPLES
from tests.scenarios.partition import Partition, running, wait_until
from tests.scenarios.test_fair_share import Waiting, plexrl

#: The SDK's sockets close when its event loop ends with the process.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def partition(tmp_path: Path, model: Path) -> Iterator[Partition]:
    tables = "\n[limits.users]\nmax_jobs = 1\n"
    with running(tmp_path, model=model, train=SLOW, rollout=SLOW_SAMPLES, tables=tables) as one:
        yield one
    gc.collect()  # while the warnings of the SDK's sockets are for nobody


def test_people_are_answered_while_nothing_can_be_written(partition: Partition) -> None:
    first, second = Waiting(partition, "a"), Waiting(partition, "a")
    wait_until(lambda: first.state() == "running", name="the first job to run")
    words = "AssocMaxJobsLimit"
    wait_until(lambda: words in plexrl(partition, "squeue").stdout, name="why the second waits")
    asked = (
        ("squeue",),
        ("sinfo",),
        ("sprio",),
        ("sacct",),
        ("show", "job", first.slurm_id),
        ("explain", second.slurm_id),
        ("squeue", "--start"),
        ("sreport", "usage"),
    )
    file = partition.database_url.removeprefix("sqlite:///")
    lock = sqlite3.connect(file, isolation_level=None, timeout=30)
    try:
        lock.execute("BEGIN IMMEDIATE")
        for command in asked:
            done = plexrl(partition, *command)
            assert done.exit_code == 0, (command, done.output)
            assert second.slurm_id in done.stdout or command[0] in ("sinfo", "show"), command
        assert "max_jobs is 1" in plexrl(partition, "explain", second.slurm_id).stdout
        told = "trouble: no job is admitted or ended now: database "
        wait_until(lambda: told in plexrl(partition, "sinfo").stdout, name="sinfo to tell it")
    finally:
        lock.close()
    wait_until(lambda: "trouble" not in plexrl(partition, "sinfo").stdout, name="its end")
    first.cancel()
    wait_until(lambda: second.state() == "running", name="the second job to run")
    assert partition.flaws() == []
