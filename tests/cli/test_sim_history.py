"""plexrl sim trace --from-ledger names jobs as squeue and sreport do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.db import calls, queue, schema
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.sim.trace import read_trace
from tests.db.builders import (
    ROLLOUT,
    TRAIN,
    add_deployment,
    add_hold,
    add_job,
    charge,
    make_call,
)

Plexrl = Callable[..., Result]
S = 1_000_000


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


def test_a_history_becomes_a_trace_that_runs(plexrl: Plexrl, home: Path, tmp_path: Path) -> None:
    """With a job's own promise, its priority times its QOS's weight, and its tools."""
    with (home / "plexrl.toml").open("a") as config:
        config.write("\n[sharing]\nmax_slowdown = 1.2\n[qos.fast]\nweight = 4\n")
    (home / "state").mkdir()
    engine = open_database(f"sqlite:///{home / 'state' / 'plexrl.sqlite'}")
    schema.upgrade(engine)
    begun_us = now_us() - 3600 * S
    with transaction(engine) as session:
        add_hold(session, now_us=begun_us, wpgs=(TRAIN, ROLLOUT), partition="rlvr")
        for number, options in enumerate(({}, {"qos": "fast", "max_slowdown": "1.05"})):
            job = add_job(session, partition="rlvr", now_us=begun_us, priority=3, options=options)
            at_us = begun_us + 60 * S * number
            deployment = add_deployment(session, job)
            call = make_call(job, deployment, seq=number)
            calls.record_call(session, call, now_us=at_us + 20 * S)
            for start, stop, wpg, activity, mine in (
                (0, 4, ROLLOUT, Activity.BUSY, True),
                (4, 10, ROLLOUT, Activity.IDLE, False),
                (10, 20, ROLLOUT, Activity.BUSY, True),
                (20, 25, TRAIN, Activity.BUSY, True),
            ):
                charge(
                    session, at_us + start * S, at_us + stop * S, wpg=wpg, activity=activity,
                    job=job if mine else None, call=call.id if wpg == TRAIN else None,
                )  # fmt: skip
    engine.dispose()
    trace = tmp_path / "t.jsonl"
    done = plexrl("sim", "trace", str(trace), "--from-ledger", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {"file": str(trace), "jobs": 2, "left_out": {}}
    plain, fast = read_trace(trace)
    assert (plain.slo.max_slowdown, fast.slo.max_slowdown) == (1.2, 1.05)
    assert (plain.priority, fast.priority) == (3, 12)
    assert (plain.phases.tool.stalls, plain.phases.tool.stall_s) == (1, 6)
    assert plain.phases.rollout_s.median == 14
    assert plain.seed != fast.seed, "their steps are not alike"
    ran = plexrl("sim", "run", str(trace), "--gpus", "16", "--split", "1:1", "--json")
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout)["jobs"] == 2
