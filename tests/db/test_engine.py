"""What goes wrong with a database is one sentence with a remedy."""

import sqlite3
import stat
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from plexrl_slurm.core.errors import DatabaseUnavailable
from plexrl_slurm.core.ids import DeploymentId, JobId
from plexrl_slurm.db import calls
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.schema import upgrade
from tests.db.builders import make_call


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        pytest.param("garbage", "this is no database URL: write sqlite:///", id="no URL"),
        pytest.param("", "this is no database URL", id="empty"),
        pytest.param("sqlite://", "in memory is lost with its process", id="in memory"),
        pytest.param("mysql://u:secret@h/d", "'mysql' is not supported: write", id="foreign"),
        pytest.param("postgresql://u:secret@h:port/d", "no database URL", id="port no number"),
        pytest.param("sqlite:////no/such/folder/x.db", "no folder /no/such/folder", id="folder"),
        pytest.param("sqlite:////tmp", "it is a folder", id="a folder itself"),
        pytest.param(
            "postgresql://u:secret@127.0.0.1:1/d", "does not answer; start it", id="nobody there"
        ),
        pytest.param(
            "postgresql://u:secret@no-such-host.invalid/d", "host is not known", id="no such host"
        ),
    ],
)
def test_an_unusable_url_says_what_to_write(url: str, sentence: str) -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        open_database(url, patience_us=2_000_000)
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello " * 1000)
    with pytest.raises(DatabaseUnavailable, match="not an SQLite database; name another file"):
        open_database(f"sqlite:///{path}")


def test_a_damaged_file_is_reported_with_the_rescue(tmp_path: Path) -> None:
    path = tmp_path / "plexrl.db"
    engine = open_database(f"sqlite:///{path}")
    upgrade(engine)
    engine.dispose()
    sqlite3.connect(path).execute("PRAGMA wal_checkpoint(TRUNCATE)").connection.close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(DatabaseUnavailable, match=r"the file is damaged; .*\.recover"):
        open_database(f"sqlite:///{path}")


def test_a_locked_file_is_waited_for_and_then_reported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/plexrl.db"
    engine = open_database(url, patience_us=100_000)
    upgrade(engine)
    holder = sqlite3.connect(tmp_path / "plexrl.db")
    holder.execute("BEGIN IMMEDIATE")
    with (
        pytest.raises(DatabaseUnavailable, match=r"kept it locked for 0\.1 s"),
        transaction(engine) as session,
    ):
        session.execute(text("SELECT 1"))
    with transaction(engine, read_only=True) as session:  # readers do not wait for a writer
        assert session.execute(text("SELECT count(*) FROM jobs")).scalar_one() == 0
    holder.close()
    engine.dispose()


def test_sqlite_runs_with_our_settings(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/plexrl.db")
    with engine.connect() as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    engine.dispose()
    assert found == ["wal", 1, 1, 10_000]


@pytest.mark.postgres
def test_nobody_else_may_read_an_sqlite_file_or_what_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    for left_readable in (False, True):
        if left_readable:  # by an older version
            path.chmod(0o644)
        engine = open_database(f"sqlite:///{path}")
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE t{left_readable} (x INTEGER)"))
            files = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
        wanted = 0o640 if left_readable else 0o600
        assert files["p.sqlite"] == wanted
        assert {"p.sqlite", "p.sqlite-shm", "p.sqlite-wal"} == set(files)
        assert not any(mode & 0o007 for mode in files.values())
        engine.dispose()


def test_who_only_reads_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    open_database(f"sqlite:///{path}").dispose()
    path.chmod(0o644)
    open_database(f"sqlite:///{path}", read_only=True).dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_missing_database_names_the_program_that_makes_it(postgres_server: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="createdb") as caught:
        open_database(f"{postgres_server}/nowhere")
    assert caught.value.url.endswith("/nowhere")


def test_a_violated_constraint_stays_a_fault_of_the_caller(database_url: str) -> None:
    engine = open_database(database_url)
    upgrade(engine)
    orphan = make_call(JobId(1), DeploymentId("nobody"))
    with pytest.raises(IntegrityError), transaction(engine) as session:
        calls.record_call(session, orphan, now_us=0)
    with transaction(engine) as session:
        assert calls.waiting_calls(session) == []
    engine.dispose()
