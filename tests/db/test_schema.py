"""Migrations: they lead to the models, stand concurrency, and refuse foreign revisions."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import DBAPIError

from plexrl_slurm.core.errors import DatabaseUnavailable
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.models import Base
from plexrl_slurm.db.schema import check, downgrade, is_compared, upgrade
from tests.db.builders import add_hold, charge


def test_migrations_lead_to_the_models(engine: Engine) -> None:
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": is_compared})
        found = compare_metadata(context, Base.metadata)
    assert found == []


def test_every_index_of_the_models_is_made(engine: Engine) -> None:
    asked = {str(index.name) for table in Base.metadata.tables.values() for index in table.indexes}
    tables = inspect(engine).get_multi_indexes().values()
    found = {str(index["name"]) for indexes in tables for index in indexes}
    assert asked <= found and "ix_jobs_claim" in asked


def test_a_downgrade_to_base_leaves_nothing_and_an_upgrade_comes_back(engine: Engine) -> None:
    downgrade(engine, "base")
    assert inspect(engine).get_table_names() == ["alembic_version"]
    upgrade(engine)
    check(engine)


def test_two_upgrades_at_once_are_one(database_url: str) -> None:
    engines = [open_database(database_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upgrade, engines))
    check(engines[0])
    for engine in engines:
        engine.dispose()


def test_a_newer_schema_is_refused_with_its_revision(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    sentence = r"migrated by a newer version \(rev 9999\); upgrade plexrl-slurm"
    with pytest.raises(DatabaseUnavailable, match=sentence):
        check(engine)
    with pytest.raises(DatabaseUnavailable, match=sentence):
        upgrade(engine)


def test_a_schema_without_our_tables_is_refused_with_the_remedy(database_url: str) -> None:
    engine = open_database(database_url)
    with pytest.raises(DatabaseUnavailable, match=r"without our tables .* needs 0...; back it up"):
        check(engine)
    engine.dispose()


def test_a_failed_migration_changes_nothing(database_url: str) -> None:
    engine = open_database(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE wpgs (id INTEGER)"))
    with pytest.raises(DBAPIError, match="wpgs"):
        upgrade(engine)
    assert set(inspect(engine).get_table_names()) <= {"wpgs"}
    engine.dispose()


@pytest.mark.parametrize("change", ["UPDATE ledger SET gpu_us = 0", "DELETE FROM ledger"])
def test_the_ledger_cannot_be_rewritten(engine: Engine, change: str) -> None:
    with transaction(engine) as session:
        add_hold(session)
        charge(session, 0, 10)
    with pytest.raises(DBAPIError, match="append-only"), transaction(engine) as session:
        session.execute(text(change))
