"""The soak itself, shortened, and that it would say what differs."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.scenarios.partition import REPOSITORY
from tests.soak.controllers import Seen, differences
from tests.soak.kills import SHARES, schedule
from tests.soak.runs import left_running


def seen(number: int, *rounds: str, weights: str = "w", failure: str = "") -> Seen:
    return Seen(number, rounds=list(rounds), weights=weights, failure=failure)


@pytest.mark.parametrize(
    ("disturbed", "sentence"),
    [
        pytest.param(seen(3, "a", "x", "x"), "computed something else in round 1", id="a round"),
        pytest.param(seen(3, "a", "b"), "did 2 rounds, undisturbed 3", id="their number"),
        pytest.param(seen(3, "a", "b", "c", weights="x"), "other weights", id="the weights"),
        pytest.param(seen(3, "a", failure="Oh: no"), "failed in round 1: Oh: no", id="a failure"),
    ],
)
def test_one_difference_is_one_sentence_that_names_the_job(disturbed: Seen, sentence: str) -> None:
    (found,) = differences([seen(2, "a"), disturbed], [seen(2, "a"), seen(3, "a", "b", "c")])
    assert found.startswith("job 3") and found.endswith(sentence)


def test_runs_that_saw_the_same_differ_in_nothing() -> None:
    assert differences([seen(0, "a", "b")], [seen(0, "a", "b")]) == []


def test_a_seed_stands_for_one_schedule_that_strikes_everybody() -> None:
    blows, again, others = (schedule(seed, 4.0) for seed in (1, 1, 2))
    first = [blows() for _ in range(200)]
    assert [again() for _ in range(200)] == first
    assert [others() for _ in range(200)] != first
    assert set(Counter(blow.target for blow in first)) == set(SHARES)


def test_a_process_that_outlives_its_partition_is_found(tmp_path: Path) -> None:
    assert left_running(tmp_path) == []
    (tmp_path / "state").mkdir()
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path / "state") as process:
        (found,) = left_running(tmp_path, patience_s=0.0)
        process.kill()
    assert found == f"process {process.pid} (sleep 60) outlived its partition"
    assert left_running(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_jobs_with_memory_for_two_learn_the_same_while_processes_are_killed(
    tmp_path: Path,
) -> None:
    minutes = os.environ.get("SOAK_MINUTES", "3")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", f"--minutes={minutes}", f"--report={report}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["differences"] == []
    assert len(found["weights"]) == 8 and len(set(found["weights"])) == 8
    assert min(found["rounds"]) > 0 and len(found["kills"]) > 5
    assert found["nvme"]["back"] > 8
