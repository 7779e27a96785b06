"""What Slurm's own accounting says of holds, and what it is told of jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import exists, func, select, union, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.core.ledger import split
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.core.states import ENDED
from plexrl_slurm.db import holds, ledger, queue
from plexrl_slurm.db.models import (
    DeploymentRow,
    HoldRow,
    JobEventRow,
    JobRow,
    LedgerRow,
    SlurmUsageRow,
    SnapshotRow,
    WpgRow,
)
from plexrl_slurm.db.upsert import insert_once, table_of

USAGE, JOBS, HOLDS = table_of(SlurmUsageRow), table_of(JobRow), table_of(HoldRow)
LEDGER, WPGS = table_of(LedgerRow), table_of(WpgRow)
EVENTS = table_of(JobEventRow)
#: Kind of the line in a job's story that says what Slurm's records say of it.
TOLD = "accounted"
HOMES = union(
    select(DeploymentRow.job_id, DeploymentRow.wpg), select(SnapshotRow.job_id, SnapshotRow.wpg)
).subquery()


def record_usage(
    session: Session,
    hold_id: str,
    *,
    slurm_id: str,
    start_us: int | None,
    end_us: int | None,
    elapsed_us: int,
    gpus: int,
    word: str,
    now_us: int,
) -> None:
    """Write down one incarnation of a component of a hold, or what is new of it.

    One that never started has used nothing and gets no row.
    """
    if start_us is None:
        return
    news = {
        "end_us": end_us,
        "elapsed_us": elapsed_us,
        "gpus": gpus,
        "word": word,
        "recorded_us": now_us,
    }
    values = {"hold_id": hold_id, "slurm_id": slurm_id, "start_us": start_us, **news}
    if not insert_once(session, USAGE, values, "slurm_id", "start_us"):
        change = update(USAGE).where(
            USAGE.c.slurm_id == slurm_id,
            USAGE.c.start_us == start_us,
            USAGE.c.recorded_us <= now_us,
        )
        session.execute(change.values(news))


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """A hold of which Slurm's accounting has more to say."""

    id: str
    #: Number of its Slurm job.
    leader: int
    submitted_us: int
    ended_us: int | None


def incomplete(session: Session, partition: str, *, since_us: int) -> list[Incomplete]:
    """Live holds, those that ended after ``since_us``, and as in :func:`open_usage`.

    Accounting hears of the components one by one: what it has of a hold that has just ended may
    look complete.
    """
    rows = [row for row in holds.live_holds(session, partition) if row.backend == "slurm"]
    recent = select(HOLDS.c.id).where(
        HOLDS.c.partition == partition, HOLDS.c.backend == "slurm", HOLDS.c.ended_us >= since_us
    )
    ended = [*session.scalars(recent), *open_usage(session, partition)]
    rows += [holds.get_hold(session, hold_id) for hold_id in dict.fromkeys(ended)]
    return [
        Incomplete(
            id=row.id,
            leader=int(row.slurm_id),
            submitted_us=row.started_us,
            ended_us=row.ended_us,
        )
        for row in rows
        if row.slurm_id.isdecimal()
    ]


def untold(
    session: Session, partition: str, *, epoch_us: int, since_us: int, limit: int
) -> dict[SlurmId, JobId]:
    """Jobs that ran and ended after ``since_us``, and whose story has no line :data:`TOLD` yet.

    A daemon that was killed while it ended a job may have left its bill open; after ``epoch_us``,
    when this one started, nothing more is booked on it, so it is closed here.
    """
    ended = (JOBS.c.partition == partition, JOBS.c.state.in_(sorted(ENDED)))
    cut = select(JOBS.c.id).where(*ended, JOBS.c.billed.is_(False), JOBS.c.ended_us < epoch_us)
    for job in session.scalars(cut).all():
        queue.close_bill(session, JobId(job))
    told = exists().where(EVENTS.c.job_id == JOBS.c.id, EVENTS.c.kind == TOLD)
    asked = select(JOBS.c.slurm_id, JOBS.c.id).where(
        *ended,
        JOBS.c.billed.is_(True),
        JOBS.c.slurm_id.is_not(None),
        JOBS.c.started_us.is_not(None),
        JOBS.c.ended_us >= since_us,
        ~told,
    )
    rows = session.execute(asked.order_by(JOBS.c.id.desc()).limit(limit))
    return {SlurmId(slurm_id): JobId(job) for slurm_id, job in rows}


