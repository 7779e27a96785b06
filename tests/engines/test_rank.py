"""A rank process never outlives its agent."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_rank_whose_agent_ended_before_it_looked_ends_too(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    facts = {
        "wpg": "train-0", "engine": "fake_train", "rank": 0, "world": 1, "gpus": 1,
        "master_port": 0, "agent": f"ipc://{tmp_path}/ranks", "models": {}, "options": {},
        "cores": [], "parent": os.getpid() + 1,
    }  # fmt: skip
    spec.write_text(json.dumps(facts))
    done = subprocess.run(
        [sys.executable, "-m", "plexrl_slurm.engines.rank", str(spec)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
