"""Rows of the database as the answers of job control."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, SlurmId
from plexrl_slurm.core.limits import Qos
from plexrl_slurm.core.messages import Call
from plexrl_slurm.core.obstacles import WORDS, ObstacleKind
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue, views
from plexrl_slurm.db.models import CallRow, JobRow

#: In a row's options: ``user`` where the job's owner holds it in Slurm as well.
USER_HOLD = "hold"
#: Likewise: Slurm was told that the job may start.
RELEASED = "released"
#: Likewise: how often Slurm has requeued it, as far as was noticed.
RESTARTS = "restarts"
#: Of the user: how much slower than alone the job may become.
PROMISE = "max_slowdown"
#: Likewise, in microseconds, where Slurm does not know it.
TIME_LIMIT = "time_limit_us"


def live_job(row: JobRow, qos: Qos | None = None) -> LiveJob:
    """What is kept in memory of a claimed or running job; ``qos``: the one that it asked for."""
    started = row.state is JobState.RUNNING
    return LiveJob(
        id=JobId(row.id),
        uid=row.uid,
        user=row.user,
        name=row.name,
        seed=row.seed,
        priority=row.priority * (1 if qos is None else qos.weight),
        reserved=qos is not None and qos.reserved,
        slurm_id=SlurmId(row.slurm_id or ""),
        running=started,
        started=started,
        user_held=row.options.get(USER_HOLD) == "user",
        released=RELEASED in row.options,
        restarts=int(row.options.get(RESTARTS, 0)),
        max_slowdown=promised(row),
        started_us=row.started_us,
        time_limit_us=_limit(row),
    )


def promised(row: JobRow) -> float | None:
    """The slowdown that its user asked for; ``None``: none, or one that makes no sense."""
    try:
        found = float(row.options[PROMISE])
    except (KeyError, TypeError, ValueError):
        return None
    return found if found >= 1 else None


def _limit(row: JobRow) -> int | None:
    found = row.options.get(TIME_LIMIT)
    return int(found) if isinstance(found, str) and found.isdecimal() else None


def call_kinds(row: CallRow) -> Call:
    """The core's value of a call's row."""
    return Call(
        id=CallId(row.id),
        deployment=DeploymentId(row.deployment_id),
        job=JobId(row.job_id),
        kind=row.kind,
        seq=row.seq,
        tokens=row.tokens,
        parts=row.parts,
    )


def job_views(
    session: Any,
    *,
    partition: str,
    user: str | None,
    states: Sequence[JobState],
    ended: bool,
    now_us: int,
    job_id: JobId | None = None,
) -> list[dict[str, Any]]:
    """Jobs with what they have used so far, oldest first."""
    if job_id is not None:
        rows = [queue.get(session, job_id)]
    else:
        rows = queue.list_jobs(session, partition=partition, user=user, states=states, ended=ended)
    used: dict[int, dict[str, int]] = defaultdict(dict)
    for owner, activity, total in views.gpu_us_by_job(session, [row.id for row in rows]):
        used[owner][str(activity)] = total
    steps = views.steps_by_job(session, [row.id for row in rows])
    return [
        {
            "job_id": row.id,
            "slurm_id": row.slurm_id,
            "name": row.name,
            "user": row.user,
            "account": row.account,
            "partition": row.partition,
            "state": str(row.state),
            "reason": row.reason,
            "reason_word": _word(row),
            "max_slowdown": promised(row),
            "submitted_us": row.submitted_us,
            "started_us": row.started_us,
            "ended_us": row.ended_us,
            "elapsed_us": _elapsed(row.started_us, row.ended_us, now_us),
            "exit_code": row.exit_code,
            "steps": steps.get(row.id, 0),
            "gpu_us": {word: used[row.id].get(word, 0) for word in ("busy", "switch", "kept")},
            "models": row.models,
            "script": row.script,
            "seed": row.seed,
            "priority": row.priority,
            "options": dict(row.options),
        }
        for row in rows
    ]


def _word(row: JobRow) -> str:
    """Of one that waits for its turn; who knows more says more."""
    if row.state is not JobState.PENDING or row.slurm_id is None:
        return ""
    return WORDS[ObstacleKind.PRIORITY]


def _elapsed(started_us: int | None, ended_us: int | None, now_us: int) -> int:
    if started_us is None:
        return 0
    return (ended_us if ended_us is not None else now_us) - started_us
