"""Snapshots, and the sampling sessions that pin them. Repeats give the first row."""

from sqlalchemy import ColumnElement, Select, exists, insert, select, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.core.ids import DeploymentId, JobId, WpgId
from plexrl_slurm.db.models import SamplingSessionRow, SnapshotRow, SnapshotState
from plexrl_slurm.db.upsert import insert_once, table_of

SNAPSHOTS, SAMPLERS = table_of(SnapshotRow), table_of(SamplingSessionRow)
_ALIVE = (SnapshotState.WAITING, SnapshotState.READY)


def create_snapshot(
    session: Session,
    *,
    snapshot_id: DeploymentId,
    job_id: JobId,
    deployment_id: DeploymentId | None,
    base_model: str,
    seq: int,
    wpg: WpgId,
    uri: str | None,
    path: str,
    content: str,
    bytes: int,
    ready: bool,
    now_us: int,
) -> None:
    """A snapshot that will be published, or (``ready``) weights that are on disk already."""
    values = {
        "id": snapshot_id,
        "job_id": job_id,
        "deployment_id": deployment_id,
        "base_model": base_model,
        "seq": seq,
        "wpg": wpg,
        "uri": uri,
        "path": path,
        "content": content,
        "state": SnapshotState.READY if ready else SnapshotState.WAITING,
        "bytes": bytes,
        "created_us": now_us,
        "ready_us": now_us if ready else None,
    }
    session.execute(insert(SNAPSHOTS), values)


def snapshot_ready(
    session: Session,
    snapshot_id: DeploymentId,
    *,
    bytes: int,
    now_us: int,
    content: str | None = None,
) -> None:
    """Its file is complete, and it is known what the weights are.

    Called in the transaction that ends the publishing call.
    """
    known = {} if content is None else {"content": content}
    _change(session, snapshot_id, state=SnapshotState.READY, bytes=bytes, ready_us=now_us, **known)


def snapshot_failed(session: Session, snapshot_id: DeploymentId) -> None:
    """Its publishing call failed."""
    _change(session, snapshot_id, state=SnapshotState.FAILED)


def drop_snapshot(session: Session, snapshot_id: DeploymentId) -> None:
    """Its bytes are gone."""
    _change(session, snapshot_id, state=SnapshotState.DROPPED)


def moved(session: Session, snapshot_id: DeploymentId, *, wpg: WpgId) -> None:
    """It is sampled on another WPG."""
    _change(session, snapshot_id, wpg=wpg)


def get_snapshot(session: Session, snapshot_id: DeploymentId) -> SnapshotRow:
    """The row; ``NotFound`` if there is none."""
    row = session.scalars(_fresh(SnapshotRow.id == snapshot_id)).one_or_none()
    if row is None:
        raise NotFound("snapshot", snapshot_id)
    return row


def snapshot_by_uri(session: Session, uri: str) -> SnapshotRow | None:
    """The newest living snapshot of that name."""
    asked = _fresh(SnapshotRow.uri == uri, SnapshotRow.state.in_(_ALIVE))
    newest = asked.order_by(SnapshotRow.created_us.desc(), SnapshotRow.id.desc()).limit(1)
    return session.scalars(newest).one_or_none()


def live_snapshots(session: Session, job_id: JobId | None = None) -> list[SnapshotRow]:
    """Snapshots that can be sampled, now or soon, of one job or of all."""
    asked = _fresh(SnapshotRow.state.in_(_ALIVE))
    if job_id is not None:
        asked = asked.where(SnapshotRow.job_id == job_id)
    return list(session.scalars(asked.order_by(SnapshotRow.created_us, SnapshotRow.id)))


def unpinned_snapshots(session: Session, *, before_us: int) -> list[SnapshotRow]:
    """Ephemeral snapshots older than ``before_us`` that no open sampling session names.

    What the collector may drop. A named one stays until its job ends.
    """
    pinned = exists().where(
        SAMPLERS.c.snapshot_id == SnapshotRow.id, SAMPLERS.c.closed_us.is_(None)
    )
    asked = _fresh(
        SnapshotRow.state == SnapshotState.READY,
        SnapshotRow.uri.is_(None),
        SnapshotRow.ready_us < before_us,
        ~pinned,
    )
    return list(session.scalars(asked.order_by(SnapshotRow.created_us, SnapshotRow.id)))


# ---- sampling sessions --------------------------------------------------------------------


def open_sampling_session(
    session: Session,
    *,
    sampler_id: str,
    session_id: str,
    seq: int,
    snapshot_id: DeploymentId,
    job_id: JobId,
    now_us: int,
) -> tuple[SamplingSessionRow, bool]:
    """The sampling session of ``(session, seq)``; false: it was there already."""
    values = {
        "id": sampler_id,
        "session_id": session_id,
        "seq": seq,
        "snapshot_id": snapshot_id,
        "job_id": job_id,
        "created_us": now_us,
        "last_used_us": now_us,
    }
    created = insert_once(session, SAMPLERS, values, "session_id", "seq")
    asked = _fresh_sampler(
        SamplingSessionRow.session_id == session_id, SamplingSessionRow.seq == seq
    )
    return session.scalars(asked).one(), created


def get_sampling_session(session: Session, sampler_id: str) -> SamplingSessionRow:
    """The row; ``NotFound`` if there is none."""
    row = session.scalars(_fresh_sampler(SamplingSessionRow.id == sampler_id)).one_or_none()
    if row is None:
        raise NotFound("sampling session", sampler_id)
    return row


def open_sampling_sessions(
    session: Session, *, job_id: JobId | None = None, unused_since_us: int | None = None
) -> list[SamplingSessionRow]:
    """Open ones: all, those of a job, or those that nobody has used since an instant."""
    asked = _fresh_sampler(SamplingSessionRow.closed_us.is_(None))
    if job_id is not None:
        asked = asked.where(SamplingSessionRow.job_id == job_id)
    if unused_since_us is not None:
        asked = asked.where(SamplingSessionRow.last_used_us < unused_since_us)
    return list(session.scalars(asked.order_by(SamplingSessionRow.created_us)))


def touch_sampling_sessions(session: Session, used_us: dict[str, int]) -> None:
    """Note last uses, gathered by the daemon; never called once per sample."""
    for sampler_id, at_us in used_us.items():
        touch = update(SAMPLERS).where(SAMPLERS.c.id == sampler_id)
        session.execute(touch.values(last_used_us=at_us))


def close_sampling_session(session: Session, sampler_id: str, *, now_us: int) -> bool:
    """Unpin its snapshot; false if it was closed before."""
    close = update(SAMPLERS).where(SAMPLERS.c.id == sampler_id, SAMPLERS.c.closed_us.is_(None))
    return (
        session.execute(close.values(closed_us=now_us).returning(SAMPLERS.c.id)).first() is not None
    )


def _change(session: Session, snapshot_id: DeploymentId, **values: object) -> None:
    change = update(SNAPSHOTS).where(SNAPSHOTS.c.id == snapshot_id).values(**values)
    if session.execute(change.returning(SNAPSHOTS.c.id)).first() is None:
        raise NotFound("snapshot", snapshot_id)


def _fresh(*where: ColumnElement[bool]) -> Select[SnapshotRow]:
    return select(SnapshotRow).where(*where).execution_options(populate_existing=True)


def _fresh_sampler(*where: ColumnElement[bool]) -> Select[SamplingSessionRow]:
    return select(SamplingSessionRow).where(*where).execution_options(populate_existing=True)
