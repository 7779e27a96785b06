"""The books can be audited, and say where a new daemon goes on."""

import pytest
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Activity, Pool, Wpg
from plexrl_slurm.db import holds, ledger
from plexrl_slurm.db.ledger import FlawKind
from plexrl_slurm.db.models import HoldState
from tests.db.builders import HOLD, ROLLOUT, TRAIN, add_hold, add_job, charge


def flaws(session: Session) -> list[tuple[FlawKind, int, int, int]]:
    found = ledger.gaps(session, HOLD)
    return [(flaw.kind, flaw.start_us, flaw.stop_us, flaw.gpu_us) for flaw in found]


def test_books_that_tile_the_hold_have_no_flaw(session: Session) -> None:
    add_hold(session, now_us=100, wpgs=(TRAIN, ROLLOUT))
    a, b = add_job(session), add_job(session)
    charge(session, 100, 130, activity=Activity.DOWN)
    charge(session, 130, 140, activity=Activity.BUSY, job=a)
    charge(session, 140, 147, activity=Activity.BUSY, job=a, gpu_us=9)
    charge(session, 140, 147, activity=Activity.BUSY, job=b, gpu_us=5)
    charge(session, 147, 147)
    charge(session, 147, 150)
    charge(session, 100, 150, wpg=ROLLOUT)
    holds.end_hold(session, HOLD, now_us=150)
    assert flaws(session) == []
    assert ledger.totals(session, job_id=a)[Activity.BUSY] == 29
    spent = ledger.totals(session, hold_id=HOLD)
    assert spent == {"busy": 34, "switch": 0, "kept": 0, "idle": 106, "down": 60}


def test_a_wpg_that_shares_gpus_is_booked_on_the_one_that_has_them(session: Session) -> None:
    add_hold(session, now_us=100, wpgs=(TRAIN,))
    sharing = Wpg(id=ROLLOUT, pool=Pool.ROLLOUT, gpus=0, shares=TRAIN)
    holds.hold_wpgs(session, HOLD, [holds.Stay(wpg=sharing, held_us=100)])
    charge(session, 100, 150)
    holds.end_hold(session, HOLD, now_us=150)
    assert flaws(session) == []
    charge(session, 120, 130, wpg=ROLLOUT)
    assert flaws(session) == [(FlawKind.AMOUNT, 120, 130, 20)], "that time is booked twice"


@pytest.mark.parametrize(
    ("booked", "found"),
    [
        pytest.param(
            [(100, 120), (125, 150)],
            [(FlawKind.GAP, 120, 125, -10)],
            id="a hole in the middle",
        ),
        pytest.param(
            [(100, 130), (120, 150)],
            [(FlawKind.OVERLAP, 120, 130, 20)],
            id="time booked twice",
        ),
        pytest.param(
            [(100, 150), (110, 120)],
            [(FlawKind.OVERLAP, 110, 120, 20)],
            id="a stretch inside another one",
        ),
        pytest.param(
            [(107, 150)],
            [(FlawKind.GAP, 100, 107, -14)],
            id="nothing booked at the start",
        ),
        pytest.param(
            [(100, 149)],
            [(FlawKind.GAP, 149, 150, -2)],
            id="nothing booked at the end",
        ),
        pytest.param([], [(FlawKind.GAP, 100, 150, -100)], id="nothing booked at all"),
        pytest.param(
            [(100, 160)],
            [(FlawKind.OVERLAP, 150, 160, 20)],
            id="booked after the release",
        ),
        pytest.param(
            [(90, 150)],
            [(FlawKind.OVERLAP, 90, 100, 20)],
            id="booked before the stay",
        ),
        pytest.param(
            [(100, 150, 99)],
            [(FlawKind.AMOUNT, 100, 150, -1)],
            id="a microsecond too little",
        ),
    ],
)
def test_the_audit_finds_what_was_planted(
    session: Session, booked: list[tuple[int, ...]], found: list[tuple[FlawKind, int, int, int]]
) -> None:
    add_hold(session, now_us=100)
    for start, stop, *gpu_us in booked:
        charge(session, start, stop, gpu_us=gpu_us[0] if gpu_us else None)
    holds.release_wpg(session, HOLD, TRAIN, now_us=150)
    assert flaws(session) == found


def test_time_between_two_stays_belongs_to_nobody(session: Session) -> None:
    add_hold(session, now_us=100)
    charge(session, 100, 150)
    holds.release_wpg(session, HOLD, TRAIN, now_us=150)
    wpg = Wpg(id=TRAIN, pool=Pool.TRAIN, gpus=2)
    holds.hold_wpgs(session, HOLD, [holds.Stay(wpg=wpg, held_us=200)])
    assert ledger.last_stop(session, HOLD) == {TRAIN: 200}
    charge(session, 200, 210)
    assert flaws(session) == []
    charge(session, 212, 215)
    assert flaws(session) == [(FlawKind.GAP, 210, 212, -4)]
    assert ledger.last_stop(session, HOLD) == {TRAIN: 215}


def test_a_new_daemon_goes_on_where_the_books_end(session: Session) -> None:
    add_hold(session, now_us=100, wpgs=(TRAIN, ROLLOUT))
    charge(session, 100, 130)
    charge(session, 130, 170)
    assert ledger.last_stop(session, HOLD) == {TRAIN: 170, ROLLOUT: 100}
    assert [row.name for row in holds.held_wpgs(session, HOLD)] == [TRAIN, ROLLOUT]
    holds.release_wpg(session, HOLD, ROLLOUT, now_us=100)
    assert list(ledger.last_stop(session, HOLD)) == [TRAIN]


def test_the_timeline_has_what_touches_its_window(session: Session) -> None:
    add_hold(session)
    for start in (0, 10, 20):
        charge(session, start, start + 10)
    rows = ledger.between(session, [HOLD], since_us=10, until_us=20)
    assert [(row.start_us, row.wpg) for row in rows] == [(10, TRAIN)]
    assert ledger.between(session, ["another"], since_us=0, until_us=99) == []


def test_holds_come_and_go(session: Session) -> None:
    add_hold(session)
    holds.hold_runs(session, HOLD, since_us=1)
    holds.set_hold_epoch(session, HOLD, "e2")
    [row] = holds.live_holds(session, "rl")
    assert (row.id, row.state, row.epoch) == (HOLD, HoldState.UP, "e2")
    holds.end_hold(session, HOLD, now_us=9)
    assert holds.live_holds(session, "rl") == []
    with pytest.raises(LookupError, match="no held WPG 'train-9'"):
        holds.release_wpg(session, HOLD, WpgId("train-9"), now_us=1)
    with pytest.raises(LookupError, match="no hold 'x'"):
        holds.end_hold(session, "x", now_us=1)
