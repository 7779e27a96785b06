"""Stories of images: so many lines for each deployment, and so many in all."""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, delete, insert, select
from sqlalchemy.orm import Session

from plexrl_slurm.db.models import ImageMoveRow
from plexrl_slurm.db.upsert import table_of

MOVES: Final = table_of(ImageMoveRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMove:
    """One line of a story."""

    deployment: str
    at_us: int
    #: A node, or the durable tier.
    place: str
    #: Which tiers it is in there.
    text: str


def add_move(session: Session, partition: str, move: ImageMove, *, keep: int) -> None:
    """Write a line; of the deployment's the newest ``keep`` stay."""
    session.execute(
        insert(MOVES).values(
            partition=partition,
            deployment=move.deployment,
            at_us=move.at_us,
            place=move.place,
            text=move.text,
        )
    )
    mine = (MOVES.c.partition == partition) & (MOVES.c.deployment == move.deployment)
    _keep(session, mine, keep)


def read_moves(session: Session, partition: str, *, keep: int) -> list[ImageMove]:
    """All lines of a partition, oldest first; only the newest ``keep`` stay."""
    mine = MOVES.c.partition == partition
    _keep(session, mine, keep)
    rows = session.execute(select(MOVES).where(mine).order_by(MOVES.c.id))
    return [
        ImageMove(deployment=row.deployment, at_us=row.at_us, place=row.place, text=row.text)
        for row in rows
    ]


def _keep(session: Session, mine: ColumnElement[bool], keep: int) -> None:
    last = select(MOVES.c.id).where(mine).order_by(MOVES.c.id.desc()).offset(keep).limit(1)
    session.execute(delete(MOVES).where(mine, MOVES.c.id <= last.scalar_subquery()))
