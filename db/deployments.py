"""Sessions and deployments. Repeats of a creating call give the first row."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, insert, select, tuple_, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.core.ids import DeploymentId, JobId, WpgId
from plexrl_slurm.db.models import DeploymentRow, DeploymentState, ImageRow, SessionRow
from plexrl_slurm.db.upsert import insert_once, table_of

SESSIONS, DEPLOYMENTS, IMAGES = (table_of(row) for row in (SessionRow, DeploymentRow, ImageRow))


# ---- sessions -----------------------------------------------------------------------------


def open_session(
    session: Session,
    *,
    session_id: str,
    job_id: JobId,
    idempotency_key: str,
    metadata: Mapping[str, Any],
    now_us: int,
) -> SessionRow:
    """The session of ``(job, idempotency_key)``: this one if it is new, else the first."""
    values = {
        "id": session_id,
        "job_id": job_id,
        "idempotency_key": idempotency_key,
        "metadata": dict(metadata),
        "created_us": now_us,
        "heartbeat_us": now_us,
        "finish_reason": "",
    }
    insert_once(session, SESSIONS, values, "job_id", "idempotency_key")
    asked = select(SessionRow).where(
        SessionRow.job_id == job_id, SessionRow.idempotency_key == idempotency_key
    )
    return session.scalars(asked.execution_options(populate_existing=True)).one()


def get_session(session: Session, session_id: str) -> SessionRow:
    """The row; ``NotFound`` if there is none."""
    asked = select(SessionRow).where(SessionRow.id == session_id)
    row = session.scalars(asked.execution_options(populate_existing=True)).one_or_none()
    if row is None:
        raise NotFound("session", session_id)
    return row


def heartbeat(session: Session, session_id: str, *, now_us: int) -> bool:
    """Note that the client lives; false if the session is finished or unknown."""
    beat = update(SESSIONS).where(SESSIONS.c.id == session_id, SESSIONS.c.finished_us.is_(None))
    found = session.execute(beat.values(heartbeat_us=now_us).returning(SESSIONS.c.id))
    return found.first() is not None


def finish_session(session: Session, session_id: str, *, reason: str, now_us: int) -> bool:
    """End it; false if it had ended before: the first reason wins."""
    end = update(SESSIONS).where(SESSIONS.c.id == session_id, SESSIONS.c.finished_us.is_(None))
    end = end.values(finished_us=now_us, finish_reason=reason).returning(SESSIONS.c.id)
    return session.execute(end).first() is not None


def open_sessions(session: Session, job_id: JobId | None = None) -> list[SessionRow]:
    """Sessions that have not ended, of one job or of all. Called when a daemon starts."""
    asked = select(SessionRow).where(SessionRow.finished_us.is_(None)).order_by(SessionRow.id)
    if job_id is not None:
        asked = asked.where(SessionRow.job_id == job_id)
    return list(session.scalars(asked.execution_options(populate_existing=True)))


def silent_sessions(session: Session, *, before_us: int) -> list[SessionRow]:
    """Open sessions whose client has not been heard of since ``before_us``."""
    asked = select(SessionRow).where(
        SessionRow.finished_us.is_(None), SessionRow.heartbeat_us < before_us
    )
    return list(session.scalars(asked.execution_options(populate_existing=True)))


# ---- deployments --------------------------------------------------------------------------


def create_deployment(
    session: Session,
    *,
    deployment_id: DeploymentId,
    job_id: JobId,
    session_id: str,
    model_seq_id: int,
    base_model: str,
    wpg: WpgId,
    rank: int,
    seed: int,
    user_metadata: Mapping[str, Any],
    image_bytes: int,
    now_us: int,
) -> tuple[DeploymentRow, bool]:
    """The deployment of ``(session, model_seq)``; false: it was there already."""
    values = {
        "id": deployment_id,
        "job_id": job_id,
        "session_id": session_id,
        "model_seq_id": model_seq_id,
        "base_model": base_model,
        "wpg": wpg,
        "rank": rank,
        "seed": seed,
        "user_metadata": dict(user_metadata),
        "state": DeploymentState.PLACED,
        "image_bytes": image_bytes,
        "durable_path": "",
        "created_us": now_us,
    }
    created = insert_once(session, DEPLOYMENTS, values, "session_id", "model_seq_id")
    asked = _fresh(
        DeploymentRow.session_id == session_id, DeploymentRow.model_seq_id == model_seq_id
    )
    return session.scalars(asked).one(), created


def get_deployment(session: Session, deployment_id: DeploymentId) -> DeploymentRow:
    """The row; ``NotFound`` if there is none."""
    row = session.scalars(_fresh(DeploymentRow.id == deployment_id)).one_or_none()
    if row is None:
        raise NotFound("model", deployment_id)
    return row


def deployments_of(session: Session, job_id: JobId) -> list[DeploymentRow]:
    """Every deployment of a job, dropped ones too, oldest first."""
    asked = _fresh(DeploymentRow.job_id == job_id)
    return list(session.scalars(asked.order_by(DeploymentRow.created_us, DeploymentRow.id)))


def placed_deployments(session: Session) -> list[DeploymentRow]:
    """Deployments that live. Called when a daemon starts."""
    asked = _fresh(DeploymentRow.state == DeploymentState.PLACED)
    return list(session.scalars(asked.order_by(DeploymentRow.created_us, DeploymentRow.id)))


def moved(session: Session, deployment_id: DeploymentId, *, wpg: WpgId, now_us: int) -> None:
    """It has another home; images in memory of the old one are gone."""
    _change(session, deployment_id, wpg=wpg, image_seq=None, image_part=None)
    drop_images(session, deployment_id, tier="host", now_us=now_us)


def persisted(
    session: Session,
    deployment_id: DeploymentId,
    *,
    progress: tuple[int, int],
    path: str,
) -> bool:
    """A complete image lies in the durable tier; false, and nothing changes, if a newer does."""
    row = get_deployment(session, deployment_id)
    if row.durable_seq is not None and (row.durable_seq, row.durable_part or 0) >= progress:
        return False
    seq, part = progress
    _change(session, deployment_id, durable_seq=seq, durable_part=part, durable_path=path)
    return True


def durable_lost(
    session: Session,
    deployment_id: DeploymentId,
    *,
    durable: tuple[int, int] | None,
    path: str,
) -> None:
    """A durable image is damaged: this is the newest one left, at ``path``."""
    seq, part = durable if durable is not None else (None, None)
    _change(
        session,
        deployment_id,
        durable_seq=seq,
        durable_part=part,
        durable_path=path if durable is not None else "",
    )


def fell_back(
    session: Session,
    deployment_id: DeploymentId,
    *,
    image: tuple[int, int] | None,
    durable: tuple[int, int] | None,
    path: str,
    now_us: int,
) -> None:
    """Newer images are damaged: these are the newest of all, and the durable one at ``path``."""
    seq, part = image if image is not None else (None, None)
    durable_seq, durable_part = durable if durable is not None else (None, None)
    _change(
        session,
        deployment_id,
        image_seq=seq,
        image_part=part,
        durable_seq=durable_seq,
        durable_part=durable_part,
        durable_path=path if durable is not None else "",
    )
    newer = update(IMAGES).where(
        IMAGES.c.deployment_id == deployment_id, IMAGES.c.dropped_us.is_(None)
    )
    if image is not None:
        newer = newer.where(tuple_(IMAGES.c.seq, IMAGES.c.part) > image)
    session.execute(newer.values(dropped_us=now_us))


def drop_deployment(session: Session, deployment_id: DeploymentId, *, now_us: int) -> bool:
    """It is gone, with its images; false if it was gone before."""
    drop = update(DEPLOYMENTS).where(
        DEPLOYMENTS.c.id == deployment_id, DEPLOYMENTS.c.state == DeploymentState.PLACED
    )
    drop = drop.values(state=DeploymentState.DROPPED, dropped_us=now_us)
    if session.execute(drop.returning(DEPLOYMENTS.c.id)).first() is None:
        return False
    drop_images(session, deployment_id, now_us=now_us)
    return True


# ---- images -------------------------------------------------------------------------------


def image_completed(
    session: Session,
    deployment_id: DeploymentId,
    *,
    wpg: WpgId,
    tier: str,
    progress: tuple[int, int],
    bytes: int,
    now_us: int,
) -> None:
    """A complete copy exists in ``tier``; it replaces the tier's former one."""
    seq, part = progress
    drop_images(session, deployment_id, tier=tier, now_us=now_us)
    values = {
        "deployment_id": deployment_id,
        "wpg": wpg,
        "tier": tier,
        "seq": seq,
        "part": part,
        "bytes": bytes,
        "completed_us": now_us,
    }
    session.execute(insert(IMAGES), values)
    _change(session, deployment_id, image_seq=seq, image_part=part, image_bytes=bytes)


