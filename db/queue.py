"""The queue, as verbs. No other module writes job states.

Every verb runs inside the caller's transaction, and adds a line to the job's story.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import Denied, InvalidTransition, NotFound
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.core.states import ENDED, STEPS, JobState
from plexrl_slurm.db.models import JobEventRow, JobRow
from plexrl_slurm.db.upsert import table_of

JOBS, EVENTS = table_of(JobRow), table_of(JobEventRow)
#: Rows come as they are in the database now, not as this session once saw them.
_FRESH: Mapping[str, Any] = {"populate_existing": True, "synchronize_session": False}

_FIRST = (
    select(JOBS.c.id)
    .where(
        JOBS.c.partition == bindparam("in_partition"),
        JOBS.c.state == JobState.PENDING,
        JOBS.c.slurm_id.is_not(None),
    )
    .order_by(JOBS.c.priority.desc(), JOBS.c.id)
    .limit(1)
    .with_for_update(skip_locked=True)  # SQLite has no row locks; its writer lock serves
    .scalar_subquery()
)
_CLAIM = (
    update(JOBS)
    .where(JOBS.c.id == _FIRST, JOBS.c.state == JobState.PENDING)
    .values(
        state=JobState.ADMITTED,
        owner=bindparam("new_owner"),
        lease_until_us=bindparam("new_lease_us"),
        admitted_us=bindparam("now_us"),
        reason="",
    )
    .returning(*JOBS.c)
)
_CLAIM_ONE = (
    update(JOBS)
    .where(
        JOBS.c.id == bindparam("wanted"),
        JOBS.c.partition == bindparam("in_partition"),
        JOBS.c.state == JobState.PENDING,
        JOBS.c.slurm_id.is_not(None),
    )
    .values(
        state=JobState.ADMITTED,
        owner=bindparam("new_owner"),
        lease_until_us=bindparam("new_lease_us"),
        admitted_us=bindparam("now_us"),
        reason="",
        obstacles=[],
    )
    .returning(*JOBS.c)
)


def submit(
    session: Session,
    *,
    partition: str,
    name: str,
    uid: int,
    user: str,
    account: str,
    script: str,
    models: Sequence[str],
    priority: int,
    seed: int,
    options: Mapping[str, Any],
    token_sha256: str | None,
    now_us: int,
) -> JobId:
    """Queue a row; nobody may claim it before :func:`bind`. Called by the job control API."""
    values = {
        "partition": partition,
        "name": name,
        "uid": uid,
        "user": user,
        "account": account,
        "script": script,
        "state": JobState.PENDING,
        "priority": priority,
        "seed": seed,
        "models": list(models),
        "options": dict(options),
        "token_sha256": token_sha256,
        "reason": "waits for its Slurm job",
        "obstacles": [],
        "submitted_us": now_us,
        "requeues": 0,
        "billed": False,
        "homes": {},
    }
    job_id = JobId(session.execute(insert(JOBS).returning(JOBS.c.id), values).scalar_one())
    note(session, job_id, at_us=now_us, kind="submitted", text=f"{user} queued {script}")
    return job_id


def bind(session: Session, job_id: JobId, *, slurm_id: SlurmId, now_us: int) -> None:
    """Name the Slurm job of a row, which makes it claimable. Binding again is harmless."""
    row = get(session, job_id)
    if row.slurm_id == slurm_id:
        return
    if row.slurm_id is not None or row.state != JobState.PENDING:
        raise Denied(
            f"{_named(row)} is {row.state} and bound to Slurm job {row.slurm_id}: "
            f"submit a new job instead of binding it to {slurm_id}"
        )
    _set(session, job_id, slurm_id=slurm_id, reason="waits for its turn")
    note(session, job_id, at_us=now_us, kind="bound", text=f"Slurm job {slurm_id}")


def set_token(session: Session, job_id: JobId, *, token_sha256: str) -> None:
    """By this its API key is known."""
    _set(session, job_id, token_sha256=token_sha256)


def describe(session: Session, job_id: JobId, *, user: str, account: str, name: str) -> None:
    """What Slurm made of the submission."""
    _set(session, job_id, user=user, account=account, name=name)


def explain_wait(session: Session, job_id: JobId, *, reason: str) -> None:
    """Why it waits, for a person; one that has ended meanwhile keeps the reason of its end."""
    change = update(JOBS).where(JOBS.c.id == job_id, JOBS.c.state.not_in(sorted(ENDED)))
    session.execute(change.values(reason=reason))


def set_homes(session: Session, job_id: JobId, homes: Mapping[str, str]) -> None:
    """Where its deployments live, by pool."""
    _set(session, job_id, homes=dict(homes))


def set_option(session: Session, job_id: JobId, name: str, value: str | None) -> None:
    """Add to the row's options, or take away from them."""
    options = {each: said for each, said in get(session, job_id).options.items() if each != name}
    _set(session, job_id, options=options if value is None else {**options, name: value})


