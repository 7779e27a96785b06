"""What Slurm says of holds is kept and compared; what it is told of jobs is what reports say."""

from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Activity, Pool, Wpg
from plexrl_slurm.db import holds, reports
from plexrl_slurm.db.models import HoldRow, SlurmUsageRow
from plexrl_slurm.db.usage import open_usage, record_usage, summary_of
from tests.db.builders import (
    HOLD,
    TRAIN,
    add_deployment,
    add_hold,
    add_job,
    add_running_job,
    charge,
)
from tests.db.test_reports import at, tell_the_story

SECOND = 1_000_000


def say_usage(
    session: Session,
    start: int,
    end: int | None,
    *,
    component: str = "9",
    gpus: int = 2,
    asked: int = 10_000,
) -> None:
    """What sacct says at the second ``asked``."""
    record_usage(
        session,
        HOLD,
        slurm_id=component,
        start_us=at(start),
        end_us=None if end is None else at(end),
        elapsed_us=((asked if end is None else end) - start) * SECOND,
        gpus=gpus,
        word="RUNNING" if end is None else "CANCELLED",
        now_us=at(asked),
    )


def usage(session: Session) -> list[tuple[Any, ...]]:
    row = SlurmUsageRow
    asked = select(row.slurm_id, row.start_us, row.end_us, row.elapsed_us, row.word)
    return [tuple(found) for found in session.execute(asked.order_by(row.id))]


def reconcile(session: Session) -> dict[str, Any]:
    report = reports.run_report(session, "reconcile")
    (row,) = report.rows
    return dict(zip(report.columns, row, strict=True))


@pytest.fixture
def held(session: Session) -> Session:
    """A hold whose only WPG of two GPUs is idle from 0 to 1000 s."""
    add_hold(session, now_us=at(0))
    session.execute(update(HoldRow).values(backend="slurm"))
    charge(session, at(0), at(1_000))
    return session


def test_an_incarnation_is_kept_once_and_follows_the_news(held: Session) -> None:
    say_usage(held, 0, None, asked=50)
    say_usage(held, 0, 60, asked=70)
    say_usage(held, 0, None, asked=55)
    say_usage(held, 90, None, asked=100)
    assert usage(held) == [
        ("9", at(0), at(60), 60 * SECOND, "CANCELLED"),
        ("9", at(90), None, 10 * SECOND, "RUNNING"),
    ]


def test_what_never_started_has_used_nothing(held: Session) -> None:
    record_usage(
        held, HOLD, slurm_id="9", start_us=None, end_us=at(5), elapsed_us=0, gpus=2,
        word="CANCELLED", now_us=at(5),
    )  # fmt: skip
    assert usage(held) == []


def test_slurm_is_asked_again_until_it_has_said_its_last_word(held: Session) -> None:
    assert open_usage(held, "rl") == []
    holds.end_hold(held, HOLD, now_us=at(1_000))
    assert open_usage(held, "rl") == [HOLD]
    say_usage(held, 0, None, asked=999)
    assert open_usage(held, "rl") == [HOLD]
    say_usage(held, 0, 1_000, asked=1_001)
    assert open_usage(held, "rl") == []
    assert open_usage(held, "other") == []


@pytest.mark.parametrize(
    ("elapsed", "agrees"),
    # Booked: 2000 GPU-s. Allowed: 1 % and 2 s.
    [(1_000, "yes"), (990, "yes"), (989, "no"), (1_011, "yes"), (1_012, "no")],
)
def test_books_and_slurm_agree_within_a_percent_and_a_second(
    held: Session, elapsed: int, agrees: str
) -> None:
    say_usage(held, 0, elapsed)
    found = reconcile(held)
    assert found["ledger_gpu_us"] == 2_000 * SECOND
    assert found["sacct_gpu_us"] == 2 * elapsed * SECOND
    assert found["difference_gpu_us"] == 2 * (1_000 - elapsed) * SECOND
    assert found["agrees"] == agrees


def test_components_and_incarnations_are_added_up(held: Session) -> None:
    say_usage(held, 0, 400, component="9", gpus=1)
    say_usage(held, 500, 1_000, component="9", gpus=1)
    say_usage(held, 0, 1_000, component="10", gpus=1)
    found = reconcile(held)
    assert (found["components"], found["incarnations"]) == (2, 3)
    assert found["sacct_gpu_us"] == 1_900 * SECOND
    assert found["allowed_gpu_us"] == (19 + 3) * SECOND
    assert found["difference_percent"] == 5.263
    assert found["agrees"] == "no"


