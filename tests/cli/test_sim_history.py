"""plexrl sim trace --from-ledger names jobs as squeue and sreport do."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.db import queue, schema
from plexrl_slurm.db.engine import open_database, transaction
from tests.db.builders import add_job

Plexrl = Callable[..., Result]


@pytest.fixture
def told(plexrl: Plexrl, home: Path, tmp_path: Path) -> Callable[..., str]:
    """What is said of jobs 40, 41_1 and 41_2, and of one whose Slurm job never came."""
    (home / "state").mkdir()
    engine = open_database(f"sqlite:///{home / 'state' / 'plexrl.sqlite'}")
    schema.upgrade(engine)
    with transaction(engine) as session:
        for slurm_id in ("40", "41_1", "41_2", None):
            job = add_job(session, bound=False, partition="rlvr", now_us=now_us())
            if slurm_id is not None:
                queue.bind(session, job, slurm_id=SlurmId(slurm_id), now_us=now_us())
    engine.dispose()

    def tell(*options: str) -> str:
        done = plexrl("sim", "trace", str(tmp_path / "t.jsonl"), "--from-ledger", *options)
        assert done.stderr.count("plexrl: error: ") == 1
        assert done.exit_code == (2 if "invalid" in done.stderr else 65)
        return done.stderr

    return tell


@pytest.mark.parametrize(
    ("options", "jobs"),
    [
        ((), ["40", "41_1", "41_2", "row-4"]),
        (("--jobs", "40"), ["40"]),
        (("--jobs", "41"), ["41_1", "41_2"]),
        (("--jobs", "41_[2-9],40"), ["40", "41_2"]),
    ],
)
def test_jobs_are_chosen_and_named_as_the_queue_shows_them(
    told: Callable[..., str], options: tuple[str, ...], jobs: list[str]
) -> None:
    said = told(*options)
    assert "; ".join(f"job {job}: it took no optimizer step" for job in jobs) in said
    assert said.count("it took no") == len(jobs)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("1", "no job 1 in the last 7 days: see `plexrl squeue --all`"),
        ("40,41_3", "no job 41_3 in the last 7 days"),
        ("forty", "invalid job id 'forty'"),
    ],
)
def test_a_number_that_nobody_sees_is_refused(
    told: Callable[..., str], job: str, said: str
) -> None:
    assert said in told("--jobs", job)
