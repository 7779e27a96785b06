"""Insert a row unless its key is taken: the one statement that makes repeats harmless."""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from sqlalchemy import Executable, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from plexrl_slurm.db.models import Base


def table_of(row: type[Base]) -> Table:
    """The table behind a model, for statements on the hot path (they skip the ORM)."""
    return cast(Table, row.__table__)


def insert_once(session: Session, table: Table, values: Mapping[str, Any], *key: str) -> bool:
    """Insert ``values``; false if a row with the same ``key`` columns was there already."""
    statement = _statement(session.get_bind().dialect.name, table, key)
    return session.execute(statement, values).first() is not None


@cache
def _statement(dialect: str, table: Table, key: tuple[str, ...]) -> Executable:
    make = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return make(table).on_conflict_do_nothing(index_elements=key).returning(table.c.id)
