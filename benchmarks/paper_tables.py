"""What does sharing a training WPG save, in the paper's three configurations and beyond?

``python -m benchmarks.paper_tables [--steps 300]``: PlexRL (arXiv 2605.20863) shares the training
GPUs of two jobs, each with rollout GPUs of its own: 7B on 16, 30B on 128, 235B on 96 training
GPUs. The rollout GPUs (8, 64, 24) are *calibrated*: the paper does not say them. Phase lengths
come from its bubble ratios (80.10, 70.67, 81.11 % of the training GPUs' time idle); a step's
length does not change the savings, only how much a switch weighs.

``TR`` is a baseline outside our core: a job that has trained holds the training GPUs until its
own rollout has ended, to hand the weights over. Ours publishes to host memory and lets go.
"""

import argparse
import heapq
from collections import deque
from dataclasses import dataclass

from plexrl_slurm.core.grouping import Placement, Rules
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.job import SimJob
from plexrl_slurm.sim.run import simulate
from plexrl_slurm.sim.trace import (
    Drift,
    Lasting,
    MicroSteps,
    Model,
    Phases,
    Rollout,
    Slo,
    Tail,
    Tool,
    TraceJob,
    Train,
)

#: Functions of a training phase: logprobs 15 %, micro-steps 80 %, optimizer 5 %.
MICRO_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One of the paper's configurations."""

    name: str
    params: float
    train_gpus: int
    rollout_gpus: int
    bubble: float
    step_s: float
    paper: float


SETUPS = (
    Setup(name="7B", params=7.6e9, train_gpus=16, rollout_gpus=8, bubble=0.801, step_s=300,
          paper=31.36),
    Setup(name="30B", params=30.5e9, train_gpus=128, rollout_gpus=64, bubble=0.7067, step_s=520,
          paper=30.10),
    Setup(name="235B", params=235e9, train_gpus=96, rollout_gpus=24, bubble=0.8111, step_s=880,
          paper=37.58),
)  # fmt: skip


def job(setup: Setup, number: int, *, overlaps: bool, steps: int, seed: int) -> TraceJob:
    """One of some alike jobs; each draws its own lengths."""
    train_s = setup.step_s * (1 - setup.bubble)
    away_s = setup.step_s - (0 if overlaps else train_s)
    body_s, sigma = 0.95 * train_s, 0.08
    return TraceJob(
        v=1,
        id=f"{setup.name}-{number}",
        submit_us=0,
        user="paper",
        account="paper",
        qos="normal",
        priority=1.0,
        algo="grpo",
        mode="async1" if overlaps else "sync",
        kind="reasoning",
        steps=steps,
        fail_step=None,
        seed=1000 * seed + number,
        walltime_s=1e9,
        model=Model(
            name=setup.name, params=int(setup.params), active=int(setup.params),
            train_bytes_per_param=16, rollout_bytes_per_param=2,
        ),
        train=Train(gpus=setup.train_gpus, tp=1, pp=1, dp=1, min_gpus=setup.train_gpus),
        rollout=Rollout(gpus=setup.rollout_gpus, engines=1, gpus_per_engine=1, requests=512),
        phases=Phases(
            rollout_s=Lasting(dist="lognormal", median=away_s, sigma=0.15),
            tail=Tail(frac=0.4, engines_needed=0.125, longest_over_median=10),
            tool=Tool(stalls=0, stall_s=0),
            reward_s=Lasting(dist="const", median=0),
            logprob_s=Lasting(dist="lognormal", median=body_s * 0.16, sigma=sigma),
            fwdbwd_s=MicroSteps(
                dist="lognormal", median=body_s * 0.84 / MICRO_STEPS, sigma=sigma,
                count=MICRO_STEPS,
            ),
            optim_s=Lasting(dist="const", median=train_s * 0.05),
            publish_s=Lasting(dist="const", median=0.2),
            pull_s=Lasting(dist="const", median=0.2),
            client_gap_s=0.05,
        ),
        drift=Drift(kind="linear", per_150_steps=0),
        slo=Slo(max_slowdown=1.1),
    )  # fmt: skip


def shared(
    setup: Setup, k: int, *, overlaps: bool, steps: int, seed: int, policy: str
) -> tuple[float, float, float, float]:
    """Saved percent, mean and worst slowdown, busy share of the training WPG."""
    trace = [job(setup, number, overlaps=overlaps, steps=steps, seed=seed) for number in range(k)]
    cluster = Cluster(
        train_gpus=setup.train_gpus,
        rollout_gpus=k * setup.rollout_gpus,
        # Five of 235B take more than nodes of 1.5 TB keep.
        node_bytes=2_000 * 10**9 if k > 4 else 1_500 * 10**9,
    )
    plan = Plan(policy=policy, rules=Rules(placement=Placement.PACK, most=k))
    ran = simulate(trace, cluster, placement="pack", plan=plan)
    # Until the first of them ends all share; what they hold and take to there is what is asked.
    records = list(ran.world.records.values())
    slow = [(r.end_us - r.start_us) / r.job.alone_us() for r in records]
    mean = sum(slow) / k
    held = (setup.train_gpus / k + setup.rollout_gpus) * mean
    alone = setup.train_gpus + setup.rollout_gpus
    train_us = {a: us for (pool, a), us in ran.world.gpu_us.items() if pool == "train"}
    busy = next(us for a, us in train_us.items() if a == "busy") / sum(train_us.values())
    return 100 * (1 - held / alone), mean, max(slow), busy


