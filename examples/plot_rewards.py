#!/usr/bin/env python3
"""Draw the reward curve of a run that was started with ``--out FILE``.

python examples/plot_rewards.py rewards.jsonl curve.png [title]
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

WINDOW = 5


def main(source: Path, target: Path, title: str) -> None:
    """Rewards by step, their running mean, and the held-out accuracy if the run measured it."""
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "step" in line]
    rewards = [line["reward"] for line in steps]
    minutes = steps[-1]["elapsed_seconds"] / 60
    numbers = range(1, len(rewards) + 1)
    means = [
        sum(rewards[max(0, n - WINDOW) : n]) / len(rewards[max(0, n - WINDOW) : n]) for n in numbers
    ]
    figure, axes = plt.subplots(figsize=(7, 3.5))
    axes.plot(numbers, rewards, ".", color="0.6", label="mean reward of a step")
    axes.plot(numbers, means, label=f"mean of {WINDOW} steps")
    for line in lines:
        if "before" in line:
            ends = (0, len(rewards) + 1)
            axes.plot(ends, (line["before"], line["after"]), "s", label="held-out accuracy")
    axes.set(xlabel="optimizer step", ylabel="reward", ylim=(0, 1.02))
    axes.set_title(f"{title} ({minutes:.0f} minutes)")
    axes.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) == 4 else "reward")
