"""The same tests on both databases."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.schema import upgrade
from tests.db.postgres import find_programs, running_server

_numbers = count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    programs = find_programs()
    if programs is None:
        if "postgres" in os.environ.get("PLEXRL_TESTS_MUST_RUN", "").split(","):
            pytest.fail("PostgreSQL's server programs are promised but not installed")
        pytest.skip("PostgreSQL's server programs are not installed")
    with running_server(programs) as prefix:
        yield prefix


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database on each of the two."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/plexrl.db"
        return
    prefix: str = request.getfixturevalue("postgres_server")
    name = f"test_{next(_numbers)}"
    with ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(f"{prefix}/postgres", autocommit=True))
        admin.execute(f"CREATE DATABASE {name}")
        stack.callback(admin.execute, f"DROP DATABASE {name} WITH (FORCE)")
        yield f"{prefix}/{name}"


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A database with the newest schema."""
    engine = open_database(database_url)
    upgrade(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with transaction(engine) as session:
        yield session
