"""The border to SQLAlchemy: opens databases, begins transactions, translates their errors.

Everything foreign that goes wrong with the database itself becomes ``DatabaseUnavailable``
here, with what to do; a violated constraint is a fault of the caller and passes unchanged.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session as Session

from plexrl_slurm.core.errors import DatabaseUnavailable

#: How long a writer waits for another one before it gives up.
PATIENCE_US = 10_000_000

_FORMS = (
    "write sqlite:////absolute/path/of/a/file.db or postgresql://user@host:5432/database "
    "in [partition] database_url"
)
#: PostgreSQL's words for "rolled back, try again": serialization failure, deadlock, lock timeout.
_AGAIN = frozenset({"40001", "40P01", "55P03"})
#: What a driver says (lower case) and what we say.
_REMEDIES = (
    ("database is locked", "another program has kept it locked for {seconds:g} s; end that "
     "program (`fuser FILE` names it) or try again"),
    ("file is not a database", "the file is not an SQLite database; name another file in "
     "[partition] database_url, or move this one away"),
    ("malformed", "the file is damaged; stop the daemon, then rescue what can be read with "
     "`sqlite3 FILE .recover | sqlite3 NEW` or restore a backup"),
    ("readonly database", "it cannot be written by this user; correct the file's owner and mode "
     "(and its folder's: SQLite keeps two more files beside it)"),
    ("unable to open database file", "the file cannot be opened; make its folder, or correct "
     "the permissions"),
    ("disk is full", "the file system is full; free space there, then try again"),
    ("disk i/o error", "the disk reports an I/O error; check the file system and its quota"),
    ("password authentication failed", "the server refuses the password; correct it in "
     "database_url or ~/.pgpass"),
    ("no password supplied", "the server wants a password; put it into ~/.pgpass or database_url"),
    ("does not exist", "the server has no such database or role; create it with "
     "`createdb`/`createuser`, or correct database_url"),
    ("too many clients", "the server has no free connection; raise max_connections or end others"),
    ("could not translate host name", "the host is not known; correct it in database_url"),
    ("failed to resolve", "the host is not known; correct it in database_url"),
    ("connection", "the server does not answer; start it, or correct host and port in "
     "database_url"),
)  # fmt: skip


def open_database(url: str, *, patience_us: int = PATIENCE_US, read_only: bool = False) -> Engine:
    """Connect to ``url`` once, and return the engine. Called by daemons, the CLI and tests.

    ``read_only``: it is not waited for that somebody else's writing ends.
    """
    parsed = _parse(url)
    if _is_sqlite(parsed):
        engine = _sqlite(parsed, patience_us, private=not read_only)
    else:
        engine = _postgres(parsed, patience_us)
    try:
        with database_errors(engine), engine.connect() as connection:
            asked = connection.execution_options(plexrl_read_only=read_only)
            asked.exec_driver_sql("SELECT 1")
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def transaction(engine: Engine, *, read_only: bool = False) -> Iterator[Session]:
    """One transaction for callers that may block (CLI, tests). The daemon uses ``Store``."""
    with database_errors(engine), engine.connect() as connection:
        if read_only:
            connection = connection.execution_options(plexrl_read_only=True)
        with connection.begin(), make_session(connection) as session:
            yield session
            session.flush()


def make_session(connection: Connection) -> Session:
    """A session whose rows keep their values after the end of the transaction."""
    return Session(connection, expire_on_commit=False, join_transaction_mode="rollback_only")


@contextmanager
def database_errors(engine: Engine) -> Iterator[None]:
    """Turn what the driver raises about the database itself into ``DatabaseUnavailable``."""
    try:
        yield
    except DBAPIError as error:
        reason = unavailable_reason(error, patience_us=engine_patience_us(engine))
        if reason is None:
            raise
        raise DatabaseUnavailable(shown(engine.url), reason) from error


def unavailable_reason(error: DBAPIError, *, patience_us: int = PATIENCE_US) -> str | None:
    """What to tell a person, or ``None`` if the statement rather than the database is at fault."""
    if type(error).__name__ in ("IntegrityError", "ProgrammingError", "DataError"):
        return None
    said = " ".join(str(error.orig).split())
    for words, remedy in _REMEDIES:
        if words in said.lower():
            return remedy.format(seconds=patience_us / 1e6)
    ours = transient(error) or is_lost(error) or type(error.orig).__module__.startswith("psycopg")
    return f"it refuses the work now: {said}; try again" if ours else None


def transient(error: DBAPIError) -> bool:
    """Whether the transaction was surely rolled back and may simply run again."""
    if getattr(error.orig, "sqlstate", None) in _AGAIN:
        return True
    said = str(error.orig)
    return "database is locked" in said or "database table is locked" in said


def is_lost(error: DBAPIError) -> bool:
    """Whether the connection is gone: before a commit, the transaction with it."""
    return error.connection_invalidated


def engine_patience_us(engine: Engine) -> int:
    """The patience the engine was opened with."""
    patience = engine.get_execution_options().get("plexrl_patience_us", PATIENCE_US)
    return int(patience)


def shown(url: URL) -> str:
    """The URL for messages and logs, without the password."""
    plain = url.set(drivername=url.get_backend_name(), password=None, query={})
    return plain.render_as_string()


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        port_is_number = parsed.port
    except (ArgumentError, ValueError) as error:
        safe = re.sub(r"//[^@/]*@", "//...@", url)
        raise DatabaseUnavailable(safe, f"this is no database URL: {_FORMS}") from error
    del port_is_number
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite":
        parsed = parsed.set(drivername="sqlite+pysqlite")
    if parsed.drivername not in ("sqlite+pysqlite", "postgresql+psycopg"):
        raise DatabaseUnavailable(
            shown(parsed), f"{parsed.drivername!r} is not supported: {_FORMS}"
        )
    return parsed


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _sqlite(url: URL, patience_us: int, *, private: bool) -> Engine:
    if not url.database or url.database == ":memory:":
        raise DatabaseUnavailable(
            shown(url), f"a database in memory is lost with its process: {_FORMS}"
        )
    path = Path(url.database)
    if path.is_dir() or not path.parent.is_dir():
        wrong = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise DatabaseUnavailable(shown(url), f"{wrong}; make the folder, or name another file")
    if private:
        _keep_private(path)
    engine = create_engine(
        url,
        execution_options={"plexrl_patience_us": patience_us},
        connect_args={"timeout": patience_us / 1e6},
        pool_reset_on_return=None,
    )

    @event.listens_for(engine, "connect")
    def _set_up(dbapi: Any, _record: Any) -> None:
        dbapi.isolation_level = None  # we begin transactions ourselves, below
        cursor = dbapi.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {patience_us // 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # The writer lock is taken at once: a transaction that reads first and writes later
        # could not wait for it, SQLite would fail it instead.
        read_only = connection.get_execution_options().get("plexrl_read_only")
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _keep_private(path: Path) -> None:
    """Everybody's jobs are in the file: whoever else may enter its folder must not read it.

    What SQLite lays beside it later gets the file's own mode.
    """
    with suppress(OSError):  # opening it says what is wrong
        if not path.exists():  # to close one that is in use would drop this process's locks on it
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
            if each.exists() and (found := each.stat()).st_uid == os.geteuid():
                each.chmod(found.st_mode & 0o770)


def _postgres(url: URL, patience_us: int) -> Engine:
    try:
        return create_engine(
            url,
            execution_options={"plexrl_patience_us": patience_us},
            connect_args={
                "connect_timeout": max(2, patience_us // 1_000_000),
                "options": f"-c lock_timeout={patience_us // 1000}",
            },
            pool_pre_ping=True,
        )
    except (ImportError, NoSuchModuleError) as error:
        raise DatabaseUnavailable(
            shown(url), "its driver is missing; `pip install 'plexrl-slurm[postgres]'`"
        ) from error
