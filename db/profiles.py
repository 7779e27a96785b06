"""What jobs have been like: read when a daemon starts, written as it learns."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from plexrl_slurm.db.models import ProfileRow
from plexrl_slurm.db.upsert import table_of

PROFILES = table_of(ProfileRow)

#: Rows of one partition that a daemon reads: the newest.
MOST = 10_000


def newest(session: Session, *, partition: str) -> list[ProfileRow]:
    """The newest rows of a partition, oldest first. Called when a daemon starts."""
    asked = (
        select(ProfileRow)
        .where(ProfileRow.partition == partition)
        .order_by(ProfileRow.updated_us.desc(), ProfileRow.id.desc())
        .limit(MOST)
    )
    return list(session.scalars(asked))[::-1]


def save(
    session: Session,
    *,
    partition: str,
    user: str,
    name: str,
    model: str,
    gpus: int,
    learned: Mapping[str, Any],
    run_steps: int,
    run_us: int,
    now_us: int,
) -> None:
    """Write what is known of such jobs now; a partition has one daemon, so nobody else does."""
    key = {"partition": partition, "user": user, "name": name, "model": model, "gpus": gpus}
    values = {
        "learned": dict(learned),
        "run_steps": run_steps,
        "run_us": run_us,
        "updated_us": now_us,
    }
    which = [PROFILES.c[column] == value for column, value in key.items()]
    changed = update(PROFILES).where(*which).values(**values).returning(PROFILES.c.id)
    if session.execute(changed).first() is None:
        session.execute(insert(PROFILES), {**key, **values})
