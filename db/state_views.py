"""Complete copies of states, and what jobs have saved, for whoever looks at them."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.db.models import CheckpointRow, ImageRow


def images_among(session: Session, deployments: Sequence[str]) -> list[ImageRow]:
    """Complete copies that exist of any of the deployments, oldest first."""
    asked = select(ImageRow).where(
        ImageRow.deployment_id.in_(list(deployments)), ImageRow.dropped_us.is_(None)
    )
    return list(session.scalars(asked.order_by(ImageRow.id)))


def checkpoints_of(session: Session, job: JobId) -> list[CheckpointRow]:
    """Checkpoints and named sampler weights of a job, oldest first."""
    asked = select(CheckpointRow).where(CheckpointRow.job_id == job)
    return list(session.scalars(asked.order_by(CheckpointRow.created_us, CheckpointRow.id)))
