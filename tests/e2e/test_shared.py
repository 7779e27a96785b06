"""DeepSpeed and vLLM take turns on the same GPUs, and learn what they learn on their own."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_real_engines import Example
from tests.scenarios.partition import REPOSITORY, kill, running, wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

OPTIONS: dict[str, Any] = {
    "rollout": {"kv_cache_bytes": 64 << 20},
    "engines": ("deepspeed", "vllm"),
    "settings": {"image_every": 2},
}


def test_two_jobs_on_one_group_learn_bit_by_bit_what_one_learns_alone(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    make = [sys.executable, str(REPOSITORY / "examples" / "make_models.py"), str(model), "tiny"]
    assert os.spawnv(os.P_WAIT, sys.executable, make) == 0
    folders = tmp_path / "own", tmp_path / "both"
    for folder in folders:
        folder.mkdir()
    with running(folders[0], seconds=300, model=model, **OPTIONS) as own:
        alone = Example(own, "alone", seed=11).learned()
    # Without GPUs what is left is counted by the engines themselves: nothing.
    shared = {"residual_bytes": 0}
    with running(folders[1], seconds=300, model=model, shared=shared, **OPTIONS) as both:
        jobs = [Example(both, f"together-{seed}", seed=seed) for seed in (11, 12)]
        wait_until(lambda: len(jobs[0].lines()) >= 2, seconds=300, name="the second step")
        kill(both.rank_pid("rollout-0"))
        learned = [job.learned() for job in jobs]
        assert learned[0] == alone
        assert learned[1] != alone
        both.stop_daemon()
        assert both.flaws() == []
        assert both.query("select distinct wpg from ledger") == [("train-0",)]
