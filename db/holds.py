"""Holds and their WPGs: whose GPUs are kept, since when, until when."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.core.ids import SlurmId, WpgId
from plexrl_slurm.core.messages import Wpg
from plexrl_slurm.db.models import HoldRow, HoldState, NodeFaultRow, PartitionRow, WpgRow
from plexrl_slurm.db.upsert import table_of

HOLDS, WPGS = table_of(HoldRow), table_of(WpgRow)
FAULTS, PARTITIONS = table_of(NodeFaultRow), table_of(PartitionRow)


def open_hold(
    session: Session,
    *,
    hold_id: str,
    partition: str,
    backend: str,
    slurm_id: SlurmId,
    epoch: str,
    now_us: int,
    replaces: str = "",
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
        "replaces": replaces,
        "draining": False,
        "reason": "",
        "batch_node": "",
    }
    session.execute(insert(HOLDS), values)


def hold_runs(session: Session, hold_id: str, *, since_us: int, batch_node: str = "") -> None:
    """Slurm gave it its nodes."""
    values = {"running_us": since_us, "batch_node": batch_node, "reason": ""}
    _change(session, hold_id, state=HoldState.UP, **values)


def hold_waits(session: Session, hold_id: str, *, reason: str, now_us: int) -> None:
    """Slurm has put it back into its queue: it has no nodes, and its WPGs are gone."""
    values = {"running_us": None, "draining": False, "reason": reason}
    _change(session, hold_id, state=HoldState.WAITING, **values)
    _release_all(session, hold_id, now_us)


def set_draining(session: Session, hold_id: str, *, on: bool, reason: str) -> None:
    """It is being given back, or it is wanted again."""
    _change(session, hold_id, draining=on, reason=reason)


def node_failed(session: Session, *, partition: str, node: str, reason: str, now_us: int) -> None:
    """Note a fault of a held node."""
    values = {"partition": partition, "node": node, "at_us": now_us, "reason": reason}
    session.execute(insert(FAULTS), values)


def node_faults(session: Session, *, partition: str, since_us: int) -> list[NodeFaultRow]:
    """Faults of held nodes, oldest first."""
    asked = select(NodeFaultRow).where(
        NodeFaultRow.partition == partition, NodeFaultRow.at_us >= since_us
    )
    return list(session.scalars(asked.order_by(NodeFaultRow.id)))


def set_partition_draining(session: Session, name: str, *, on: bool) -> None:
    """Remember what an admin said of the partition."""
    change = update(PARTITIONS).where(PARTITIONS.c.name == name).values(draining=on)
    if session.execute(change.returning(PARTITIONS.c.name)).first() is None:
        session.execute(insert(PARTITIONS), {"name": name, "draining": on})


def partition_draining(session: Session, name: str) -> bool:
    """What an admin said of the partition last."""
    asked = select(PARTITIONS.c.draining).where(PARTITIONS.c.name == name)
    return bool(session.execute(asked).scalar_one_or_none())


def newest_epoch(session: Session, partition: str) -> int:
    """What the agents of the live holds obey; 0 if there are none."""
    return max((int(row.epoch) for row in live_holds(session, partition)), default=0)


def set_hold_epoch(session: Session, hold_id: str, epoch: str) -> None:
    """Fence off agents of the former epoch."""
    _change(session, hold_id, epoch=epoch)


def end_hold(session: Session, hold_id: str, *, now_us: int) -> None:
    """The hold is over; WPGs that it still had are released at the same instant."""
    _change(session, hold_id, state=HoldState.ENDED, ended_us=now_us)
    _release_all(session, hold_id, now_us)


def _release_all(session: Session, hold_id: str, now_us: int) -> None:
    release = update(WPGS).where(WPGS.c.hold_id == hold_id, WPGS.c.released_us.is_(None))
    session.execute(release.values(released_us=now_us))


def next_hold_id(session: Session) -> str:
    """``h1``, ``h2``, ...: one more than any hold of this database has had."""
    names = session.scalars(select(HOLDS.c.id))
    numbers = [int(name[1:]) for name in names if name[1:].isdigit() and len(name) < 12]
    return f"h{max(numbers, default=0) + 1}"


def get_hold(session: Session, hold_id: str) -> HoldRow:
    """The row; ``NotFound`` if there is none."""
    asked = select(HoldRow).where(HoldRow.id == hold_id)
    row = session.scalars(asked.execution_options(populate_existing=True)).one_or_none()
    if row is None:
        raise NotFound("hold", hold_id)
    return row


def live_holds(session: Session, partition: str) -> list[HoldRow]:
    """Holds that have not ended. Called when a daemon starts."""
    asked = select(HoldRow).where(HoldRow.partition == partition, HoldRow.state != HoldState.ENDED)
    fresh = asked.order_by(HoldRow.started_us, HoldRow.id)
    return list(session.scalars(fresh.execution_options(populate_existing=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A WPG that a hold has from now on."""

    wpg: Wpg
    held_us: int
    component: int = 0
    node: str = "localhost"
    #: "": as the WPG itself.
    slot: str = ""


def hold_wpgs(session: Session, hold_id: str, stays: Iterable[Stay]) -> None:
    """Begin the stay of WPGs: their books start at ``held_us``."""
    rows = [
        {
            "hold_id": hold_id,
            "name": stay.wpg.id,
            "pool": stay.wpg.pool,
            "gpus": stay.wpg.gpus,
            "component": stay.component,
            "node": stay.node,
            "slot": stay.slot or stay.wpg.id,
            "held_us": stay.held_us,
        }
        for stay in stays
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


def last_release(session: Session, hold_id: str) -> int:
    """Up to when the WPGs that the hold has no more are booked; 0 if it has had none."""
    asked = select(func.max(WPGS.c.released_us)).where(WPGS.c.hold_id == hold_id)
    return int(session.execute(asked).scalar_one_or_none() or 0)


def held_wpgs(session: Session, hold_id: str) -> list[WpgRow]:
    """WPGs that the hold has now."""
    asked = select(WpgRow).where(WpgRow.hold_id == hold_id, WpgRow.released_us.is_(None))
    fresh = asked.order_by(WpgRow.id).execution_options(populate_existing=True)
    return list(session.scalars(fresh))


def slots_of(session: Session, hold_id: str) -> set[str]:
    """Slots of all WPGs that the hold has now, or has had."""
    return set(session.scalars(select(WpgRow.slot).where(WpgRow.hold_id == hold_id)))


def _change(session: Session, hold_id: str, **values: object) -> None:
    change = update(HOLDS).where(HOLDS.c.id == hold_id).values(**values).returning(HOLDS.c.id)
    if session.execute(change).first() is None:
        raise NotFound("hold", hold_id)
