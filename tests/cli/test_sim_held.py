"""plexrl sim run --held plays a trace on the WPGs of the configuration."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.db import schema
from plexrl_slurm.db.engine import open_database
from tests.sim.traces import LINE, written

Plexrl = Callable[..., Result]
SMALL = {
    "train": {**LINE["train"], "gpus": 1, "min_gpus": 1},
    "rollout": {**LINE["rollout"], "gpus": 1},
}


def test_jobs_share_the_wpgs_of_the_configuration(plexrl: Plexrl, tmp_path: Path) -> None:
    lines = [{**LINE, **SMALL, "id": name, "steps": 2} for name in ("a", "b")]
    trace = written(tmp_path / "t.jsonl", *lines)
    done = plexrl("sim", "run", str(trace), "--held", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["placement"], found["train_gpus"], found["rollout_gpus"]) == ("held", 1, 1)
    held_us = found["gpu_hours_held"] * 3600e6
    assert held_us == pytest.approx(2 * found["makespan_us"], rel=1e-4)


def test_a_job_of_another_shape_is_refused(plexrl: Plexrl, tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl", LINE)
    done = plexrl("sim", "run", str(trace), "--held")
    assert done.exit_code == 65
    assert "job a needs a train WPG of 8 GPUs, and held are train-0 with 1" in done.stderr


def test_a_trace_of_a_job_that_is_not_there_is_refused(
    plexrl: Plexrl, home: Path, tmp_path: Path
) -> None:
    (home / "state").mkdir()
    engine = open_database(f"sqlite:///{home / 'state' / 'plexrl.sqlite'}")
    schema.upgrade(engine)
    engine.dispose()
    done = plexrl("sim", "trace", str(tmp_path / "t.jsonl"), "--from-ledger", "--jobs", "7")
    assert done.exit_code == 65
    assert "no job 7 in the last 7 days" in done.stderr
