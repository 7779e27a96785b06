"""What the ledger attributes to jobs, as it grows: for fair shares and limits of GPU time."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.states import JobState
from plexrl_slurm.db.models import HoldRow, JobRow, LedgerRow
from plexrl_slurm.db.upsert import table_of

LEDGER, HOLDS, JOBS = table_of(LedgerRow), table_of(HoldRow), table_of(JobRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributed:
    """GPU time of one job that ended in one stretch of time."""

    job: JobId
    user: str
    account: str
    qos: str
    #: Middle of the stretch.
    at_us: int
    gpu_us: int


def attributed(
    session: Session, partition: str, *, after: int, since_us: int, bucket_us: int
) -> tuple[int, list[Attributed]]:
    """What was booked behind row ``after``, and the last row: ask again with that.

    Only what ended after ``since_us``, in stretches of ``bucket_us``. Rows are never changed, and
    one daemon writes those of a partition, so that nothing appears between rows that were read.
    """
    of_partition = select(HOLDS.c.id).where(HOLDS.c.partition == partition)
    ours = LEDGER.c.hold_id.in_(of_partition)
    last = session.execute(
        select(func.max(LEDGER.c.id)).where(LEDGER.c.id > after, ours)
    ).scalar_one_or_none()
    if last is None:
        return after, []
    # Written into the statement: PostgreSQL must see that both places mean the same.
    bucket = LEDGER.c.stop_us // bindparam("bucket_us", bucket_us, literal_execute=True)
    asked = (
        select(LEDGER.c.job_id, bucket, func.sum(LEDGER.c.gpu_us))
        .where(
            LEDGER.c.id > after,
            LEDGER.c.id <= last,
            ours,
            LEDGER.c.job_id.is_not(None),
            LEDGER.c.stop_us > since_us,
        )
        .group_by(LEDGER.c.job_id, bucket)
        .order_by(LEDGER.c.job_id, bucket)
    )
    found = session.execute(asked).all()
    who = {
        row.id: row
        for row in session.execute(
            select(JOBS.c.id, JOBS.c.user, JOBS.c.account, JOBS.c.options).where(
                JOBS.c.id.in_(sorted({job for job, _, _ in found}))
            )
        )
    }
    return int(last), [
        Attributed(
            job=JobId(job),
            user=who[job].user,
            account=who[job].account,
            qos=str(who[job].options.get("qos") or "normal"),
            at_us=int(number) * bucket_us + bucket_us // 2,
            gpu_us=int(gpu_us),
        )
        for job, number, gpu_us in found
    ]


def usual_lengths(
    session: Session, partition: str, wanted: Sequence[JobRow], *, last: int = 5
) -> dict[JobId, int]:
    """How long the last jobs of the same user, name and models ran, on average.

    Only jobs that completed count; a job without a predecessor is left out.
    """
    found: dict[JobId, int] = {}
    known: dict[tuple[str, str, tuple[str, ...]], int | None] = {}
    for row in wanted:
        key = (row.user, row.name, tuple(row.models))
        if key not in known:
            past = (
                select(JOBS.c.models, JOBS.c.started_us, JOBS.c.ended_us)
                .where(
                    JOBS.c.partition == partition,
                    JOBS.c.state == JobState.COMPLETED,
                    JOBS.c.user == row.user,
                    JOBS.c.name == row.name,
                    JOBS.c.started_us.is_not(None),
                )
                .order_by(JOBS.c.id.desc())
                .limit(4 * last)
            )
            ran = [
                each.ended_us - each.started_us
                for each in session.execute(past)
                if tuple(each.models) == key[2]
            ][:last]
            known[key] = sum(ran) // len(ran) if ran else None
        if (length := known[key]) is not None:
            found[JobId(row.id)] = length
    return found
