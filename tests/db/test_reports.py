"""Reports equal numbers computed by hand, on both databases and through their own programs."""

import csv
import shutil
import subprocess
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.messages import Activity, FunctionKind
from plexrl_slurm.core.states import JobState
from plexrl_slurm.db import calls, ledger, queue, reports, usage
from plexrl_slurm.db.engine import transaction
from tests.db.builders import (
    HOLD,
    ROLLOUT,
    TRAIN,
    add_deployment,
    add_hold,
    add_job,
    add_running_job,
    add_snapshot,
    add_step,
    charge,
    make_call,
)

#: One minute before midnight UTC.
BEGIN = int(datetime(2026, 1, 14, 23, 59, tzinfo=UTC).timestamp()) * 1_000_000


def at(seconds: int) -> int:
    return BEGIN + seconds * 1_000_000


def tell_the_story(session: Session) -> None:
    """Two jobs share a training WPG and a rollout WPG of two GPUs each, for 200 seconds.

    ada's runs from 0 to 100 s, bob's from 40 s and 1 us on; a third one never starts.
    """
    add_hold(session, gpus=2, now_us=at(0), wpgs=(TRAIN, ROLLOUT))
    ada = add_running_job(session, started_us=at(0), name="a")
    queue.finish(session, ada, state=JobState.COMPLETED, now_us=at(100))
    bob = add_running_job(session, started_us=at(40) + 1, name="b", user="bob", uid=1001)
    add_job(session, name="c", partition="p2")
    models = [add_deployment(session, job) for job in (ada, bob)]
    for job, model in zip((ada, bob), models, strict=True):
        add_snapshot(session, job, deployment=model)
        add_snapshot(session, job, deployment=model)

    charge(session, at(0), at(10), activity=Activity.DOWN)
    charge(session, at(10), at(30), activity=Activity.BUSY, job=ada)
    charge(session, at(30), at(36), activity=Activity.SWITCH, job=ada)
    charge(session, at(36), at(50))
    charge(session, at(50), at(90), activity=Activity.BUSY, job=bob)
    charge(session, at(90), at(91), activity=Activity.KEPT, job=bob)
    charge(session, at(91), at(160))
    charge(session, at(160), at(200), activity=Activity.SWITCH, job=bob)

    charge(session, at(0), at(50), wpg=ROLLOUT)
    for job, gpu_us in ((ada, 26_666_666), (bob, 53_333_334)):
        busy = Activity.BUSY
        charge(session, at(50), at(90), activity=busy, job=job, wpg=ROLLOUT, gpu_us=gpu_us)
    charge(session, at(90), at(200), wpg=ROLLOUT)
    assert ledger.gaps(session, HOLD) == []
    for component, end in (("9", None), ("10", at(199))):
        usage.record_usage(
            session,
            HOLD,
            slurm_id=component,
            start_us=at(0),
            end_us=end,
            elapsed_us=(200 if end is None else 199) * 1_000_000,
            gpus=2,
            word="RUNNING" if end is None else "NODE_FAIL",
            now_us=at(200),
        )

    for seq, second in enumerate((20, 21, 70)):
        add_step(session, ada, models[0], seq=seq, at_us=at(second))
    add_step(session, ada, models[0], seq=3, at_us=at(71), ok=False)
    other = make_call(ada, models[0], seq=4, kind=FunctionKind.FORWARD_BACKWARD)
    calls.record_call(session, other, now_us=at(72))
    calls.finish_call(session, other.id, ok=True, now_us=at(73))
    add_step(session, bob, models[1], seq=0, at_us=at(85))


def hours(gpu_us: int, steps: int) -> float:
    return round(gpu_us / 3.6e9 / steps, 9)


