"""The demo on Slurm as a whole, with engines that pretend: users, renewal, loss, replacement."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm_live import python

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_the_demo_ends_well_though_it_loses_the_node_of_its_batch_script(tmp_path: Path) -> None:
    options = ["--fake", "--no-undisturbed", "--lose=batch", "--tool-multiple=0.5", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.slurm_live.demo", *options, f"--out={tmp_path / 'out'}"],
        cwd=python.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    (row,) = report["rows"].values()
    assert [job["learning_identical"] for job in row["jobs"]] == [True] * 4
    assert report["events"]["lost_batch"] and report["events"]["renewed"] == "extended"
    assert [hold["agrees"] for hold in report["reconcile"]] == ["yes"] * 2
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 0
