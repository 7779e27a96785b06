"""The demo's arithmetic: what sharing saved, from jobs, their step lines and the timeline. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One job of one run, when it has ended."""

    name: str
    started_us: int
    ended_us: int
    #: Effective optimizer steps.
    steps: int
    #: Lines that the example wrote, one for each step.
    lines: Sequence[Mapping[str, Any]]
    #: SHA-256 of the final weights.
    weights: str

    @property
    def loop_s(self) -> float:
        """Length of the training loop, without the controller's start-up."""
        return float(self.lines[-1]["elapsed_seconds"]) if self.lines else 0.0

    @property
    def learned(self) -> tuple[Any, ...]:
        """Everything that learning gave: losses, samples and weights, bit for bit."""
        return (
            tuple((line["loss"], line["samples"], line["reward"]) for line in self.lines),
            self.weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """Several jobs at once, and what the WPGs did meanwhile."""

    jobs: Sequence[JobRun]
    stretches: Sequence[Mapping[str, Any]]
    #: Whether the stretches are all that was held meanwhile: holds came and went.
    several_holds: bool = False
    #: Images between host memory and the disk below it; ``None``: there is none.
    nvme: Mapping[str, int] | None = None

    @property
    def window_us(self) -> tuple[int, int]:
        """From the first job's start to the last one's end."""
        return min(job.started_us for job in self.jobs), max(job.ended_us for job in self.jobs)


def step_s(job: JobRun) -> float:
    """Median step of a job without tools: rollout and training."""
    return float(median(line["rollout_seconds"] + line["train_seconds"] for line in job.lines))


def clipped(
    stretches: Sequence[Mapping[str, Any]], window_us: tuple[int, int]
) -> list[tuple[str, str, float]]:
    """``(WPG, activity, GPU-microseconds)`` of what lies inside the window."""
    begin, end = window_us
    found = []
    for stretch in stretches:
        start, stop = max(begin, stretch["start_us"]), min(end, stretch["stop_us"])
        length = stretch["stop_us"] - stretch["start_us"]
        if start < stop and length:
            share = stretch["gpu_us"] * (stop - start) / length
            found.append((str(stretch["wpg"]), str(stretch["activity"]), share))
    return found


def compare(
    shared: SharedRun,
    alone: Sequence[JobRun],
    *,
    gpus: int,
    pools: Mapping[str, str],
    shared_gpus: int | None = None,
) -> dict[str, Any]:
    """One row of the demo's table. ``pools`` says the pool of every WPG.

    ``gpus``: what a job alone takes; ``shared_gpus``: of the hold that they share, if others.
    """
    together_gpus = gpus if shared_gpus is None else shared_gpus
    begin, end = shared.window_us
    held_alone_us = sum(gpus * (job.ended_us - job.started_us) for job in alone)
    parts = clipped(shared.stretches, (begin, end))
    held_shared_us = (
        sum(share for *_, share in parts) if shared.several_holds else together_gpus * (end - begin)
    )
    per_step_shared = held_shared_us / max(1, sum(job.steps for job in shared.jobs)) / 1e6
    per_step_alone = held_alone_us / max(1, sum(job.steps for job in alone)) / 1e6
    slowdowns = [
        together.loop_s / single.loop_s
        for together, single in zip(shared.jobs, alone, strict=True)
        if single.loop_s
    ]
    identical = [
        together.learned == single.learned
        for together, single in zip(shared.jobs, alone, strict=True)
    ]
    return {
        "gpu_seconds_per_step": {"shared": per_step_shared, "dedicated": per_step_alone},
        "saving_percent": 100 * (1 - per_step_shared / per_step_alone),
        "bound_percent": 100 * (1 - together_gpus / (gpus * len(alone))),
        "slowdown": {"mean": mean(slowdowns), "max": max(slowdowns)},
        "switch_percent": 100 * _sum(parts, activity="switch") / held_shared_us,
        "pool_busy_percent": {
            pool: 100 * _pool_share(parts, pools, pool) for pool in sorted(set(pools.values()))
        },
        "learning_identical": all(identical),
        **({"nvme": dict(shared.nvme)} if shared.nvme is not None else {}),
        "jobs": [
            {
                "name": together.name,
                "steps": together.steps,
                "slowdown": slow,
                "loop_seconds": {"shared": together.loop_s, "alone": single.loop_s},
                "rewards": [line["reward"] for line in together.lines],
                "learning_identical": same,
                "weights": {"shared": together.weights, "alone": single.weights},
            }
            for together, single, slow, same in zip(
                shared.jobs, alone, slowdowns, identical, strict=True
            )
        ],
    }


def _sum(parts: Sequence[tuple[str, str, float]], *, activity: str) -> float:
    return sum(share for _, name, share in parts if name == activity)


def _pool_share(
    parts: Sequence[tuple[str, str, float]], pools: Mapping[str, str], pool: str
) -> float:
    here = [(wpg, name, share) for wpg, name, share in parts if pools.get(wpg) == pool]
    held = sum(share for _, _, share in here)
    return _sum(here, activity="busy") / held if held else 0.0


def table(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the demo's closing table."""
    heads = [
        "JOBS",
        "GPU-S/STEP SHARED",
        "DEDICATED",
        "SAVED",
        "BOUND",
        "SLOWDOWN",
        "MAX",
        "SWITCH",
        "BUSY",
        "LEARNING IDENTICAL",
    ]
    cells = []
    for name, row in rows.items():
        busy = " ".join(f"{pool} {share:.0f}%" for pool, share in row["pool_busy_percent"].items())
        cells.append(
            [
                name,
                f"{row['gpu_seconds_per_step']['shared']:.2f}",
                f"{row['gpu_seconds_per_step']['dedicated']:.2f}",
                f"{row['saving_percent']:.1f}%",
                f"{row['bound_percent']:.1f}%",
                f"{row['slowdown']['mean']:.3f}",
                f"{row['slowdown']['max']:.3f}",
                f"{row['switch_percent']:.2f}%",
                busy,
                "yes" if row["learning_identical"] else "NO",
            ]
        )
    return heads, cells
