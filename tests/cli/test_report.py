"""plexrl sreport and the offline trace read the real database."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.cli import show
from plexrl_slurm.cli.report import text_of
from plexrl_slurm.core.ids import CauseId, SlurmId, WpgId
from plexrl_slurm.core.messages import Activity, Charge, Pool, Wpg
from plexrl_slurm.db import holds, ledger, schema, usage
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.reports import Report
from tests.cli.conftest import T0

Plexrl = Callable[..., Result]
TRAIN = WpgId("train-0")


@pytest.fixture
def database(home: Path) -> Path:
    """A hold with one idle second in its books."""
    path = home / "state" / "plexrl.sqlite"
    path.parent.mkdir()
    engine = open_database(f"sqlite:///{path}")
    schema.upgrade(engine)
    with transaction(engine) as session:
        holds.open_hold(
            session,
            hold_id="h1",
            partition="rlvr",
            backend="local",
            slurm_id=SlurmId("1"),
            epoch="1",
            now_us=T0,
        )
        wpg = Wpg(id=TRAIN, pool=Pool.TRAIN, gpus=1)
        holds.hold_wpgs(session, "h1", [holds.Stay(wpg=wpg, held_us=T0)])
        charge = Charge(
            wpg=TRAIN,
            activity=Activity.IDLE,
            job=None,
            call=None,
            start_us=T0,
            stop_us=T0 + 1_000_000,
            gpu_us=1_000_000,
            cause=CauseId("test"),
        )
        ledger.append(session, [charge], holds={TRAIN: "h1"})
    engine.dispose()
    return path


def test_a_report_by_its_short_name(plexrl: Plexrl, database: Path) -> None:
    done = plexrl("sreport", "hold")
    assert done.exit_code == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split()[:5] == ["hold_id", "wpg", "pool", "gpus", "held_gpu_s"]
    assert row.split()[:5] == ["h1", "train-0", "train", "1", "1.000"]
    plain = plexrl("sreport", "hold", "-P").stdout.splitlines()
    assert plain[0].startswith("hold_id|wpg|pool|gpus|held_gpu_us|")
    (facts,) = json.loads(plexrl("sreport", "hold_summary", "--json").stdout)["rows"]
    assert facts["held_gpu_us"] == 1_000_000


def test_the_books_are_compared_with_slurm(plexrl: Plexrl, database: Path) -> None:
    engine = open_database(f"sqlite:///{database}")
    with transaction(engine) as session:
        usage.record_usage(
            session,
            "h1",
            slurm_id="1",
            start_us=T0,
            end_us=T0 + 4_000_000,
            elapsed_us=4_000_000,
            gpus=1,
            word="CANCELLED",
            now_us=T0 + 5_000_000,
        )
    engine.dispose()
    done = plexrl("sreport", "reconcile")
    assert done.exit_code == 0, done.stderr
    head, row = (line.split() for line in done.stdout.splitlines())
    found = dict(zip(head, row, strict=True))
    assert (found["ledger_gpu_s"], found["sacct_gpu_s"]) == ("1.000", "4.000")
    assert (found["difference_gpu_s"], found["difference_percent"]) == ("-3.000", "-75")
    assert (found["allowed_gpu_s"], found["agrees"]) == ("1.040", "no")


def test_much_gpu_time_is_no_date() -> None:
    found = Report(name="x", columns=("held_gpu_us", "began_us"), rows=((2 * 10**15, 2 * 10**15),))
    table = text_of(found, parsable=False, header=True)
    assert table.split() == ["held_gpu_s", "began", "2000000000.000", show.iso(2 * 10**15)]


def test_reports_are_listed_and_an_unknown_one_is_refused(plexrl: Plexrl, database: Path) -> None:
    assert "savings" in plexrl("sreport").stdout
    for name in ("savings", "usage"):
        assert plexrl("sreport", name).exit_code == 0
    done = plexrl("sreport", "profit")
    assert done.exit_code == 65
    assert "unknown report 'profit'; known are usage, hold" in done.stderr


def test_without_a_database_none_is_made(plexrl: Plexrl, home: Path) -> None:
    done = plexrl("sreport", "savings")
    assert done.exit_code == 75
    assert "it does not exist yet" in done.stderr
    assert not (home / "state").exists()


def test_a_database_of_another_version_is_refused(plexrl: Plexrl, home: Path) -> None:
    (home / "state").mkdir()
    (home / "state" / "plexrl.sqlite").touch()
    done = plexrl("sreport", "savings")
    assert done.exit_code == 75
    assert "without our tables" in done.stderr


def test_a_trace_without_a_daemon_comes_from_the_ledger(plexrl: Plexrl, database: Path) -> None:
    done = plexrl("trace")
    assert done.exit_code == 0, done.stderr
    assert "this is what the ledger has" in done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["train-0", "1.0"]
