"""The queue: claims are exclusive, leases expire, ends are final."""

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import Denied, InvalidTransition, NotFound
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.core.states import JobState
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import open_database, transaction
from tests.db.builders import add_job, add_running_job, claim


def test_the_most_urgent_bound_job_is_claimed_once(session: Session) -> None:
    low, high = add_job(session), add_job(session, priority=9)
    add_job(session, priority=99, bound=False)
    add_job(session, priority=99, partition="other")
    taken = [claim(session, owner=f"daemon-{n}") for n in range(3)]
    assert [row and row.id for row in taken] == [high, low, None]
    assert taken[0] is not None
    assert (taken[0].state, taken[0].owner) == (JobState.ADMITTED, "daemon-0")


def test_a_row_whose_submitter_died_before_binding_it_is_ended(session: Session) -> None:
    old, bound = add_job(session, bound=False, now_us=10), add_job(session, now_us=10)
    young = add_job(session, bound=False, now_us=20)
    assert queue.drop_unbound(session, partition="rl", before_us=20, now_us=99) == [old]
    row = queue.get(session, old)
    assert (row.state, row.ended_us, row.billed) == (JobState.CANCELLED, 99, True)
    assert {queue.get(session, job).state for job in (bound, young)} == {JobState.PENDING}


def test_among_equals_the_oldest_job_is_claimed_first(session: Session) -> None:
    jobs = [add_job(session) for _ in range(3)]
    assert [row.id for row in (claim(session) for _ in jobs) if row] == jobs


def claim_all(url: str, owner: str) -> list[int]:
    """Claim until nothing is left."""
    engine = open_database(url)
    taken: list[int] = []
    while True:
        with transaction(engine) as session:
            row = queue.claim(session, partition="rl", owner=owner, lease_us=100, now_us=0)
        if row is None:
            engine.dispose()
            return taken
        taken.append(row.id)


def claim_in_threads(url: str, process: int) -> list[int]:
    """Body of one of the processes that fight for the queue."""
    with ThreadPoolExecutor(4) as pool:
        owners = [f"daemon-{process}-{n}" for n in range(4)]
        return [job for share in pool.map(claim_all, [url] * 4, owners) for job in share]


