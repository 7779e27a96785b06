"""Training calls, exactly once. Bodies and results are in the spool, never here.

The hot path of the service: plain statements, one short transaction each.
"""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Select, bindparam, select, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import CallId, DeploymentId, JobId
from plexrl_slurm.core.messages import Call
from plexrl_slurm.db.models import CallRow, CallState
from plexrl_slurm.db.upsert import insert_once, table_of

CALLS = table_of(CallRow)
_FINISH = (
    update(CALLS)
    .where(CALLS.c.id == bindparam("call_id"), CALLS.c.state == CallState.WAITING)
    .values(
        state=bindparam("new_state"),
        result_kept=bindparam("kept"),
        ended_us=bindparam("now_us"),
        message=bindparam("why"),
    )
    .returning(CALLS.c.id)
)
_SAME = select(CallRow).where(
    CALLS.c.deployment_id == bindparam("deployment"), CALLS.c.seq == bindparam("number")
)
_WAITING = (
    select(CallRow)
    .where(CALLS.c.state == CallState.WAITING)
    .order_by(CALLS.c.submitted_us, CALLS.c.deployment_id, CALLS.c.seq)
)


def record_call(session: Session, call: Call, *, now_us: int) -> tuple[CallRow, bool]:
    """Store a call once, however often the controller repeats it; false: it was there.

    Called before a call is acknowledged, after its body is in the spool. The row of a repeat
    is the first call's, with the first call's id.
    """
    values = {
        "id": call.id,
        "deployment_id": call.deployment,
        "job_id": call.job,
        "seq": call.seq,
        "kind": call.kind,
        "tokens": call.tokens,
        "parts": call.parts,
        "state": CallState.WAITING,
        "body_kept": True,
        "result_kept": False,
        "submitted_us": now_us,
        "message": "",
    }
    if insert_once(session, CALLS, values, "deployment_id", "seq"):
        return CallRow(ended_us=None, **values), True
    same = {"deployment": call.deployment, "number": call.seq}
    return session.scalars(_SAME, same).one(), False


def finish_call(
    session: Session,
    call_id: CallId,
    *,
    ok: bool,
    now_us: int,
    message: str = "",
    result_kept: bool = True,
) -> bool:
    """End a call, together with its ledger rows; false if it had ended before."""
    values = {
        "call_id": call_id,
        "new_state": CallState.DONE if ok else CallState.FAILED,
        "kept": result_kept,
        "now_us": now_us,
        "why": message,
    }
    return session.execute(_FINISH, values).first() is not None


def get_call(session: Session, call_id: CallId) -> CallRow | None:
    """The row behind a request id."""
    return session.scalars(_fresh(CALLS.c.id == call_id)).one_or_none()


def waiting_calls(session: Session, job_id: JobId | None = None) -> list[CallRow]:
    """Calls that have not ended, of one job or of all. Called when a daemon starts."""
    asked = _WAITING if job_id is None else _WAITING.where(CALLS.c.job_id == job_id)
    return list(session.scalars(asked.execution_options(populate_existing=True)))


def ended_since(session: Session, deployment: DeploymentId, *, seq: int) -> list[CallRow]:
    """Ended calls from ``seq`` on, in order: what a rewind to an image has to run again."""
    asked = _fresh(
        CALLS.c.deployment_id == deployment,
        CALLS.c.seq >= seq,
        CALLS.c.state != CallState.WAITING,
    )
    return list(session.scalars(asked.order_by(CALLS.c.seq)))


def drop_bodies_below(session: Session, deployment: DeploymentId, *, seq: int) -> Sequence[CallId]:
    """Mark bodies below ``seq`` as gone; the caller deletes the files named in the answer."""
    drop = (
        update(CALLS)
        .where(
            CALLS.c.deployment_id == deployment,
            CALLS.c.seq < seq,
            CALLS.c.body_kept,
            CALLS.c.state != CallState.WAITING,
        )
        .values(body_kept=False)
        .returning(CALLS.c.id)
    )
    return [CallId(found) for found in session.scalars(drop)]


def drop_results(session: Session, call_ids: Sequence[CallId]) -> None:
    """Mark results as gone: nobody will ask for them again."""
    session.execute(update(CALLS).where(CALLS.c.id.in_(call_ids)).values(result_kept=False))


def _fresh(*where: ColumnElement[bool]) -> Select[CallRow]:
    return select(CallRow).where(*where).execution_options(populate_existing=True)
