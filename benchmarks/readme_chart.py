"""The README's chart: GPU-hours of the week trace, each job on its own GPUs, and shared.

``python -m benchmarks.readme_chart TRACES/week.jsonl docs/img/week.png`` (some minutes).
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.core.backlog import HOUR_US
from plexrl_slurm.core.messages import Activity, Pool
from plexrl_slurm.sim.cluster import Plan, split
from plexrl_slurm.sim.run import Ran, simulate
from plexrl_slurm.sim.trace import read_trace
from plexrl_slurm.sim.world import World

COLOURS: Final = {
    (Pool.TRAIN, True): "#1f5f99",
    (Pool.TRAIN, False): "#c3d9ec",
    (Pool.ROLLOUT, True): "#c25a1b",
    (Pool.ROLLOUT, False): "#f4d4bd",
}
NAMES: Final = {Pool.TRAIN: "training GPUs", Pool.ROLLOUT: "rollout GPUs"}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """GPU-hours of one way to run the trace, by pool and whether they worked."""

    name: str
    hours: dict[tuple[Pool, bool], float]

    @property
    def total(self) -> float:
        return sum(self.hours.values())


def dedicated(ran: Ran) -> Bar:
    """Every job on WPGs of its own, as large as it asked, from its start to its end."""
    hours = dict.fromkeys(COLOURS, 0.0)
    for record in ran.world.records.values():
        job, trace = record.job, record.job.trace
        held_us = job.alone_us()
        steps = [job.step(number) for number in range(trace.length)]
        train_us = sum(us for step in steps for _, us in step.train) + job.create_us
        for pool, gpus, busy_us in (
            (Pool.TRAIN, trace.train.gpus, train_us),
            (Pool.ROLLOUT, trace.rollout.gpus, sum(sum(step.sampling_us) for step in steps)),
        ):
            hours[pool, True] += gpus * busy_us / HOUR_US
            hours[pool, False] += gpus * (held_us - busy_us) / HOUR_US
    return Bar(name="each job on\nGPUs of its own", hours=hours)


def shared(ran: Ran) -> Bar:
    """What the run held."""
    hours = dict.fromkeys(COLOURS, 0.0)
    for (pool, activity), gpu_us in ran.world.gpu_us.items():
        hours[pool, activity is Activity.BUSY] += gpu_us / HOUR_US
    return Bar(name="shared\npartition", hours=hours)


def draw(bars: tuple[Bar, Bar], ran: Ran, path: Path) -> None:
    """Two bars, and what lies between them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 2.9), layout="constrained")
    for height, bar in zip((1, 0), bars, strict=True):
        left = 0.0
        for (pool, busy), colour in COLOURS.items():
            width = bar.hours[pool, busy] / 1000
            axes.barh(height, width, 0.6, left, color=colour, edgecolor="white",
                      label=f"{NAMES[pool]}, {'at work' if busy else 'waiting'}"
                      if height else None)  # fmt: skip
            if width > 0.06 * bars[0].total / 1000:
                axes.text(left + width / 2, height, f"{width:,.0f}", ha="center", va="center",
                          color="white" if busy else "#333333", fontsize=9)  # fmt: skip
            left += width
        axes.text(left, height, f"  {bar.total / 1000:,.0f}", va="center", weight="bold")
    saved = 100 * (1 - bars[1].total / bars[0].total)
    found = ran.figures
    axes.set_title(
        f"A week of {found.jobs} jobs: {saved:.0f} % of the GPU-hours saved "
        f"(jobs take {found.slowdown.mean:.3f} x as long on average)",
        fontsize=11, loc="left",
    )  # fmt: skip
    axes.set_yticks((1, 0), [bar.name for bar in bars])
    axes.set_xlabel("thousand GPU-hours held")
    axes.set_xlim(0, bars[0].total / 1000 * 1.08)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.3))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--gpus", type=int, default=1024)
    given = parser.parse_args()
    trace = read_trace(given.trace)

    def progress(world: World) -> None:
        ended = sum(record.end_us >= 0 for record in world.records.values())
        print(f"{ended} of {len(trace)} jobs have ended", file=sys.stderr, flush=True)

    ran = simulate(trace, split(given.gpus, "2:1"), placement="fit", plan=Plan(), progress=progress)
    draw((dedicated(ran), shared(ran)), ran, given.picture)
    print(f"{ran.figures.efficiency:.3f} x the work per GPU-hour; wrote {given.picture}")


if __name__ == "__main__":
    main()
