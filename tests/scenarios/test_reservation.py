"""A WPG of each pool is kept free: whoever waits hears that, and of everything else in the way."""

import json
import re
from pathlib import Path

from plexrl_slurm.clock import now_us
from tests.scenarios.partition import running, wait_until
from tests.scenarios.test_fair_share import Waiting, asked, plexrl

TABLES = """
[[wpg]]
pool = "train"
engine = "fake_train"

[[wpg]]
pool = "rollout"
engine = "fake_sample"

[qos.fast]
reserved = true

[reservation]
wpgs = 1
"""


def test_what_is_kept_free_is_one_of_the_obstacles(tmp_path: Path, model: Path) -> None:
    alone = {"placement": "isolated"}
    with running(tmp_path, model=model, sharing=alone, tables=TABLES) as partition:
        first = Waiting(partition, "physics", seconds=300)
        wait_until(lambda: first.state() == "running", name="the first job to run")
        second = Waiting(partition, "bio")

        def words() -> list[str]:
            return [each["reason_word"] for each in asked(partition, "squeue", "-t", "PD")]

        wait_until(lambda: words() == ["Reservation"], name="the second job to hear why it waits")
        told = plexrl(partition, "explain", second.slurm_id).stdout.splitlines()
        ends = "wait for others to end, or ask for such a qos"
        assert told[1:3] == [
            f"{wpg} has room for it, and is kept free for jobs of a reserved qos: {ends}"
            for wpg in ("rollout-1", "train-1")
        ]
        assert told[3].startswith("no rollout WPG is free, and jobs share none here: rollout-0 has")
        assert told[4].startswith(
            f"no train WPG is free, and jobs share none here: train-0 has job {first.slurm_id} ("
        )
        assert re.search(r"; the first is expected to end in [1-4] min$", told[4])
        found = json.loads(plexrl(partition, "explain", second.slurm_id, "--json").stdout)
        kinds = [(each["kind"], each["pool"]) for each in found["obstacles"]]
        assert kinds == [
            ("reservation", "rollout"), ("reservation", "train"),
            ("rollout_gpus", "rollout"), ("train_gpus", "train"),
        ]  # fmt: skip
        (row,) = asked(partition, "squeue", "--start")
        assert now_us() < row["expected_start_us"] < now_us() + 300_000_000
