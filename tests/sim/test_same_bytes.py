"""One seed, one answer: to the byte, in another process that hashes otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl_slurm.sim.trace import write_trace
from tests.sim.traces import alike, job


def said(trace: Path, hash_seed: int, *options: str) -> str:
    """What ``plexrl sim run --json`` says, without how long it took."""
    command = [sys.executable, "-m", "plexrl_slurm.cli.main", "sim", "run", str(trace), "--json"]
    ran = subprocess.run(
        [*command, "--gpus", "128", "--jobs", *options],
        capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
    )  # fmt: skip
    return "".join(line for line in ran.stdout.splitlines(True) if "wall_seconds" not in line)


@pytest.mark.parametrize("policy", ["atc_h", "round_robin"])
def test_two_processes_say_the_same_bytes(tmp_path: Path, policy: str) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(
        trace, [*alike(5, steps=6), *(job(f"a{n}", mode="async1", seed=n, steps=6) for n in (8, 9))]
    )
    options = ("--policy", policy, "--seed", "3", "--node-loss-hours", "0.1")
    first, second = (said(trace, hash_seed, *options) for hash_seed in (1, 2))
    assert json.loads(first)["down_percent"] > 0 and json.loads(first)["jobs"] == 7
    assert first == second
