"""Snapshots, the sampling sessions that pin them, and named checkpoints."""

from typing import Any

import pytest
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import BadInput, NotFound
from plexrl_slurm.core.ids import DeploymentId, JobId
from plexrl_slurm.db import checkpoints, deployments, snapshots
from plexrl_slurm.db.models import CheckpointKind, SnapshotState
from tests.db.builders import add_deployment, add_job, add_snapshot


def pin(session: Session, snapshot: DeploymentId, *, seq: int = 0) -> tuple[str, str, bool]:
    found = snapshots.get_snapshot(session, snapshot)
    opened = deployments.open_sessions(session)[0]
    row, created = snapshots.open_sampling_session(
        session,
        sampler_id=f"sampler-of-{snapshot}",
        session_id=opened.id,
        seq=seq,
        snapshot_id=snapshot,
        job_id=JobId(found.job_id),
        now_us=1,
    )
    return row.id, row.snapshot_id, created


def test_a_snapshot_is_ready_once_its_file_is(session: Session) -> None:
    job = add_job(session)
    waiting, broken = (add_snapshot(session, job, ready=False) for _ in range(2))
    snapshots.snapshot_ready(session, waiting, bytes=123, now_us=8)
    snapshots.snapshot_failed(session, broken)
    row = snapshots.get_snapshot(session, waiting)
    assert (row.state, row.bytes, row.ready_us) == (SnapshotState.READY, 123, 8)
    assert [row.id for row in snapshots.live_snapshots(session, job)] == [waiting]
    with pytest.raises(NotFound, match="no snapshot 'x'"):
        snapshots.snapshot_failed(session, DeploymentId("x"))


def test_a_name_leads_to_its_newest_living_snapshot(session: Session) -> None:
    job = add_job(session)
    first, second = (add_snapshot(session, job, uri="tinker://r/a") for _ in range(2))
    found = snapshots.snapshot_by_uri(session, "tinker://r/a")
    assert found is not None and found.id == max(first, second)
    snapshots.drop_snapshot(session, DeploymentId(found.id))
    found = snapshots.snapshot_by_uri(session, "tinker://r/a")
    assert found is not None and found.id == min(first, second)
    assert snapshots.snapshot_by_uri(session, "tinker://r/b") is None


def test_only_unpinned_ephemeral_snapshots_may_be_collected(session: Session) -> None:
    job = add_job(session)
    model = add_deployment(session, job)
    pinned, loose = (add_snapshot(session, job, deployment=model) for _ in range(2))
    add_snapshot(session, job, uri="tinker://r/named")
    sampler, _, created = pin(session, pinned)
    assert created
    assert [row.id for row in snapshots.unpinned_snapshots(session, before_us=9)] == [loose]
    assert snapshots.unpinned_snapshots(session, before_us=0) == []
    assert snapshots.close_sampling_session(session, sampler, now_us=2)
    assert not snapshots.close_sampling_session(session, sampler, now_us=3)
    loosened = {row.id for row in snapshots.unpinned_snapshots(session, before_us=9)}
    assert loosened == {pinned, loose}


def test_a_repeated_sampling_session_is_the_first_one(session: Session) -> None:
    job = add_job(session)
    model = add_deployment(session, job)
    one, two = (add_snapshot(session, job, deployment=model) for _ in range(2))
    first = pin(session, one)
    assert pin(session, two) == (first[0], one, False)
    snapshots.touch_sampling_sessions(session, {first[0]: 50})
    assert snapshots.get_sampling_session(session, first[0]).last_used_us == 50
    assert snapshots.open_sampling_sessions(session, unused_since_us=50) == []
    found = snapshots.open_sampling_sessions(session, job_id=job, unused_since_us=51)
    assert [row.id for row in found] == [first[0]]


def save(session: Session, model: DeploymentId, **given: Any) -> None:
    row = deployments.get_deployment(session, model)
    fields: dict[str, Any] = {
        "job_id": row.job_id,
        "uid": 1000,
        "uri": "tinker://r/weights/a",
        "kind": CheckpointKind.WEIGHTS,
        "name": "a",
        "deployment_id": model,
        "base_model": "tiny",
        "rank": 0,
        "path": "/checkpoints/a",
        "bytes": 9,
        "user_metadata": {"step": 3},
        "now_us": 1,
    }
    checkpoints.add_checkpoint(session, **(fields | given))


def test_a_checkpoint_is_found_by_uri_and_by_owner(session: Session) -> None:
    model = add_deployment(session, add_job(session))
    save(session, model)
    save(session, model, uri="tinker://r/weights/b", uid=7, expires_us=100)
    row = checkpoints.find_checkpoint(session, "tinker://r/weights/a")
    assert row is not None and (row.user_metadata, row.kind) == ({"step": 3}, "weights")
    assert [row.name for row in checkpoints.list_checkpoints(session, uid=1000)] == ["a"]
    found = checkpoints.list_checkpoints(session, uid=1000, deployment_id=DeploymentId("x"))
    assert found == []
    expired = checkpoints.expired_checkpoints(session, now_us=100)
    assert [row.uri for row in expired] == ["tinker://r/weights/b"]
    assert checkpoints.expired_checkpoints(session, now_us=99) == []


def test_a_checkpoint_is_replaced_only_when_asked_to(session: Session) -> None:
    model = add_deployment(session, add_job(session))
    save(session, model)
    with pytest.raises(BadInput, match="weights/a exists: choose another name"):
        save(session, model, bytes=10)
    save(session, model, bytes=10, overwrite=True)
    [row] = checkpoints.list_checkpoints(session, uid=1000)
    assert row.bytes == 10
    assert checkpoints.delete_checkpoint(session, row.uri)
    assert not checkpoints.delete_checkpoint(session, row.uri)
