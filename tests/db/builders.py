"""Rows with the dull fields filled in."""

from itertools import count
from typing import Any

from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Activity, Call, Charge, FunctionKind, Pool, Wpg
from plexrl_slurm.db import calls, deployments, holds, ledger, queue, snapshots
from plexrl_slurm.db.models import JobRow

_numbers = count(1)
TRAIN, ROLLOUT = WpgId("train-0"), WpgId("rollout-0")
HOLD = "hold-1"


def add_job(session: Session, /, *, bound: bool = True, now_us: int = 0, **given: Any) -> JobId:
    fields: dict[str, Any] = {
        "partition": "rl",
        "name": "count",
        "uid": 1000,
        "user": "ada",
        "account": "lab",
        "script": "job.sh",
        "models": ["tiny"],
        "priority": 0,
        "seed": 7,
        "options": {"model": "tiny"},
        "token_sha256": None,
    }
    job_id = queue.submit(session, now_us=now_us, **(fields | given))
    if bound:
        queue.bind(session, job_id, slurm_id=SlurmId(f"{100 + job_id}"), now_us=now_us)
    return job_id


def claim(session: Session, *, owner: str = "daemon-1", now_us: int = 0) -> JobRow | None:
    return queue.claim(session, partition="rl", owner=owner, lease_us=100, now_us=now_us)


def add_running_job(session: Session, *, started_us: int = 0, **given: Any) -> JobId:
    job_id = add_job(session, **given)
    row = claim(session)
    assert row is not None and row.id == job_id
    queue.start(session, job_id, owner="daemon-1", now_us=started_us)
    return job_id


def add_deployment(session: Session, job_id: JobId, *, wpg: WpgId = TRAIN) -> DeploymentId:
    number = next(_numbers)
    opened = deployments.open_session(
        session,
        session_id=f"session-{number}",
        job_id=job_id,
        idempotency_key=f"key-{number}",
        metadata={},
        now_us=0,
    )
    row, created = deployments.create_deployment(
        session,
        deployment_id=DeploymentId(f"model-{number}"),
        job_id=job_id,
        session_id=opened.id,
        model_seq_id=0,
        base_model="tiny",
        wpg=wpg,
        rank=0,
        seed=1,
        user_metadata={},
        image_bytes=1 << 20,
        now_us=0,
    )
    assert created
    return DeploymentId(row.id)


def add_snapshot(
    session: Session,
    job_id: JobId,
    *,
    deployment: DeploymentId | None = None,
    uri: str | None = None,
    ready: bool = True,
) -> DeploymentId:
    snapshot = DeploymentId(f"snapshot-{next(_numbers)}")
    snapshots.create_snapshot(
        session,
        snapshot_id=snapshot,
        job_id=job_id,
        deployment_id=deployment,
        base_model="tiny",
        seq=0,
        wpg=ROLLOUT,
        uri=uri,
        path="/spool/x",
        content="c",
        bytes=10,
        ready=ready,
        now_us=0,
    )
    return snapshot


def make_call(
    job_id: JobId,
    deployment: DeploymentId,
    *,
    seq: int = 0,
    kind: FunctionKind = FunctionKind.OPTIM_STEP,
) -> Call:
    call_id = CallId(f"call-{next(_numbers)}")
    return Call(id=call_id, deployment=deployment, job=job_id, kind=kind, seq=seq)


def add_step(
    session: Session,
    job_id: JobId,
    deployment: DeploymentId,
    *,
    seq: int,
    at_us: int,
    ok: bool = True,
) -> None:
    call = make_call(job_id, deployment, seq=seq)
    calls.record_call(session, call, now_us=at_us)
    assert calls.finish_call(session, call.id, ok=ok, now_us=at_us)


def add_hold(
    session: Session,
    *,
    gpus: int = 2,
    now_us: int = 0,
    wpgs: tuple[WpgId, ...] = (TRAIN,),
    partition: str = "rl",
) -> None:
    holds.open_hold(
        session,
        hold_id=HOLD,
        partition=partition,
        backend="local",
        slurm_id=SlurmId("9"),
        epoch="e1",
        now_us=now_us,
    )
    pools = {TRAIN: Pool.TRAIN, ROLLOUT: Pool.ROLLOUT}
    held = [Wpg(id=wpg, pool=pools[wpg], gpus=gpus) for wpg in wpgs]
    holds.hold_wpgs(session, HOLD, [holds.Stay(wpg=wpg, held_us=now_us) for wpg in held])


def charge(
    session: Session,
    start_us: int,
    stop_us: int,
    *,
    activity: Activity = Activity.IDLE,
    job: JobId | None = None,
    wpg: WpgId = TRAIN,
    gpu_us: int | None = None,
    gpus: int = 2,
    call: CallId | None = None,
) -> None:
    """Book one stretch."""
    booked = Charge(
        wpg=wpg,
        activity=activity,
        job=job,
        call=call,
        start_us=start_us,
        stop_us=stop_us,
        gpu_us=(stop_us - start_us) * gpus if gpu_us is None else gpu_us,
        cause=CauseId("test"),
    )
    ledger.append(session, [booked], holds={TRAIN: HOLD, ROLLOUT: HOLD})