#: bill = busy + switch + kept of each.
ADA_BILL, BOB_BILL = 40_000_000 + 26_666_666 + 12_000_000, 80_000_000 + 53_333_334 + 82_000_000
#: On the training WPG, then on the rollout WPG; 1 us of every odd split goes to ada (job 1).
ADA_IDLE = (8_000_002 + 9_999_999 + 9_000_000) + (80_000_002 + 9_999_999 + 10_000_000)
BOB_IDLE = (9_999_999 + 9_000_000 + 120_000_000) + (9_999_999 + 10_000_000 + 200_000_000)
#: Of the shared stretch, 10 of its 40 seconds lie before midnight. Whole GPUs are cut exactly,
#: what is left of a GPU by whole seconds, of which the stretch counts 41.
BEFORE = 26_666_666 * 10 // 41 + 10_000_000 + 13_333_334 * 10 // 41
BY_HAND = {
    "hold_summary": [
        (HOLD, ROLLOUT, "rollout", 2, 400_000_000, 80_000_000, 0, 0, 320_000_000, 0, 0),
        (HOLD, TRAIN, "train", 2, 400_000_000, 120_000_000, 92_000_000, 2_000_000, 166_000_000,
         20_000_000, 0),
    ],
    "usage_by_job": [
        ("p2", "103", 3, "c", "ada", "lab", "pending", 0, 0, 0, 0, 0, None),
        ("rl", "101", 1, "a", "ada", "lab", "completed", 66_666_666, 12_000_000, 0, ADA_BILL, 3,
         hours(ADA_BILL, 3)),
        ("rl", "102", 2, "b", "bob", "lab", "running", 133_333_334, 80_000_000, 2_000_000,
         BOB_BILL, 1, hours(BOB_BILL, 1)),
    ],
    "usage_by_user": [
        ("p2", "ada", 1000, 1, 0, 0, 0, 0, 0, None),
        ("rl", "ada", 1000, 1, 66_666_666, 12_000_000, 0, ADA_BILL, 3, hours(ADA_BILL, 3)),
        ("rl", "bob", 1001, 1, 133_333_334, 80_000_000, 2_000_000, BOB_BILL, 1,
         hours(BOB_BILL, 1)),
    ],
    "usage_by_account": [
        ("p2", "lab", 1, 0, 0, 0, 0, 0, None),
        ("rl", "lab", 2, 200_000_000, 92_000_000, 2_000_000, ADA_BILL + BOB_BILL, 4,
         hours(ADA_BILL + BOB_BILL, 4)),
    ],
    "usage_by_day": [
        ("rl", "2026-01-14", 60_000_000 + BEFORE, 12_000_000, 0, 128_000_000, 20_000_000,
         72_000_000 + BEFORE, 2, hours(72_000_000 + BEFORE, 2)),
        ("rl", "2026-01-15", 140_000_000 - BEFORE, 80_000_000, 2_000_000, 358_000_000, 0,
         222_000_000 - BEFORE, 2, hours(222_000_000 - BEFORE, 2)),
    ],
    "reconcile": [
        ("rl", HOLD, "9", "waiting", 2, 2, 800_000_000, 798_000_000, 2_000_000, 0.251, 11_980_000,
         "yes"),
    ],
    "steps": [
        ("rl", "101", 1, "a", "ada", "2026-01-14 23:00", 2),
        ("rl", "101", 1, "a", "ada", "2026-01-15 00:00", 1),
        ("rl", "102", 2, "b", "bob", "2026-01-15 00:00", 1),
    ],
    "savings": [
        ("rl", "101", 1, "a", "ada", "lab", "completed", 100_000_000, 66.667, 12.0, 0.0,
         ADA_BILL, ADA_IDLE, 3, round(ADA_BILL / 3e6, 6), round((ADA_BILL + ADA_IDLE) / 3e6, 6),
         4, 400_000_000, 400_000_000 - ADA_BILL - ADA_IDLE,
         round(100 * (400_000_000 - ADA_BILL - ADA_IDLE) / 400_000_000, 2)),
        ("rl", "102", 2, "b", "bob", "lab", "running", 159_999_999, 133.333, 80.0, 2.0,
         BOB_BILL, BOB_IDLE, 1, round(BOB_BILL / 1e6, 6), round((BOB_BILL + BOB_IDLE) / 1e6, 6),
         4, 639_999_996, 639_999_996 - BOB_BILL - BOB_IDLE,
         round(100 * (639_999_996 - BOB_BILL - BOB_IDLE) / 639_999_996, 2)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_a_report_equals_the_numbers_computed_by_hand(engine: Engine, name: str) -> None:
    with transaction(engine) as session:
        tell_the_story(session)
    with transaction(engine, read_only=True) as session:
        report = reports.run_report(session, name)
    assert list(report.rows) == BY_HAND[name]
    exact = [n for n, column in enumerate(report.columns) if column.endswith("_us")]
    assert all(type(row[n]) is int for row in report.rows for n in exact)


def test_the_idle_shares_add_up_to_the_idle_time(session: Session) -> None:
    tell_the_story(session)
    report = reports.run_report(session, "savings")
    column = report.columns.index("idle_share_gpu_us")
    spent = ledger.totals(session, hold_id=HOLD)
    assert sum(row[column] for row in report.rows) == spent[Activity.IDLE]


def test_every_report_was_computed_by_hand_and_has_a_title() -> None:
    assert sorted(reports.list_reports()) == sorted(BY_HAND)
    assert all(len(title) > 20 for title in reports.list_reports().values())


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_the_databases_own_program_runs_the_same_file(
    engine: Engine, database_url: str, name: str
) -> None:
    with transaction(engine) as session:
        tell_the_story(session)
    program = "psql" if engine.dialect.name == "postgresql" else "sqlite3"
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    path = str(reports.FOLDER / f"{name}.sql")
    command = {
        "psql": ["psql", "--csv", "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-f", path, database_url],
        "sqlite3": ["sqlite3", "-csv", "-header", str(engine.url.database), f".read {path}"],
    }[program]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    header, *rows = csv.reader(said.splitlines())
    with transaction(engine, read_only=True) as session:
        report = reports.run_report(session, name)
    assert tuple(header) == report.columns
    assert [[plain(cell) for cell in row] for row in rows] == [
        ["" if cell is None else plain(str(cell)) for cell in row] for row in report.rows
    ]


def plain(cell: str) -> str | float:
    try:
        return float(cell)
    except ValueError:
        return cell


@pytest.mark.parametrize(
    "date", ["1970-01-01", "2000-02-29", "2000-03-01", "2027-12-31", "2028-02-29", "2100-03-01"]
)
def test_dates_agree_with_the_calendar(session: Session, date: str) -> None:
    job = add_running_job(session)
    when = datetime.fromisoformat(f"{date}T23:59:59+00:00")
    model = add_deployment(session, job)
    add_step(session, job, model, seq=0, at_us=int(when.timestamp()) * 1_000_000)
    rows = reports.run_report(session, "steps").rows
    assert rows == (("rl", f"{100 + job}", job, "count", "ada", f"{date} 23:00", 1),)


def test_empty_books_give_empty_reports(session: Session) -> None:
    for name in reports.list_reports():
        assert reports.run_report(session, name).rows == ()


def test_an_unknown_report_is_answered_with_the_known_ones(session: Session) -> None:
    with pytest.raises(BadInput, match="no report 'bill'; there are: hold_summary, reconcile"):
        reports.run_report(session, "bill")
