"""Named checkpoints: what a user finds again after the job, by uri or by uid."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import DeploymentId, JobId
from plexrl_slurm.db.models import CheckpointKind, CheckpointRow
from plexrl_slurm.db.upsert import insert_once, table_of

CHECKPOINTS = table_of(CheckpointRow)


def add_checkpoint(
    session: Session,
    *,
    job_id: JobId,
    uid: int,
    uri: str,
    kind: CheckpointKind,
    name: str,
    deployment_id: DeploymentId,
    base_model: str,
    rank: int,
    path: str,
    bytes: int,
    user_metadata: Mapping[str, Any],
    now_us: int,
    expires_us: int | None = None,
    overwrite: bool = False,
) -> None:
    """A checkpoint is complete. Called in the transaction that ends the saving call."""
    values = {
        "job_id": job_id,
        "uid": uid,
        "uri": uri,
        "kind": kind,
        "name": name,
        "deployment_id": deployment_id,
        "base_model": base_model,
        "rank": rank,
        "path": path,
        "bytes": bytes,
        "user_metadata": dict(user_metadata),
        "created_us": now_us,
        "expires_us": expires_us,
    }
    if overwrite:
        delete_checkpoint(session, uri)
    if not insert_once(session, CHECKPOINTS, values, "uri"):
        raise BadInput(f"checkpoint {uri} exists: choose another name or ask to overwrite it")


def find_checkpoint(session: Session, uri: str) -> CheckpointRow | None:
    """The checkpoint of that uri; whose it is, the caller checks."""
    asked = select(CheckpointRow).where(CheckpointRow.uri == uri)
    return session.scalars(asked.execution_options(populate_existing=True)).one_or_none()


def list_checkpoints(
    session: Session, *, uid: int, deployment_id: DeploymentId | None = None
) -> list[CheckpointRow]:
    """A user's checkpoints, oldest first."""
    asked = select(CheckpointRow).where(CheckpointRow.uid == uid).order_by(CheckpointRow.id)
    if deployment_id is not None:
        asked = asked.where(CheckpointRow.deployment_id == deployment_id)
    return list(session.scalars(asked.execution_options(populate_existing=True)))


def expired_checkpoints(session: Session, *, now_us: int) -> list[CheckpointRow]:
    """What the collector may delete."""
    asked = select(CheckpointRow).where(CheckpointRow.expires_us <= now_us)
    return list(session.scalars(asked.execution_options(populate_existing=True)))


def delete_checkpoint(session: Session, uri: str) -> bool:
    """Forget it; false if there was none. The caller deletes the folder."""
    gone = delete(CHECKPOINTS).where(CHECKPOINTS.c.uri == uri).returning(CHECKPOINTS.c.id)
    return session.execute(gone).first() is not None
