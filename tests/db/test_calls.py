"""Calls are stored once, ended once, and found again by what a restart needs."""

from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import CallId
from plexrl_slurm.db import calls
from plexrl_slurm.db.engine import transaction
from plexrl_slurm.db.models import CallRow, CallState
from tests.db.builders import add_deployment, add_job, make_call


def test_a_repeat_gives_the_first_call(session: Session) -> None:
    job = add_job(session)
    model = add_deployment(session, job)
    first, repeat = make_call(job, model, seq=4), make_call(job, model, seq=4)
    row, created = calls.record_call(session, first, now_us=5)
    assert created and row.id == first.id and row.ended_us is None
    assert calls.finish_call(session, first.id, ok=True, now_us=8)
    row, created = calls.record_call(session, repeat, now_us=9)
    assert not created
    assert (row.id, row.submitted_us, row.state) == (first.id, 5, CallState.DONE)


def test_of_many_concurrent_repeats_one_is_stored(engine: Engine) -> None:
    with transaction(engine) as session:
        job = add_job(session)
        model = add_deployment(session, job)

    def record(_: int) -> tuple[str, bool]:
        with transaction(engine) as session:
            row, created = calls.record_call(session, make_call(job, model, seq=1), now_us=0)
            return row.id, created

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(record, range(24)))
    assert len({call_id for call_id, _ in answers}) == 1
    assert [created for _, created in answers].count(True) == 1
    with transaction(engine) as session:
        assert session.scalar(select(func.count()).select_from(CallRow)) == 1


def test_a_call_ends_once(session: Session) -> None:
    job = add_job(session)
    call = make_call(job, add_deployment(session, job))
    calls.record_call(session, call, now_us=0)
    assert calls.finish_call(session, call.id, ok=False, now_us=3, message="NaN in advantages")
    assert not calls.finish_call(session, call.id, ok=True, now_us=4)
    row = calls.get_call(session, call.id)
    assert row is not None
    assert (row.state, row.message, row.ended_us) == (CallState.FAILED, "NaN in advantages", 3)
    assert calls.get_call(session, CallId("nobody")) is None


def test_a_restart_finds_what_waits_and_what_an_image_does_not_hold(session: Session) -> None:
    job, other = add_job(session), add_job(session)
    model = add_deployment(session, job)
    asked = [make_call(job, model, seq=seq) for seq in range(6)]
    for call in reversed(asked):
        calls.record_call(session, call, now_us=7)
    for call in asked[:4]:
        calls.finish_call(session, call.id, ok=True, now_us=8)
    foreign = make_call(other, add_deployment(session, other))
    calls.record_call(session, foreign, now_us=1)
    assert [row.id for row in calls.waiting_calls(session)] == [
        foreign.id, asked[4].id, asked[5].id,
    ]  # fmt: skip
    assert [row.seq for row in calls.waiting_calls(session, job)] == [4, 5]
    assert [row.seq for row in calls.ended_since(session, model, seq=2)] == [2, 3]


def test_bodies_below_an_image_are_dropped_once(session: Session) -> None:
    job = add_job(session)
    model = add_deployment(session, job)
    asked = [make_call(job, model, seq=seq) for seq in range(4)]
    for call in asked:
        calls.record_call(session, call, now_us=0)
    for call in asked[1:]:
        calls.finish_call(session, call.id, ok=True, now_us=1)
    dropped = calls.drop_bodies_below(session, model, seq=3)
    assert set(dropped) == {asked[1].id, asked[2].id}, "call 0 waits still and needs its body"
    assert calls.drop_bodies_below(session, model, seq=3) == []
    calls.drop_results(session, [asked[3].id])
    kept = {row.seq: (row.body_kept, row.result_kept) for row in session.scalars(select(CallRow))}
    assert kept == {0: (True, False), 1: (False, True), 2: (False, True), 3: (True, False)}