def drop_unbound(session: Session, *, partition: str, before_us: int, now_us: int) -> list[JobId]:
    """End rows whose submitter went away before it could bind them. Called by the daemon's clock.

    A row without a Slurm job can never run, and nobody else would ever end it.
    """
    asked = select(JobRow.id).where(
        JobRow.partition == partition,
        JobRow.state == JobState.PENDING,
        JobRow.slurm_id.is_(None),
        JobRow.submitted_us < before_us,
    )
    ids = [JobId(found) for found in session.scalars(asked)]
    for job_id in ids:
        cancel(session, job_id, reason="its submission was never completed", now_us=now_us)
        close_bill(session, job_id)
    return ids


def claim(
    session: Session,
    *,
    partition: str,
    owner: str,
    lease_us: int,
    now_us: int,
    job: JobId | None = None,
) -> JobRow | None:
    """Take ``job``, or the first claimable one, for ``owner``; safe among many daemons.

    ``None``: there is none, or ``job`` is not claimable any more. The order is that of the jobs'
    own priority, then age; intake, which knows a better one, names the job. The story gets no
    line: a claim that finds no place is given back.
    """
    given = {
        "in_partition": partition,
        "new_owner": owner,
        "new_lease_us": now_us + lease_us,
        "now_us": now_us,
    }
    if job is None:
        taken = session.execute(_CLAIM, given).mappings().one_or_none()
    else:
        taken = session.execute(_CLAIM_ONE, given | {"wanted": job}).mappings().one_or_none()
    return None if taken is None else JobRow(**taken)


def living(session: Session, partition: str) -> list[JobRow]:
    """Every job that waits, has a place or runs, oldest first. Called by intake's pass."""
    states = [JobState.PENDING, JobState.ADMITTED, JobState.RUNNING]
    return list_jobs(session, partition=partition, states=states)


def keep_waiting(
    session: Session, job_id: JobId, *, obstacles: Sequence[str], tell: bool, now_us: int
) -> None:
    """Why a pass left the job in the queue; with ``tell`` its story gets a line.

    One that is not in the queue any more is left alone.
    """
    change = (
        update(JOBS)
        .where(JOBS.c.id == job_id, JOBS.c.state == JobState.PENDING)
        .values(obstacles=list(obstacles), reason=obstacles[0] if obstacles else "")
        .returning(JOBS.c.id)
    )
    if session.execute(change).first() is not None and tell:
        note(session, job_id, at_us=now_us, kind="obstacles", text="; ".join(obstacles) or "none")


def unclaim(
    session: Session, job_id: JobId, *, owner: str, obstacles: Sequence[str], now_us: int
) -> None:
    """Give a claim back because the job cannot be placed now. Called by intake."""
    _step(session, job_id, JobState.PENDING, owner=owner, release=True)
    set_obstacles(session, job_id, obstacles=obstacles, now_us=now_us)


def extend_leases(session: Session, *, owner: str, lease_us: int, now_us: int) -> int:
    """The heartbeat of a daemon: one statement for all its jobs; says how many they are."""
    beat = (
        update(JOBS)
        .where(JOBS.c.owner == owner, JOBS.c.state.in_((JobState.ADMITTED, JobState.RUNNING)))
        .values(lease_until_us=now_us + lease_us)
        .returning(JOBS.c.id)
    )
    return len(session.execute(beat).all())


