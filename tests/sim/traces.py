"""Small traces for tests."""

import json
from pathlib import Path
from typing import Any

import msgspec

from plexrl_slurm.sim.trace import TraceJob

LINE: dict[str, Any] = {
    "v": 1, "id": "a", "submit_us": 0, "user": "u1", "account": "acct", "qos": "normal",
    "priority": 1.0, "algo": "grpo", "mode": "sync", "kind": "reasoning", "steps": 5,
    "fail_step": None, "seed": 7, "walltime_s": 3600,
    "model": {"name": "m", "params": 1_000_000_000, "active": 1_000_000_000,
              "train_bytes_per_param": 16, "rollout_bytes_per_param": 2},
    "train": {"gpus": 8, "tp": 8, "pp": 1, "dp": 1, "min_gpus": 8},
    "rollout": {"gpus": 8, "engines": 2, "gpus_per_engine": 4, "requests": 64},
    "phases": {
        "rollout_s": {"dist": "lognormal", "median": 70, "sigma": 0.1},
        "tail": {"frac": 0.4, "engines_needed": 0.125, "longest_over_median": 10},
        "tool": {"stalls": 0, "stall_s": 0}, "reward_s": {"dist": "const", "median": 2},
        "logprob_s": {"dist": "lognormal", "median": 4, "sigma": 0.08},
        "fwdbwd_s": {"dist": "lognormal", "median": 5, "sigma": 0.08, "count": 4},
        "optim_s": {"dist": "const", "median": 1}, "publish_s": {"dist": "const", "median": 0.1},
        "pull_s": {"dist": "const", "median": 0.2}, "client_gap_s": 0.05,
    },
    "drift": {"kind": "linear", "per_150_steps": 0.1}, "slo": {"max_slowdown": 1.1},
}  # fmt: skip


def job(name: str = "a", **changes: Any) -> TraceJob:
    """A job like :data:`LINE`, with some keys changed (of tables: ``train__gpus=16``)."""
    line = json.loads(json.dumps(LINE))
    line["id"] = name
    for key, value in changes.items():
        *path, last = key.split("__")
        table = line
        for part in path:
            table = table[part]
        table[last] = value
    return msgspec.convert(line, TraceJob)


def alike(count: int, **changes: Any) -> list[TraceJob]:
    """Jobs that differ in what they draw only."""
    return [job(f"j{number}", seed=number, **changes) for number in range(count)]


def written(path: Path, *lines: Any) -> Path:
    """A trace file of these lines; text goes in as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path
