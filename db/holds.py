"""Holds and their WPGs: whose GPUs are kept, since when, until when."""

from collections.abc import Iterable

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.core.ids import SlurmId, WpgId
from plexrl_slurm.core.messages import Wpg
from plexrl_slurm.db.models import HoldRow, HoldState, WpgRow
from plexrl_slurm.db.upsert import table_of

HOLDS, WPGS = table_of(HoldRow), table_of(WpgRow)


def open_hold(
    session: Session,
    *,
    hold_id: str,
    partition: str,
    backend: str,
    slurm_id: SlurmId,
    epoch: str,
    now_us: int,
) -> None:
    """A hold was submitted. Called by the daemon before its agents can dial in."""
    values = {
        "id": hold_id,
        "partition": partition,
        "backend": backend,
        "slurm_id": slurm_id,
        "state": HoldState.WAITING,
        "epoch": epoch,
        "started_us": now_us,
    }
    session.execute(insert(HOLDS), values)


def set_hold_state(session: Session, hold_id: str, state: HoldState) -> None:
    """Slurm says something new about the hold."""
    _change(session, hold_id, state=state)


def set_hold_epoch(session: Session, hold_id: str, epoch: str) -> None:
    """Fence off agents of the former epoch."""
    _change(session, hold_id, epoch=epoch)


def end_hold(session: Session, hold_id: str, *, now_us: int) -> None:
    """The hold is over; WPGs that it still had are released at the same instant."""
    _change(session, hold_id, state=HoldState.ENDED, ended_us=now_us)
    release = update(WPGS).where(WPGS.c.hold_id == hold_id, WPGS.c.released_us.is_(None))
    session.execute(release.values(released_us=now_us))


def live_holds(session: Session, partition: str) -> list[HoldRow]:
    """Holds that have not ended. Called when a daemon starts."""
    asked = select(HoldRow).where(HoldRow.partition == partition, HoldRow.state != HoldState.ENDED)
    fresh = asked.order_by(HoldRow.started_us, HoldRow.id)
    return list(session.scalars(fresh.execution_options(populate_existing=True)))


def hold_wpgs(session: Session, hold_id: str, wpgs: Iterable[Wpg], *, now_us: int) -> None:
    """Begin the stay of WPGs: their books start at ``now_us``."""
    rows = [
        {"hold_id": hold_id, "name": wpg.id, "pool": wpg.pool, "gpus": wpg.gpus, "held_us": now_us}
        for wpg in wpgs
    ]
    if rows:
        session.execute(insert(WPGS), rows)


def release_wpg(session: Session, hold_id: str, wpg: WpgId, *, now_us: int) -> None:
    """End the stay of a WPG; its last ledger row has to end at ``now_us``."""
    release = (
        update(WPGS)
        .where(WPGS.c.hold_id == hold_id, WPGS.c.name == wpg, WPGS.c.released_us.is_(None))
        .values(released_us=now_us)
        .returning(WPGS.c.id)
    )
    if session.execute(release).first() is None:
        raise NotFound("held WPG", wpg)


def held_wpgs(session: Session, hold_id: str) -> list[WpgRow]:
    """WPGs that the hold has now."""
    asked = select(WpgRow).where(WpgRow.hold_id == hold_id, WpgRow.released_us.is_(None))
    fresh = asked.order_by(WpgRow.id).execution_options(populate_existing=True)
    return list(session.scalars(fresh))


def _change(session: Session, hold_id: str, **values: object) -> None:
    change = update(HOLDS).where(HOLDS.c.id == hold_id).values(**values).returning(HOLDS.c.id)
    if session.execute(change).first() is None:
        raise NotFound("hold", hold_id)
