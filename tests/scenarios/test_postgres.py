"""The same partition on a site's database, which goes away for a moment."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.db.postgres import find_programs, running_server
from tests.scenarios.controller import train
from tests.scenarios.partition import Job, kill, running, wait_until

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    programs = find_programs()
    assert programs is not None, "PostgreSQL's server programs are not installed"
    with running_server(programs) as prefix:
        yield prefix


def _new_database(server: str, name: str) -> str:
    with psycopg.connect(f"{server}/postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    return f"{server}/{name}"


def test_kills_and_lost_connections_change_nothing_on_postgres(
    server: str, tmp_path: Path, model: Path
) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "wild").mkdir()
    url = _new_database(server, "calm")
    with running(tmp_path / "calm", model=model, database_url=url) as partition:
        calm = train(Job(partition, seed=7, models=["tiny"]))
    url = _new_database(server, "wild")
    with running(tmp_path / "wild", model=model, database_url=url) as partition:
        job = Job(partition, seed=7, models=["tiny"])

        def cut() -> None:
            for _ in range(3):
                with psycopg.connect(f"{server}/postgres", autocommit=True) as admin:
                    admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = 'wild'"
                    )
                time.sleep(0.1)

        def between(step: int) -> None:
            if step == 1:
                threading.Thread(target=cut).start()
            if step == 2:
                kill(partition.rank_pid("train-0"))
            if step == 103:
                partition.kill_daemon()
                partition.start()

        assert train(job, between=between) == calm
        job.cancel()
        wait_until(lambda: job.row()["state"] == "cancelled", name="the job to end")
        partition.stop_daemon()
        assert partition.flaws() == []
        assert partition.query("select count(*) from jobs where billed") == [(1,)]
