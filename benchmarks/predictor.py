"""How well are slowdowns predicted? Random groups of a trace's jobs, predicted and simulated.

``python -m benchmarks.predictor TRACES/quarter.jsonl [--groups 100] [--seed 11]``: groups of 2 to
5 jobs of one shape that are predicted to be at most 1.6 times as slow, each run alone on its WPG
for 30 steps of its longest member.
"""

import argparse
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from plexrl_slurm.core.predict import slowdowns
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.job import SimJob
from plexrl_slurm.sim.report import per_job
from plexrl_slurm.sim.run import simulate
from plexrl_slurm.sim.trace import TraceJob, read_trace

#: Steps of the longest member, and most of any other.
STEPS, MOST = 30, 900


def one(jobs: list[TraceJob]) -> tuple[list[float], list[float], list[TraceJob]] | None:
    """Predicted and simulated slowdowns of a group; ``None``: nobody would make it."""
    train = jobs[0].train.gpus
    cluster = Cluster(
        train_gpus=train, rollout_gpus=sum(job.rollout.gpus for job in jobs), node_bytes=10**15
    )
    profiles = [
        SimJob.of(number, job).declared(2 * cluster.move_us(job.model.image_bytes, train))
        for number, job in enumerate(jobs, 1)
    ]
    predicted = slowdowns(profiles)
    lasting_us = STEPS * max(profile.step_us for profile in profiles)
    if (
        max(predicted) > 1.6
        or sum(profile.load for profile in profiles) > 0.95
        or lasting_us > MOST * min(profile.step_us for profile in profiles)
    ):
        return None
    trace = [
        replace(job, id=str(number), submit_us=number * 37_000_000, fail_step=None,
                steps=max(5, lasting_us // profile.step_us))
        for number, (job, profile) in enumerate(zip(jobs, profiles, strict=True))
    ]  # fmt: skip
    plan = Plan(learn_steps=0, regroup_us=0)
    ran = simulate(trace, cluster, placement="pack", plan=plan)
    return predicted, [job.slowdown for job in per_job(ran.world)], trace


def main() -> None:
    """Print errors by mode, and what a promise of 1.10 would have made of the groups."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args()
    shapes: dict[int, list[TraceJob]] = defaultdict(list)
    for job in read_trace(given.trace):
        shapes[job.train.gpus].append(job)
    rng = random.Random(given.seed)
    errors: dict[str, list[float]] = defaultdict(list)
    judged: dict[tuple[bool, bool], int] = defaultdict(int)
    count = 0
    while count < given.groups:
        jobs = rng.sample(rng.choice(list(shapes.values())), rng.choice((2, 2, 3, 3, 4, 5)))
        found = one(jobs)
        if found is None:
            continue
        count += 1
        predicted, actual, trace = found
        for guess, truth, job in zip(predicted, actual, trace, strict=True):
            errors[job.mode].append(guess - truth)
        judged[max(predicted) <= 1.1, max(actual) <= 1.1] += 1
    print("| jobs | number | mean error | mean absolute | 5 % below | 95 % below |")
    print("|---|---|---|---|---|---|")
    for mode, found_errors in sorted(errors.items()):
        ordered = sorted(found_errors)
        n = len(ordered)
        print(f"| {mode} | {n} | {fmean(ordered):+.4f} | {fmean(map(abs, ordered)):.4f} | "
              f"{ordered[n // 20]:+.3f} | {ordered[-1 - n // 20]:+.3f} |")  # fmt: skip
    print(f"\nof {count} groups at a promise of 1.10: rightly admitted {judged[True, True]}, "
          f"wrongly admitted {judged[True, False]}, wrongly refused {judged[False, True]}, "
          f"rightly refused {judged[False, False]}")  # fmt: skip


if __name__ == "__main__":
    main()
