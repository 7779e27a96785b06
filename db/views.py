"""Sums over calls and the ledger that job control shows while jobs run."""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Activity, FunctionKind
from plexrl_slurm.db.models import CallRow, CallState, JobRow, LedgerRow, SessionRow
from plexrl_slurm.db.upsert import table_of

CALLS, LEDGER = table_of(CallRow), table_of(LedgerRow)


def gpu_us_by_job(session: Session, jobs: Sequence[int]) -> list[tuple[JobId, Activity, int]]:
    """``(job, activity, GPU-microseconds)`` of what the jobs were charged so far."""
    asked = (
        select(LEDGER.c.job_id, LEDGER.c.activity, func.sum(LEDGER.c.gpu_us))
        .where(LEDGER.c.job_id.in_(list(jobs)))
        .group_by(LEDGER.c.job_id, LEDGER.c.activity)
    )
    return [(JobId(job), activity, int(total)) for job, activity, total in session.execute(asked)]


def steps_by_job(session: Session, jobs: Sequence[int]) -> dict[int, int]:
    """Effective steps: optimizer steps that were done."""
    asked = (
        select(CALLS.c.job_id, func.count())
        .where(
            CALLS.c.job_id.in_(list(jobs)),
            CALLS.c.kind == FunctionKind.OPTIM_STEP,
            CALLS.c.state == CallState.DONE,
            # A step that was skipped, for a gradient that is not finite, says so.
            CALLS.c.message == "",
        )
        .group_by(CALLS.c.job_id)
    )
    return {int(job): int(count) for job, count in session.execute(asked)}


def progress_of(session: Session, deployment: str) -> int:
    """First seq of a deployment that has not ended: what lies below has taken effect."""
    asked = select(func.max(CALLS.c.seq)).where(
        CALLS.c.deployment_id == deployment, CALLS.c.state != CallState.WAITING
    )
    last = session.execute(asked).scalar_one_or_none()
    return 0 if last is None else int(last) + 1


def sessions_of(session: Session, job: JobId) -> list[SessionRow]:
    """Every session of a job, finished ones too. Called when a daemon starts."""
    return list(session.scalars(select(SessionRow).where(SessionRow.job_id == job)))


def jobs_since(session: Session, partition: str, since_us: int) -> Sequence[JobRow]:
    """Every job that was submitted since, oldest first."""
    asked = (
        select(JobRow)
        .where(JobRow.partition == partition, JobRow.submitted_us >= since_us)
        .order_by(JobRow.submitted_us, JobRow.id)
    )
    return session.scalars(asked).all()


def calls_since(session: Session, since_us: int) -> dict[str, int]:
    """When each call came, of those that came since then."""
    asked = select(CALLS.c.id, CALLS.c.submitted_us).where(CALLS.c.submitted_us >= since_us)
    return {str(call): int(submitted_us) for call, submitted_us in session.execute(asked)}
