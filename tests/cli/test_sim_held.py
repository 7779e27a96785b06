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


def test_what_becomes_of_tails_can_be_tried(plexrl: Plexrl, tmp_path: Path) -> None:
    lines = [{**LINE, **SMALL, "id": name, "seed": seed, "steps": 8}
             for seed, name in enumerate("ab")]  # fmt: skip
    trace = written(tmp_path / "t.jsonl", *lines)
    found = {}
    for tails in ("wait", "pause", "beside"):
        done = plexrl("sim", "run", str(trace), "--held", f"--tails={tails}", "--json")
        assert done.exit_code == 0, done.stderr
        found[tails] = json.loads(done.stdout)
    assert found["wait"]["pauses"] == found["wait"]["besides"] == found["pause"]["besides"] == 0
    assert found["beside"]["besides"] > 0
    done = plexrl("sim", "run", str(trace), "--tails=beside")
    assert done.exit_code == 65 and "without --held no two jobs share" in done.stderr


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


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "TRACE", "--guard-hours=nan"), 2, "nan is not a number"),
        (
            ("run", "TRACE", "--guard-hours=inf"),
            2,
            "inf is more than can be meant: give a smaller one",
        ),
        (
            ("run", "TRACE", "--bandwidth=inf"),
            2,
            "inf is more than can be meant: give a smaller one",
        ),
        (("run", "TRACE", "--compress=1e300"), 2, "1e300 is more than can be meant"),
        (("run", "TRACE", "--compress=1e-300"), 2, "is not in the range x>=0.001"),
        (("generate", "x.jsonl", "--days=nan"), 2, "nan is not a number"),
        (("generate", "x.jsonl", "--seed=-1"), 2, "-1 is not in the range x>=0"),
        (("generate", "x.jsonl", "--jobs=1000000000000"), 2, "is not in the range"),
        (
            ("trace", "x.jsonl", "--from-ledger", "--days=1e300"),
            2,
            "is not in the range 0<x<=36500",
        ),
        (("generate", "nosuch/x.jsonl", "--jobs=1"), 65, "nosuch/x.jsonl: cannot be written (No"),
    ],
)
def test_a_number_or_a_path_that_cannot_be_is_one_sentence(
    plexrl: Plexrl, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    trace = str(written(tmp_path / "t.jsonl", LINE))
    done = plexrl("sim", *(trace if word == "TRACE" else word for word in words))
    assert done.exit_code == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
