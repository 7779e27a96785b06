"""Ranks of several nodes find each other, and nobody else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.daemons.gang import free_port
from plexrl_slurm.engines.meeting import interface_to

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from datetime import timedelta
import torch
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.meeting import join
rank, port, name, patience = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
spec = RankSpec(wpg="w", engine="deepspeed", rank=rank, world=2, gpus=2, master_port=port, agent="",
                models={}, options={}, meeting=name)
try:
    join(spec, timeout=timedelta(seconds=patience))
except RuntimeError as error:
    print(f"alone: {type(error).__name__}")
    sys.exit()
found = torch.tensor([1.0 + rank])
torch.distributed.all_reduce(found)
print(f"sum {found.item()}")
"""


def rank(number: int, port: int, name: str, patience_s: float) -> "subprocess.Popen[str]":
    arguments = [str(number), str(port), name, str(patience_s)]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_a_rank_of_an_earlier_incarnation_finds_nobody_at_the_same_port() -> None:
    port = free_port()
    ranks = [
        rank(1, port, "train-0.1.5", 15),
        rank(0, port, "train-0.2.5", 60),
        rank(1, port, "train-0.2.5", 60),
    ]
    try:
        said = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [out.strip() for out, _ in said][1:] == ["sum 3.0", "sum 3.0"], said
    assert said[0][0].startswith("alone"), said


def test_a_rank_tells_the_others_the_interface_that_leads_to_them() -> None:
    assert interface_to("127.0.0.1", 23001) == "lo"


def test_an_address_that_nobody_knows_is_named() -> None:
    with pytest.raises(BadInput, match="rank 0 is at no-such-node"):
        interface_to("no-such-node.invalid", 23001)
