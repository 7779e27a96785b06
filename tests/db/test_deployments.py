"""Sessions, deployments and their images."""

import pytest
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.core.ids import DeploymentId, JobId, WpgId
from plexrl_slurm.db import deployments
from plexrl_slurm.db.models import DeploymentState, SessionRow
from tests.db.builders import TRAIN, add_deployment, add_job


def open_session(
    session: Session, job_id: JobId, *, session_id: str = "s1", key: str = "k", now_us: int = 0
) -> SessionRow:
    return deployments.open_session(
        session,
        session_id=session_id,
        job_id=job_id,
        idempotency_key=key,
        metadata={"sdk": "0.38"},
        now_us=now_us,
    )


def test_the_same_key_gives_the_same_session_within_a_job(session: Session) -> None:
    job, other = add_job(session), add_job(session)
    first = open_session(session, job)
    assert open_session(session, job, session_id="s2", now_us=9).id == first.id
    assert open_session(session, other, session_id="s3").id == "s3"
    found = deployments.get_session(session, "s1")
    assert (found.user_metadata, found.created_us) == ({"sdk": "0.38"}, 0)
    with pytest.raises(NotFound, match="no session 's2'"):
        deployments.get_session(session, "s2")


def test_a_finished_session_has_no_heartbeat_and_keeps_its_first_reason(session: Session) -> None:
    open_session(session, add_job(session))
    assert deployments.heartbeat(session, "s1", now_us=5)
    assert deployments.finish_session(session, "s1", reason="closed", now_us=6)
    assert not deployments.finish_session(session, "s1", reason="timeout", now_us=7)
    assert not deployments.heartbeat(session, "s1", now_us=8)
    assert not deployments.heartbeat(session, "unknown", now_us=8)
    row = deployments.get_session(session, "s1")
    assert (row.heartbeat_us, row.finished_us, row.finish_reason) == (5, 6, "closed")


def test_silent_sessions_are_the_open_ones_that_stopped_beating(session: Session) -> None:
    job = add_job(session)
    for name, beat in (("quiet", 10), ("loud", 20), ("over", 10)):
        open_session(session, job, session_id=name, key=name, now_us=beat)
    deployments.finish_session(session, "over", reason="", now_us=11)
    assert [row.id for row in deployments.silent_sessions(session, before_us=20)] == ["quiet"]
    assert {row.id for row in deployments.open_sessions(session, job)} == {"quiet", "loud"}
    assert deployments.open_sessions(session, JobId(job + 1)) == []


def test_a_repeated_create_gives_the_first_deployment(session: Session) -> None:
    job = add_job(session)
    opened = open_session(session, job)

    def create(name: str, base_model: str) -> tuple[str, str, bool]:
        row, created = deployments.create_deployment(
            session,
            deployment_id=DeploymentId(name),
            job_id=job,
            session_id=opened.id,
            model_seq_id=3,
            base_model=base_model,
            wpg=TRAIN,
            rank=0,
            seed=1,
            user_metadata={},
            image_bytes=5,
            now_us=0,
        )
        return row.id, row.base_model, created

    assert create("m1", "tiny") == ("m1", "tiny", True)
    assert create("m2", "other") == ("m1", "tiny", False)


def test_an_image_replaces_the_former_one_of_its_tier_and_sets_the_progress(
    session: Session,
) -> None:
    model = add_deployment(session, add_job(session))
    for now_us, tier, seq in ((1, "host", 4), (2, "nvme", 4), (3, "host", 9)):
        deployments.image_completed(
            session, model, wpg=TRAIN, tier=tier, progress=(seq, 1), bytes=77, now_us=now_us
        )
    images = deployments.images_of(session, model)
    assert [(image.tier, image.seq) for image in images] == [("host", 9), ("nvme", 4)]
    row = deployments.get_deployment(session, model)
    assert (row.image_seq, row.image_part, row.image_bytes) == (9, 1, 77)


def test_a_durable_image_counts_only_if_it_is_newer(session: Session) -> None:
    model = add_deployment(session, add_job(session))
    assert deployments.persisted(session, model, progress=(4, 1), path="/shared/a")
    assert not deployments.persisted(session, model, progress=(4, 0), path="/shared/b")
    assert deployments.persisted(session, model, progress=(5, 0), path="/shared/c")
    row = deployments.get_deployment(session, model)
    assert (row.durable_seq, row.durable_part, row.durable_path) == (5, 0, "/shared/c")


def test_a_deployment_that_falls_back_has_the_older_images_only(session: Session) -> None:
    model = add_deployment(session, add_job(session))
    for tier, seq in (("host", 4), ("nvme", 9)):
        deployments.image_completed(
            session, model, wpg=TRAIN, tier=tier, progress=(seq, 0), bytes=77, now_us=1
        )
    deployments.persisted(session, model, progress=(9, 0), path="/shared/c")
    deployments.fell_back(session, model, image=(4, 0), durable=(2, 1), path="/shared/b", now_us=2)
    row = deployments.get_deployment(session, model)
    assert (row.durable_seq, row.durable_part, row.durable_path) == (2, 1, "/shared/b")
    assert (row.image_seq, [each.seq for each in deployments.images_of(session, model)]) == (4, [4])
    deployments.fell_back(session, model, image=None, durable=None, path="", now_us=3)
    row = deployments.get_deployment(session, model)
    assert (row.durable_seq, row.durable_path, row.image_seq) == (None, "", None)
    assert deployments.images_of(session, model) == []


def test_a_deployment_that_moves_leaves_its_host_image_behind(session: Session) -> None:
    model = add_deployment(session, add_job(session))
    deployments.image_completed(
        session, model, wpg=TRAIN, tier="host", progress=(4, 0), bytes=77, now_us=1
    )
    deployments.moved(session, model, wpg=WpgId("train-7"), now_us=2)
    row = deployments.get_deployment(session, model)
    assert (row.wpg, row.image_seq) == ("train-7", None)
    assert deployments.images_of(session, model) == []


def test_a_dropped_deployment_is_gone_once_with_its_images(session: Session) -> None:
    job = add_job(session)
    model, other = add_deployment(session, job), add_deployment(session, job)
    deployments.image_completed(
        session, model, wpg=TRAIN, tier="host", progress=(0, 0), bytes=1, now_us=1
    )
    assert deployments.drop_deployment(session, model, now_us=5)
    assert not deployments.drop_deployment(session, model, now_us=6)
    assert deployments.images_of(session, model) == []
    assert [row.id for row in deployments.placed_deployments(session)] == [other]
    states = {row.id: row.state for row in deployments.deployments_of(session, job)}
    assert states == {model: DeploymentState.DROPPED, other: DeploymentState.PLACED}
    with pytest.raises(NotFound, match="no model 'x'"):
        deployments.get_deployment(session, DeploymentId("x"))