def requeue_expired(session: Session, *, partition: str, now_us: int) -> list[JobId]:
    """Give back what a dead daemon had claimed and not begun. Called by every daemon's clock.

    Running jobs stay as they are: a new daemon takes them over with :func:`adopt`.
    """
    expired = (
        update(JOBS)
        .where(
            JOBS.c.partition == partition,
            JOBS.c.state == JobState.ADMITTED,
            JOBS.c.lease_until_us <= now_us,
        )
        .values(
            state=JobState.PENDING,
            owner=None,
            lease_until_us=None,
            admitted_us=None,
            requeues=JOBS.c.requeues + 1,
            reason="waits for its turn again: its daemon's lease expired",
        )
        .returning(JOBS.c.id)
    )
    ids = sorted(JobId(found) for found in session.scalars(expired))
    for job_id in ids:
        note(session, job_id, at_us=now_us, kind="requeued", text="its daemon's lease expired")
    return ids


def adopt(
    session: Session, *, partition: str, owner: str, lease_us: int, now_us: int
) -> list[JobRow]:
    """Take over every claimed or running job of the partition. Called when a daemon starts.

    The former owner is fenced off from then on: its :func:`start` is denied.
    """
    take = (
        update(JobRow)
        .where(
            JobRow.partition == partition,
            JobRow.state.in_((JobState.ADMITTED, JobState.RUNNING)),
        )
        .values(owner=owner, lease_until_us=now_us + lease_us)
        .returning(JobRow)
        .execution_options(**_FRESH)
    )
    return sorted(session.scalars(take), key=lambda row: row.id)


def set_reason(session: Session, job_id: JobId, *, reason: str) -> None:
    """Why the job is where it is, for squeue."""
    _set(session, job_id, reason=reason)


def set_obstacles(
    session: Session, job_id: JobId, *, obstacles: Sequence[str], now_us: int
) -> None:
    """Every reason why the job cannot be placed; the story gets a line when they change."""
    before = get(session, job_id).obstacles
    _set(session, job_id, obstacles=list(obstacles), reason=obstacles[0] if obstacles else "")
    if list(obstacles) != before:
        note(session, job_id, at_us=now_us, kind="obstacles", text="; ".join(obstacles) or "none")


def start(session: Session, job_id: JobId, *, owner: str, now_us: int) -> None:
    """Its controller runs. Denied to a daemon that has lost the job to another one."""
    _step(
        session, job_id, JobState.RUNNING, owner=owner, started_us=now_us, reason="", obstacles=[]
    )
    note(session, job_id, at_us=now_us, kind="started", text="its controller runs")


def finish(
    session: Session,
    job_id: JobId,
    *,
    state: JobState,
    reason: str = "",
    exit_code: int | None = None,
    now_us: int,
) -> bool:
    """End a job; false if it had ended before (the first end wins)."""
    if state not in ENDED:
        raise ValueError(f"{state} is not an end")
    if get(session, job_id).state in ENDED:
        return False
    _step(session, job_id, state, ended_us=now_us, exit_code=exit_code, reason=reason, obstacles=[])
    note(session, job_id, at_us=now_us, kind=str(state), text=reason)
    return True


def cancel(session: Session, job_id: JobId, *, reason: str, now_us: int) -> bool:
    """End a job at its owner's wish, in whatever state; false if it had ended before."""
    return finish(session, job_id, state=JobState.CANCELLED, reason=reason, now_us=now_us)


def close_bill(session: Session, job_id: JobId) -> None:
    """No ledger row of this job will follow. Called when its deployments are gone."""
    _set(session, job_id, billed=True)


def get(session: Session, job_id: JobId) -> JobRow:
    """The row; ``NotFound`` if there is none."""
    asked = select(JobRow).where(JobRow.id == job_id).execution_options(**_FRESH)
    row = session.scalars(asked).one_or_none()
    if row is None:
        raise NotFound("job", str(job_id))
    return row


def by_token(session: Session, token_sha256: str) -> JobRow | None:
    """The job behind an API key, ended or not. Called for every HTTP request of an SDK."""
    asked = select(JobRow).where(JobRow.token_sha256 == token_sha256)
    return session.scalars(asked.execution_options(**_FRESH)).one_or_none()


