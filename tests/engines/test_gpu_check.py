"""The check that is made the day a GPU is there runs, and would notice what it is for."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.engines.movers import Mover, Piece

pytestmark = [pytest.mark.engines, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
#: Rows that mean something on a CPU too.
HOLD = [
    "job a: losses as alone",
    "job a: final weights and moments as alone",
    "job b: losses as alone",
    "job b: final weights and moments as alone",
    "state taken again from its image",
    "all of this",
]


def test_it_runs_without_a_gpu_and_says_what_it_could_not_judge(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--small", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--json", str(answer)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(answer.read_text())
    verdicts = {row["what"]: row["verdict"] for row in found["rows"]}
    assert found["ok"] is True and found["device"] == "CPU" and found["small"] is True
    assert [what for what, verdict in verdicts.items() if verdict == "pass"] == HOLD
    assert "both directions at once against one direction" in verdicts
    assert all(verdict in ("pass", "not judged", "") for verdict in verdicts.values())
    assert all(what in done.stdout for what in verdicts)
    assert "by turns: 9 switches" in done.stderr


def test_it_fails_when_a_mover_forgets_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu_check import check
    from benchmarks.gpu_trainer import Device

    move = Mover.move

    def forgetful(self: Mover, *, out: Sequence[Piece] = (), into: Sequence[Piece] = ()) -> int:
        """It leaves open gradients where they are."""
        some = [piece for piece in into if piece is not into[-1] or len(into) < 5]
        return move(self, out=out, into=some)

    monkeypatch.setattr(Mover, "move", forgetful)
    asked: Any = argparse.Namespace(small=True, layers=1, rounds=1)
    rows = check(asked, Device(small=True), tmp_path)
    failed = {row.what for row in rows if row.verdict == "FAIL"}
    assert "job a: final weights and moments as alone" in failed
