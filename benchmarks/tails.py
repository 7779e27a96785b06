"""What becomes of tails: waited for, paused, or left to run beside others. A simulation.

``python -m benchmarks.tails``: jobs with training WPGs of their own share one rollout WPG. The
table of docs/scheduling.md; a few seconds for each line.
"""

import argparse
from collections.abc import Sequence

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.tails import TailRules
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.run import simulate_held
from plexrl_slurm.sim.tailed import TailedWorld
from plexrl_slurm.sim.trace import TraceJob
from tests.sim.traces import alike

WAYS = {
    "waited for": TailRules(pause=False),
    "paused": TailRules(),
    "beside others": TailRules(co_resident=True),
}
_HOUR_US = 3_600_000_000


def jobs(count: int, *, mode: str, steps: int) -> list[TraceJob]:
    """Rollouts of 70 s, of which one call in eight runs in the last 40 %; 27 s of training."""
    return alike(count, steps=steps, mode=mode)


def line(
    name: str, rules: TailRules, trace: Sequence[TraceJob], *, slowdown: int
) -> tuple[str, ...]:
    """One way, as a row."""
    first = trace[0]
    held = [
        Wpg(id=WpgId(f"train-{number}"), pool=Pool.TRAIN, gpus=first.train.gpus)
        for number in range(len(trace))
    ]
    held.append(Wpg(id=WpgId("rollout-0"), pool=Pool.ROLLOUT, gpus=first.rollout.gpus))
    plan = Plan(tails=rules, slowdown=slowdown)
    cluster = Cluster(train_gpus=8 * len(trace), rollout_gpus=8)
    ran = simulate_held(list(trace), held, cluster, plan=plan)
    world, found = ran.world, ran.figures
    assert isinstance(world, TailedWorld)
    return (
        str(len(trace)),
        first.mode,
        f"{slowdown} %",
        name,
        f"{found.makespan_us / _HOUR_US:.2f}",
        f"{found.slowdown.mean:.3f}",
        f"{found.slowdown.max:.3f}",
        str(world.pauses),
        str(world.besides),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    names = ("jobs", "mode", "slower", "tails are", "hours", "mean", "worst", "paused", "beside")
    print("| " + " | ".join(names) + " |")
    print("|---" * len(names) + "|")
    for count, mode in ((2, "sync"), (3, "sync"), (2, "async1")):
        trace = jobs(count, mode=mode, steps=given.steps)
        for slowdown in (20, 50):
            for name, rules in WAYS.items():
                if slowdown == 20 or rules.co_resident:
                    print("| " + " | ".join(line(name, rules, trace, slowdown=slowdown)) + " |",
                          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