def tr_slowdown(setup: Setup, k: int, *, steps: int, seed: int) -> float:
    """Mean slowdown of ``k`` overlapping jobs whose weight sync holds the training GPUs.

    First come, first served; a job lets go when its own rollout has ended and the weights are
    handed over.
    """
    jobs = [
        SimJob.of(number + 1, job(setup, number, overlaps=True, steps=steps, seed=seed))
        for number in range(k)
    ]
    sync_us = 400_000
    heap: list[tuple[int, int, str, int]] = []
    count = 0

    def at(when: int, what: str, who: int) -> None:
        nonlocal count
        count += 1
        heapq.heappush(heap, (when, count, what, who))

    begun, sampled, trained, ended = [0] * k, [0] * k, [0] * k, [0] * k
    #: A rollout's weights are there when so many steps were handed over.
    rolling, waiting = [False] * k, [False] * k
    queue: deque[int] = deque()
    owner = -1
    synced = [0] * k

    def roll(who: int, now: int) -> None:
        if begun[who] < steps and not rolling[who] and begun[who] - 1 <= synced[who]:
            rolling[who] = True
            step = jobs[who].step(begun[who])
            begun[who] += 1
            at(now + step.sample_us, "sampled", who)

    def ask(who: int) -> None:
        if trained[who] < sampled[who] and who not in queue and owner != who:
            queue.append(who)

    def grant(now: int) -> None:
        nonlocal owner
        if owner < 0 and queue:
            owner = queue.popleft()
            step = jobs[owner].step(trained[owner])
            gaps_us = jobs[owner].gap_us * (len(step.train) - 1)
            at(now + sum(us for _, us in step.train) + gaps_us, "trained", owner)

    for who in range(k):
        roll(who, 0)
    while heap:
        now, _, what, who = heapq.heappop(heap)
        if what == "sampled":
            sampled[who] += 1
            rolling[who] = False
            if waiting[who]:
                waiting[who] = False
                at(now + sync_us, "synced", who)
            else:
                roll(who, now)
            ask(who)
        elif what == "trained":
            trained[who] += 1
            if rolling[who]:
                waiting[who] = True
            else:
                at(now + sync_us, "synced", who)
        else:
            synced[who] = trained[who]
            ended[who] = now
            owner = -1
            roll(who, now)
            ask(who)
        grant(now)
    return sum(ended[who] / jobs[who].alone_us() for who in range(k)) / k


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    seeds = range(1, given.seeds + 1)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    print("k = 2, training WPG shared, rollout GPUs calibrated; GPU-hours per step saved")
    print(f"{'':6} {'paper':>7} {'TR':>7} {'ours':>7} {'bound':>7}")
    for setup in SETUPS:
        alone = setup.train_gpus + setup.rollout_gpus
        least = setup.train_gpus / 2 + setup.rollout_gpus
        slow = mean([tr_slowdown(setup, 2, steps=given.steps, seed=seed) for seed in seeds])
        ours = mean(
            [
                shared(setup, 2, overlaps=True, steps=given.steps, seed=seed, policy="atc_h")[0]
                for seed in seeds
            ]
        )
        print(
            f"{setup.name:6} {setup.paper:6.2f}% {100 * (1 - least * slow / alone):6.2f}% "
            f"{ours:6.2f}% {100 * (1 - least / alone):6.2f}%"
        )
    print()
    print(f"{'':12} {'saved':>7} {'slowdown':>9} {'worst':>6} {'T busy':>7}")
    for name, overlaps, k in (
        ("7B", True, 3),
        ("7B", True, 4),
        ("7B", True, 5),
        ("7B", False, 3),
        ("7B", False, 4),
        ("30B", True, 3),
        ("30B", True, 4),
        ("30B", False, 2),
        ("235B", True, 4),
        ("235B", True, 5),
        ("235B", False, 4),
    ):
        setup = next(each for each in SETUPS if each.name == name)
        rows = [
            shared(setup, k, overlaps=overlaps, steps=given.steps, seed=seed, policy="atc_h")
            for seed in seeds
        ]
        saved, slow, worst, busy = (mean([row[i] for row in rows]) for i in range(4))
        mode = "async" if overlaps else "sync"
        print(f"{name:5}{mode:5} {k} {saved:6.2f}% {slow:9.4f} {worst:6.3f} {100 * busy:6.1f}%")


if __name__ == "__main__":
    main()
