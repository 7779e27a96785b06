"""What jobs used, read as the ledger grows; how long their like ran before."""

from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.core.states import JobState
from plexrl_slurm.db import queue
from plexrl_slurm.db.attributed import attributed, usual_lengths
from tests.db.builders import add_hold, add_job, add_running_job, charge


def read(session: Session, after: int = 0, since_us: int = 0) -> tuple[int, list[tuple[int, ...]]]:
    last, found = attributed(session, "rl", after=after, since_us=since_us, bucket_us=100)
    return last, [(each.job, each.at_us, each.gpu_us) for each in found]


def test_every_stretch_of_a_job_is_read_once(session: Session) -> None:
    add_hold(session)
    ada = add_running_job(session)
    bob = add_running_job(session, user="bob", account="bio", options={"qos": "fast"})
    for start, job in ((0, ada), (10, ada), (20, bob), (30, None), (150, ada)):
        activity = Activity.BUSY if job is not None else Activity.IDLE
        charge(session, start, start + 10, activity=activity, job=job)
    last, found = read(session)
    assert found == [(ada, 50, 40), (ada, 150, 20), (bob, 50, 20)]
    assert read(session, last) == (last, [])
    charge(session, 160, 170, activity=Activity.SWITCH, job=bob)
    assert read(session, last)[1] == [(bob, 150, 20)]
    _, every = attributed(session, "rl", after=0, since_us=0, bucket_us=100)
    assert {(each.user, each.account, each.qos) for each in every} == {
        ("ada", "lab", "normal"),
        ("bob", "bio", "fast"),
    }


def test_old_stretches_and_other_partitions_are_left_out(session: Session) -> None:
    add_hold(session)
    job = add_running_job(session)
    charge(session, 0, 10, activity=Activity.BUSY, job=job)
    charge(session, 20, 30, activity=Activity.BUSY, job=job)
    assert read(session, since_us=10)[1] == [(job, 50, 20)]
    assert attributed(session, "other", after=0, since_us=0, bucket_us=100) == (0, [])


def ended(
    session: Session, length: int, *, state: JobState = JobState.COMPLETED, **of: object
) -> None:
    job = add_running_job(session, started_us=1000, **of)
    queue.finish(session, job, state=state, now_us=1000 + length)


def test_a_job_usually_runs_as_long_as_the_last_of_its_kind_that_completed(
    session: Session,
) -> None:
    for length in (9_000, 100, 200, 300, 400, 500):
        ended(session, length)
    ended(session, 5, state=JobState.FAILED)
    ended(session, 6, name="other")
    ended(session, 7, models=["large"])
    mine, stranger = add_job(session), add_job(session, user="eve")
    rows = [queue.get(session, job) for job in (mine, stranger)]
    assert usual_lengths(session, "rl", rows) == {mine: 300}


def test_a_named_job_is_claimed_once_and_only_where_it_may_be(session: Session) -> None:
    first, second = add_job(session), add_job(session)
    unbound = add_job(session, bound=False)

    def take(job: JobId, partition: str = "rl") -> int | None:
        row = queue.claim(session, partition=partition, owner="d", lease_us=9, now_us=5, job=job)
        return None if row is None else row.id

    assert take(second, "other") is None
    assert [take(job) for job in (second, second, unbound, first)] == [second, None, None, first]
    row = queue.get(session, second)
    assert (row.state, row.owner, row.admitted_us) == (JobState.ADMITTED, "d", 5)
    assert {each.id for each in queue.living(session, "rl")} == {first, second, unbound}


def test_whoever_is_not_in_the_queue_any_more_keeps_the_reason_of_its_end(session: Session) -> None:
    waiting, over = add_job(session), add_job(session)
    queue.cancel(session, over, reason="by ada", now_us=2)
    for tell in (True, False):
        for job in (waiting, over):
            queue.keep_waiting(session, job, obstacles=["no room"], tell=tell, now_us=3)
    assert queue.get(session, waiting).reason == "no room"
    assert queue.get(session, over).reason == "by ada"
    told = [line.text for line in queue.story(session, waiting) if line.kind == "obstacles"]
    assert told == ["no room"]