def open_usage(session: Session, partition: str) -> list[str]:
    """Holds that have ended and whose last word from Slurm's accounting is still missing."""
    waiting = select(USAGE.c.hold_id).where(USAGE.c.end_us.is_(None))
    heard = select(USAGE.c.hold_id)
    asked = select(HOLDS.c.id).where(
        HOLDS.c.partition == partition,
        HOLDS.c.backend == "slurm",
        HOLDS.c.ended_us.is_not(None),
        HOLDS.c.id.in_(waiting) | HOLDS.c.id.not_in(heard),
    )
    return list(session.scalars(asked.order_by(HOLDS.c.started_us, HOLDS.c.id)))


def summary_of(session: Session, job_id: JobId) -> str:
    """What a job used, for Slurm's records: numbers only, at most 250 characters.

    ``saved`` is the percentage that the report ``savings`` gives.
    """
    used = ledger.totals(session, job_id=job_id)
    number = queue.get(session, job_id).slurm_id or f"(row {job_id})"
    seconds = {activity: f"{gpu_us / 1e6:.1f}" for activity, gpu_us in used.items()}
    text = (
        f"plexrl: job {number}, busy {seconds[Activity.BUSY]} GPU-s, "
        f"switch {seconds[Activity.SWITCH]}, kept {seconds[Activity.KEPT]}"
    )
    saved = _saved_percent(session, job_id, bill=sum(used.values()))
    return text if saved is None else f"{text}, saved {round(saved)} %"


def _saved_percent(session: Session, job_id: JobId, *, bill: int) -> float | None:
    """``None``: it never ran, or on nothing."""
    job = queue.get(session, job_id)
    if job.started_us is None:
        return None
    ran = _ran(session, job)
    homes = list(session.scalars(select(HOMES.c.wpg).where(HOMES.c.job_id == job_id)))
    places = (
        select(func.max(WPGS.c.gpus).label("gpus"))
        .join(HOLDS, HOLDS.c.id == WPGS.c.hold_id)
        .where(HOLDS.c.partition == job.partition, WPGS.c.name.in_(homes))
        .group_by(WPGS.c.slot)
        .subquery()
    )
    gpus = int(session.execute(select(func.coalesce(func.sum(places.c.gpus), 0))).scalar_one())
    dedicated = gpus * (ran[1] - ran[0])
    if not dedicated:
        return None
    idle = sum(_idle_share(session, job, wpg, ran) for wpg in homes)
    return 100 * (dedicated - bill - idle) / dedicated


def _ran(session: Session, job: JobRow) -> tuple[int, int]:
    """From when to when; one that has not ended ran up to the last booked stretch."""
    start_us, end_us = job.started_us or 0, job.ended_us
    if end_us is None:
        last = select(func.max(LEDGER.c.stop_us)).join(HOLDS, HOLDS.c.id == LEDGER.c.hold_id)
        end_us = session.execute(last.where(HOLDS.c.partition == job.partition)).scalar()
    return start_us, max(start_us, end_us or 0)


def _idle_share(session: Session, job: JobRow, wpg: str, ran: tuple[int, int]) -> int:
    """Its part of the idle time of a WPG, split as in the report ``savings``."""
    start_us, stop_us = ran
    neighbours = (
        select(JobRow)
        .join(HOMES, HOMES.c.job_id == JobRow.id)
        .where(HOMES.c.wpg == wpg, JobRow.partition == job.partition)
        .where(JobRow.started_us < stop_us)
    )
    present = [(JobId(row.id), *_ran(session, row)) for row in session.scalars(neighbours)]
    idle = (
        select(LEDGER.c.start_us, LEDGER.c.stop_us, LEDGER.c.gpu_us)
        .join(HOLDS, HOLDS.c.id == LEDGER.c.hold_id)
        .where(HOLDS.c.partition == job.partition, LEDGER.c.wpg == wpg)
        .where(LEDGER.c.activity == Activity.IDLE)
        .where(LEDGER.c.stop_us > start_us, LEDGER.c.start_us < stop_us)
    )
    return sum(
        _share(JobId(job.id), present, start, stop, gpu_us // (stop - start))
        for start, stop, gpu_us in session.execute(idle)
        if stop > start
    )


def _share(
    job: JobId, present: Sequence[tuple[JobId, int, int]], start: int, stop: int, gpus: int
) -> int:
    """Its part of one idle stretch, which is cut where one of those present begins or ends."""
    here = [(each, max(lo, start), min(hi, stop)) for each, lo, hi in present]
    here = [(each, lo, hi) for each, lo, hi in here if lo < hi]
    cuts = sorted({at_us for _, lo, hi in here for at_us in (lo, hi)})
    share = 0
    for lo, hi in pairwise(cuts):
        sharing = {each: 0 for each, begin, end in here if begin <= lo and hi <= end}
        if job in sharing:
            share += split((hi - lo) * gpus, sharing)[job]
    return share