def test_a_hold_that_lost_a_node_is_counted_with_what_it_had(held: Session) -> None:
    # As sacct gives it: RUNNING first, RESIZING when the node is lost, then fewer GPUs.
    say_usage(held, 0, None, gpus=4, asked=300)
    say_usage(held, 0, 400, gpus=4)
    say_usage(held, 400, 600, gpus=2)
    assert usage(held)[0][2:4] == (at(400), 400 * SECOND)
    found = reconcile(held)
    assert (found["components"], found["incarnations"]) == (1, 2)
    assert (found["sacct_gpu_us"], found["agrees"]) == (2_000 * SECOND, "yes")


def test_of_a_running_hold_both_are_taken_up_to_one_instant(held: Session) -> None:
    say_usage(held, 0, None, asked=500)
    assert (reconcile(held)["ledger_gpu_us"], reconcile(held)["sacct_gpu_us"]) == (10**9, 10**9)
    # Its books are closed up to 1000 s only, and a component ended before.
    say_usage(held, 0, None, asked=1_050)
    say_usage(held, 0, 100, component="10", gpus=4)
    found = reconcile(held)
    assert (found["ledger_gpu_us"], found["sacct_gpu_us"]) == (2 * 10**9, 2 * 10**9 + 400 * SECOND)


def test_a_hold_of_which_slurm_has_said_nothing_is_unknown(held: Session) -> None:
    found = reconcile(held)
    assert (found["agrees"], found["sacct_gpu_us"], found["difference_percent"]) == (
        "unknown", None, None,
    )  # fmt: skip


def test_holds_without_slurm_are_left_out(held: Session) -> None:
    held.execute(update(HoldRow).values(backend="local"))
    assert reports.run_report(held, "reconcile").rows == ()


def test_the_summary_says_what_the_reports_say(session: Session) -> None:
    tell_the_story(session)
    report = reports.run_report(session, "savings")
    row_id = report.columns.index("job_id")
    saved = {row[row_id]: row[-1] for row in report.rows}
    assert summary_of(session, JobId(1)) == (
        f"plexrl: job 101, busy 66.7 GPU-s, switch 12.0, kept 0.0, saved {saved[1]:.0f} %"
    )
    assert summary_of(session, JobId(2)) == (
        f"plexrl: job 102, busy 133.3 GPU-s, switch 80.0, kept 2.0, saved {saved[2]:.0f} %"
    )
    assert summary_of(session, JobId(3)) == "plexrl: job 103, busy 0.0 GPU-s, switch 0.0, kept 0.0"


def test_a_job_that_lived_nowhere_saved_nothing(session: Session) -> None:
    add_hold(session, now_us=at(0))
    job = add_running_job(session, started_us=at(0))
    charge(session, at(0), at(9), activity=Activity.BUSY, job=job)
    assert summary_of(session, job) == (
        f"plexrl: job {100 + job}, busy 18.0 GPU-s, switch 0.0, kept 0.0"
    )


def test_the_summary_is_short_and_has_nothing_of_the_users(session: Session) -> None:
    job = add_job(session, name="x" * 900, user="y" * 900)
    assert len(summary_of(session, job)) < 250
    assert "xx" not in summary_of(session, job)
    assert "yy" not in summary_of(session, job)


def test_gpus_of_two_holds_in_turn_count_once(session: Session) -> None:
    tell_the_story(session)
    holds.open_hold(
        session,
        hold_id="hold-2",
        partition="rl",
        backend="slurm",
        slurm_id=SlurmId("8"),
        epoch="e2",
        now_us=at(200),
    )
    moved = Wpg(id=WpgId("hold-2.train-0"), pool=Pool.TRAIN, gpus=2)
    stay = holds.Stay(wpg=moved, slot=TRAIN, held_us=at(200))
    holds.hold_wpgs(session, "hold-2", [stay])
    add_deployment(session, JobId(1), wpg=moved.id)
    report = reports.run_report(session, "savings")
    gpus = report.columns.index("dedicated_gpus")
    assert [row[gpus] for row in report.rows] == [4, 4]
    assert summary_of(session, JobId(1)).endswith(f"saved {report.rows[0][-1]:.0f} %")