def images_of(session: Session, deployment_id: DeploymentId) -> list[ImageRow]:
    """Complete copies that exist, the newest progress first."""
    asked = select(ImageRow).where(
        ImageRow.deployment_id == deployment_id, ImageRow.dropped_us.is_(None)
    )
    newest = asked.order_by(ImageRow.seq.desc(), ImageRow.part.desc(), ImageRow.id.desc())
    return list(session.scalars(newest.execution_options(populate_existing=True)))


def drop_images(
    session: Session, deployment_id: DeploymentId, *, tier: str | None = None, now_us: int
) -> None:
    """Copies of ``tier``, or of every tier, are gone."""
    drop = update(IMAGES).where(
        IMAGES.c.deployment_id == deployment_id, IMAGES.c.dropped_us.is_(None)
    )
    if tier is not None:
        drop = drop.where(IMAGES.c.tier == tier)
    session.execute(drop.values(dropped_us=now_us))


def _change(session: Session, deployment_id: DeploymentId, **values: object) -> None:
    change = update(DEPLOYMENTS).where(DEPLOYMENTS.c.id == deployment_id).values(**values)
    if session.execute(change.returning(DEPLOYMENTS.c.id)).first() is None:
        raise NotFound("model", deployment_id)


def _fresh(*where: ColumnElement[bool]) -> Select[DeploymentRow]:
    return select(DeploymentRow).where(*where).execution_options(populate_existing=True)
