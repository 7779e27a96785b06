"""Synthetic traces: seeded, with the published facts as parameters (see docs/scheduling.md)."""

from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec.structs import replace

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

#: Name, parameters, active ones, GPUs of the training WPG, admissible rollout GPUs, share of jobs.
_SHAPES: Final = (
    ("r1-distill-1.5b", 1.5e9, 1.5e9, 8, (4, 8), 0.10),
    ("qwen3-4b", 4.0e9, 4.0e9, 8, (4, 8), 0.10),
    ("qwen2.5-7b", 7.6e9, 7.6e9, 16, (8, 16), 0.28),
    ("qwen3-14b", 14.8e9, 14.8e9, 16, (8, 16), 0.14),
    ("qwen3-32b", 32.8e9, 32.8e9, 32, (16, 32), 0.16),
    ("qwen3-30b-a3b", 30.5e9, 3.3e9, 128, (32, 64), 0.12),
    ("qwen3-235b-a22b", 235e9, 22e9, 96, (24, 32), 0.10),
)
_HOUR_S: Final = 3600.0
#: Of each QOS: its share of jobs, and their priority.
_QOS: Final = {"normal": (0.84, 1.0), "high": (0.11, 2.0), "low": (0.05, 0.5)}


def generate(
    *, jobs: int, days: float, seed: int, overlapping: float = 0.57, agentic: float = 0.21,
    progress: Callable[[int], None] = lambda _: None,
) -> list[TraceJob]:  # fmt: skip
    """``jobs`` jobs that arrive over ``days`` days, by submission. ``progress`` is told how many
    there are, again and again.

    Idle share of the training WPG U(.60, .85), tail share of a rollout U(.3, .6), lognormal
    lengths, sweeps of 1-8 alike jobs of one user, Pareto users, day and week in the arrivals.
    """
    rng = np.random.default_rng(seed)
    users = (1 / np.arange(1, 41)) ** 1.1
    users /= users.sum()
    chances = np.array([shape[-1] for shape in _SHAPES])
    found: list[TraceJob] = []
    while len(found) < jobs:
        sweep = min(jobs - len(found), int(rng.integers(1, 9)) if rng.random() < 0.35 else 1)
        user = int(rng.choice(40, p=users))
        submit_s = _arrival(rng, days)
        shape = _SHAPES[int(rng.choice(len(_SHAPES), p=chances / chances.sum()))]
        first = _job(rng, shape, user, overlapping, agentic)
        for number in range(sweep):
            found.append(_again(first, rng, submit_s + 20.0 * number))
        progress(len(found))
    found.sort(key=lambda job: job.submit_us)
    return [_named(job, number) for number, job in enumerate(found, 1)]


def _arrival(rng: np.random.Generator, days: float) -> float:
    """An instant of working hours more often than not."""
    while True:
        at_s = float(rng.uniform(0, days * 24 * _HOUR_S))
        hour, day = at_s / _HOUR_S % 24, int(at_s / (24 * _HOUR_S)) % 7
        weight = (0.25 + 0.75 * (9 <= hour < 20)) * (1.0 if day < 5 else 0.4)
        if rng.random() < weight:
            return at_s


def _job(
    rng: np.random.Generator,
    shape: tuple[str, float, float, int, tuple[int, ...], float],
    user: int,
    overlapping: float,
    agentic: float,
) -> TraceJob:
    name, params, active, train_gpus, rollout_gpus, _ = shape
    together, tools = bool(rng.random() < overlapping), bool(rng.random() < agentic)
    step_s = float(np.exp(rng.uniform(np.log(90), np.log(1800))))
    idle = float(rng.uniform(0.60, 0.85))
    train_s, away_s = step_s * (1 - idle), step_s if together else step_s * idle
    stalls, stall_s = (4, round(away_s * 0.04, 3)) if tools else (0, 0.0)
    count = int(rng.choice((2, 4, 8, 16)))
    optim_s = round(train_s * 0.05, 3)
    hours = float(np.clip(rng.lognormal(np.log(18), 0.9), 0.3, 168))
    steps = max(3, int(hours * _HOUR_S / step_s))
    gpus = int(rng.choice(rollout_gpus))
    reward_s = 0.0 if together else round(away_s * 0.02, 3)
    body_s = train_s - optim_s
    qos = str(rng.choice(list(_QOS), p=[share for share, _ in _QOS.values()]))
    return TraceJob(
        v=1,
        id="",
        submit_us=0,
        user=f"u{user}",
        account=f"acct{user % 6}",
        qos=qos,
        priority=_QOS[qos][1],
        algo="grpo",
        mode="async1" if together else "sync",
        kind="agentic" if tools else "reasoning",
        steps=steps,
        fail_step=int(rng.integers(1, steps)) if steps > 1 and rng.random() < 0.12 else None,
        seed=0,
        walltime_s=round(hours * _HOUR_S * float(rng.uniform(1.2, 3))),
        model=Model(
            name=name,
            params=int(params),
            active=int(active),
            train_bytes_per_param=16,
            rollout_bytes_per_param=2,
        ),
        train=Train(gpus=train_gpus, tp=min(8, train_gpus), pp=1, dp=1, min_gpus=train_gpus),
        rollout=Rollout(
            gpus=gpus, engines=max(1, gpus // 4), gpus_per_engine=min(4, gpus), requests=512
        ),
        phases=Phases(
            rollout_s=_around(away_s - stalls * stall_s - reward_s, float(rng.uniform(0.1, 0.3))),
            tail=Tail(
                frac=round(float(rng.uniform(0.3, 0.6)), 3),
                engines_needed=0.125,
                longest_over_median=round(float(rng.uniform(5, 20)), 3),
            ),
            tool=Tool(stalls=stalls, stall_s=stall_s),
            reward_s=_around(reward_s, 0.3),
            logprob_s=_around(body_s * 0.2, 0.08),
            fwdbwd_s=MicroSteps(
                dist="lognormal", median=round(body_s * 0.8 / count, 3), sigma=0.08, count=count
            ),
            optim_s=Lasting(dist="const", median=optim_s),
            publish_s=Lasting(dist="const", median=round(params * 2 / 200e9, 3)),
            pull_s=Lasting(dist="const", median=round(params * 2 / 100e9, 3)),
            client_gap_s=0.05,
        ),
        drift=Drift(kind="linear", per_150_steps=round(max(0.0, float(rng.normal(0.1, 0.2))), 3)),
        slo=Slo(max_slowdown=1.1 if rng.random() < 0.9 else 1.25),
    )


def _around(median_s: float, sigma: float) -> Lasting:
    return Lasting(dist="lognormal", median=round(median_s, 3), sigma=round(sigma, 3))


def _again(job: TraceJob, rng: np.random.Generator, submit_s: float) -> TraceJob:
    return replace(job, submit_us=round(submit_s * 1e6), seed=int(rng.integers(1, 2**31)))


def _named(job: TraceJob, number: int) -> TraceJob:
    return replace(job, id=f"j{number:05}")
