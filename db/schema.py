"""Creates, upgrades and checks the schema. Migrations are the only way tables change."""

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine

from plexrl_slurm.core.errors import DatabaseUnavailable
from plexrl_slurm.db.engine import database_errors, shown

#: Any number, but the same in every version: the advisory lock of whoever migrates.
_LOCK = 0x706C6578


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to ``revision``; of several processes at once one does it."""
    with _migrating(engine) as connection:
        _refuse_newer(engine, connection)
        command.upgrade(make_config(connection), revision)


def downgrade(engine: Engine, revision: str) -> None:
    """Bring the schema back to ``revision`` (``base``: no tables); for admins and tests."""
    with _migrating(engine) as connection:
        _refuse_newer(engine, connection)
        command.downgrade(make_config(connection), revision)


def check(engine: Engine) -> None:
    """Refuse a schema that is not exactly this version's. Called when a daemon starts."""
    with database_errors(engine), engine.connect() as connection:
        connection = connection.execution_options(plexrl_read_only=True)
        _refuse_newer(engine, connection)
        found = MigrationContext.configure(connection).get_current_heads()
        wanted = _scripts().get_heads()
    if set(found) != set(wanted):
        at = f"at revision {', '.join(found)}" if found else "without our tables"
        raise DatabaseUnavailable(
            shown(engine.url),
            f"it is {at} and this version needs {', '.join(wanted)}; back it up, then run "
            f"`plexrl partition up`, which upgrades it",
        )


def make_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, for a transaction that the caller has begun."""
    config = Config()
    config.set_main_option("script_location", "plexrl_slurm.db:migrations")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def is_compared(item: object, name: str | None, *_: object) -> bool:
    """Whether Alembic compares it with the models: it cannot read a descending index."""
    return name != "ix_jobs_claim"


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(make_config())


def _refuse_newer(engine: Engine, connection: Connection) -> None:
    known = {script.revision for script in _scripts().walk_revisions()}
    for found in MigrationContext.configure(connection).get_current_heads():
        if found not in known:
            raise DatabaseUnavailable(
                shown(engine.url),
                f"it was migrated by a newer version (rev {found}); upgrade plexrl-slurm",
            )


@contextmanager
def _migrating(engine: Engine) -> Iterator[Connection]:
    """One transaction that holds the writer lock (SQLite) or an advisory lock (PostgreSQL)."""
    sqlite = engine.dialect.name == "sqlite"
    with database_errors(engine), engine.connect() as connection:
        raw = connection.connection.driver_connection
        if sqlite and raw is not None:
            # A migration that rebuilds a table drops the old one while others refer to it.
            # The pragma does nothing inside a transaction, so it is set before.
            raw.execute("PRAGMA foreign_keys = OFF")
        try:
            with connection.begin():
                if not sqlite:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
                yield connection
                if sqlite:
                    _refuse_orphans(engine, connection)
        finally:
            if sqlite and raw is not None:
                raw.execute("PRAGMA foreign_keys = ON")


def _refuse_orphans(engine: Engine, connection: Connection) -> None:
    orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
    if orphan is not None:
        raise DatabaseUnavailable(
            shown(engine.url),
            f"a row of {orphan[0]} would refer to a missing row of {orphan[2]}, so nothing was "
            f"migrated; repair the row or restore a backup",
        )