def numbers(session: Session, jobs: Collection[int]) -> dict[int, str | None]:
    """Slurm's numbers of rows."""
    asked = select(JobRow.id, JobRow.slurm_id).where(JobRow.id.in_(jobs))
    return {row: number for row, number in session.execute(asked)}


def by_slurm_id(session: Session, *, partition: str, slurm_id: SlurmId) -> JobRow | None:
    """The newest job bound to a Slurm id (Slurm uses its numbers again after years)."""
    asked = (
        select(JobRow)
        .where(JobRow.partition == partition, JobRow.slurm_id == slurm_id)
        .order_by(JobRow.id.desc())
        .limit(1)
    )
    return session.scalars(asked.execution_options(**_FRESH)).one_or_none()


def called(session: Session, job_id: JobId) -> str:
    """What names of its sessions, deployments and checkpoints begin with: for people, so Slurm's
    number, and behind a dot which job of that number it is, if there was one before."""
    row = get(session, job_id)
    if row.slurm_id is None:
        return f"row{job_id}"
    same = (JobRow.slurm_id == row.slurm_id, JobRow.id < job_id)
    before = session.scalar(select(func.count()).select_from(JobRow).where(*same)) or 0
    return f"job{row.slurm_id}.{before + 1}" if before else f"job{row.slurm_id}"


def list_jobs(
    session: Session,
    *,
    partition: str | None = None,
    user: str | None = None,
    states: Collection[JobState] = (),
    ended: bool = True,
    since_us: int = 0,
) -> list[JobRow]:
    """Jobs that match every given filter, oldest first; ``since_us`` looks at ended ones' end."""
    asked = select(JobRow).order_by(JobRow.id)
    if partition is not None:
        asked = asked.where(JobRow.partition == partition)
    if user is not None:
        asked = asked.where(JobRow.user == user)
    if states:
        asked = asked.where(JobRow.state.in_(states))
    if not ended:
        asked = asked.where(JobRow.state.not_in(sorted(ENDED)))
    if since_us:
        asked = asked.where(JobRow.ended_us.is_(None) | (JobRow.ended_us >= since_us))
    return list(session.scalars(asked.execution_options(**_FRESH)))


def note(session: Session, job_id: JobId, *, at_us: int, kind: str, text: str) -> None:
    """Add a line to the job's story."""
    values = {"job_id": job_id, "at_us": at_us, "kind": kind, "text": text}
    session.execute(insert(EVENTS), values)


def story(session: Session, job_id: JobId) -> list[JobEventRow]:
    """Everything that happened to the job, in order. Called by ``explain``."""
    asked = select(JobEventRow).where(JobEventRow.job_id == job_id).order_by(JobEventRow.id)
    return list(session.scalars(asked))


def _set(session: Session, job_id: JobId, **values: Any) -> None:
    change = update(JOBS).where(JOBS.c.id == job_id).values(**values).returning(JOBS.c.id)
    if session.execute(change).first() is None:
        raise NotFound("job", str(job_id))


def _step(
    session: Session,
    job_id: JobId,
    to: JobState,
    *,
    owner: str | None = None,
    release: bool = False,
    **values: Any,
) -> None:
    """Change the state in one statement that checks state and owner, or say what was wrong."""
    if release:
        values |= {"owner": None, "lease_until_us": None, "admitted_us": None}
    change = update(JOBS).where(JOBS.c.id == job_id, JOBS.c.state.in_(_starts(to)))
    if owner is not None:
        change = change.where(JOBS.c.owner == owner)
    if session.execute(change.values(state=to, **values).returning(JOBS.c.id)).first():
        return
    row = get(session, job_id)
    if (row.state, to) in STEPS:
        raise Denied(
            f"{_named(row)} belongs to daemon {row.owner}, not to {owner}: this daemon was "
            f"declared lost; restart it"
        )
    lines = tuple(f"{line.at_us} {line.kind}: {line.text}" for line in story(session, job_id))
    raise InvalidTransition(_named(row), str(row.state), str(to), lines)


def _named(row: JobRow) -> str:
    """As people call it; a row without a Slurm job has only ours."""
    return f"job {row.slurm_id or f'(row {row.id})'}"


def _starts(finish: JobState) -> list[JobState]:
    return [start for start, to in STEPS if to is finish]