def test_eight_claimers_in_two_processes_claim_three_hundred_jobs_once_each(
    engine: Engine, database_url: str
) -> None:
    with transaction(engine) as session:
        jobs = [add_job(session) for _ in range(300)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        taken = list(pool.map(claim_in_threads, [database_url] * 2, range(2)))
    assert Counter(job for share in taken for job in share) == Counter(jobs)


def test_an_expired_lease_gives_the_job_back(session: Session) -> None:
    job = add_job(session)
    claim(session, now_us=1000)
    assert queue.requeue_expired(session, partition="rl", now_us=1099) == []
    assert queue.requeue_expired(session, partition="rl", now_us=1100) == [job]
    row = queue.get(session, job)
    assert (row.state, row.owner, row.requeues) == (JobState.PENDING, None, 1)
    again = claim(session, owner="daemon-2")
    assert again is not None and again.id == job


def test_a_heartbeat_keeps_the_lease(session: Session) -> None:
    add_job(session)
    claim(session, now_us=1000)
    assert queue.extend_leases(session, owner="daemon-1", lease_us=100, now_us=1050) == 1
    assert queue.extend_leases(session, owner="daemon-2", lease_us=100, now_us=1050) == 0
    assert queue.requeue_expired(session, partition="rl", now_us=1120) == []


def test_a_daemon_that_lost_its_job_may_not_start_it(session: Session) -> None:
    job = add_job(session)
    claim(session)
    adopted = queue.adopt(session, partition="rl", owner="daemon-2", lease_us=9, now_us=5)
    assert [row.id for row in adopted] == [job]
    number = queue.get(session, job).slurm_id
    with pytest.raises(Denied, match=f"job {number} belongs to daemon daemon-2, not to daemon-1"):
        queue.start(session, job, owner="daemon-1", now_us=6)
    queue.start(session, job, owner="daemon-2", now_us=6)
    assert queue.get(session, job).state == JobState.RUNNING


def test_a_running_job_survives_an_expired_lease(session: Session) -> None:
    job = add_running_job(session)
    assert queue.requeue_expired(session, partition="rl", now_us=10**9) == []
    assert queue.get(session, job).state == JobState.RUNNING


def test_a_claim_given_back_keeps_every_obstacle_and_tells_it_once(session: Session) -> None:
    job = add_job(session)
    why = ["train-0 has 1 GPU, 2 asked", "rollout-0 is down"]
    for now_us in (3, 4):
        claim(session)
        queue.unclaim(session, job, owner="daemon-1", obstacles=why, now_us=now_us)
    row = queue.get(session, job)
    assert (row.state, row.obstacles, row.reason) == (JobState.PENDING, why, why[0])
    assert [line.at_us for line in queue.story(session, job) if line.kind == "obstacles"] == [3]
    claim(session)
    queue.start(session, job, owner="daemon-1", now_us=5)
    assert queue.get(session, job).obstacles == []


def test_the_first_end_wins(session: Session) -> None:
    job = add_running_job(session)
    end = JobState.COMPLETED
    assert queue.finish(session, job, state=end, exit_code=0, now_us=50)
    assert not queue.cancel(session, job, reason="too late", now_us=60)
    row = queue.get(session, job)
    assert (row.state, row.exit_code, row.ended_us) == (end, 0, 50)


@pytest.mark.parametrize("begin", [add_job, add_running_job])
def test_a_job_can_be_cancelled_in_any_living_state(session: Session, begin: object) -> None:
    assert callable(begin)
    job = begin(session)
    assert queue.cancel(session, job, reason="by ada", now_us=9)
    row = queue.get(session, job)
    assert (row.state, row.reason, row.ended_us) == (JobState.CANCELLED, "by ada", 9)


def test_an_impossible_step_tells_the_story(session: Session) -> None:
    job = add_job(session)
    with pytest.raises(InvalidTransition, match=r"pending -> running\n.*queued job.sh"):
        queue.start(session, job, owner="daemon-1", now_us=1)


def test_names_begin_with_slurms_number_and_differ_where_slurm_begins_again(
    session: Session,
) -> None:
    jobs = [add_job(session, bound=False) for _ in range(4)]
    for job, number in zip(jobs, ("55", "55", "7_3"), strict=False):
        queue.bind(session, job, slurm_id=SlurmId(number), now_us=1)
    names = [queue.called(session, job) for job in jobs]
    assert names == ["job55", "job55.2", "job7_3", f"row{jobs[3]}"]


def test_binding_twice_is_harmless_and_to_another_id_is_denied(session: Session) -> None:
    job = add_job(session, bound=False)
    for _ in range(2):
        queue.bind(session, job, slurm_id=SlurmId("55"), now_us=1)
    with pytest.raises(Denied, match="bound to Slurm job 55"):
        queue.bind(session, job, slurm_id=SlurmId("56"), now_us=2)
    found = queue.by_slurm_id(session, partition="rl", slurm_id=SlurmId("55"))
    assert found is not None and found.id == job


def test_an_unknown_job_is_not_found(session: Session) -> None:
    with pytest.raises(NotFound, match="no job '12'"):
        queue.get(session, JobId(12))
    with pytest.raises(NotFound):
        queue.set_reason(session, JobId(12), reason="x")


def test_the_story_has_a_line_for_every_step(session: Session) -> None:
    job = add_running_job(session)
    queue.set_obstacles(session, job, obstacles=["no room"], now_us=4)
    queue.set_obstacles(session, job, obstacles=["no room"], now_us=5)
    queue.finish(session, job, state=JobState.FAILED, reason="exit code 3", now_us=9)
    kinds = [line.kind for line in queue.story(session, job)]
    assert kinds == ["submitted", "bound", "started", "obstacles", "failed"]


def test_a_list_obeys_all_its_filters(session: Session) -> None:
    old = add_running_job(session, user="bob")
    queue.finish(session, old, state=JobState.COMPLETED, now_us=10)
    new = add_job(session, user="bob")
    other = add_job(session, user="eve", partition="p2")

    def ids(**filters: object) -> list[int]:
        return [row.id for row in queue.list_jobs(session, **filters)]  # type: ignore[arg-type]

    assert ids() == [old, new, other]
    assert ids(user="bob") == [old, new]
    assert ids(user="bob", ended=False) == [new]
    assert ids(partition="p2") == [other]
    assert ids(states=[JobState.COMPLETED]) == [old]
    assert ids(since_us=11) == [new, other]


def test_a_job_is_found_by_its_token_with_its_json_intact(session: Session) -> None:
    job = add_job(session, token_sha256="ab12", options={"a": {"b": [1, None]}}, seed=2**62)
    row = queue.by_token(session, "ab12")
    assert row is not None
    assert (row.id, row.options, row.models) == (job, {"a": {"b": [1, None]}}, ["tiny"])
    assert row.seed == 2**62
    assert queue.by_token(session, "cd") is None
