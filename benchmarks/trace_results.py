"""What do whole traces save? Runs them, one after the other, and keeps each result at once.

``python -m benchmarks.trace_results TRACES results.json [--only quarter-fit]``: TRACES is the
folder with ``week.jsonl`` and ``quarter.jsonl``. Stopped, it goes on where it was; what is in
the file is not run again. At the end it prints the tables of docs/scheduling.md.

- ``week-fit``: 1,024 GPUs split 2:1, fit, three seeds; with ``-plain``: only on the shape that
  a job asked, as a group was filled before.
- ``quarter-fit``: the quarter arrives 2.7 times as fast on 2,048 GPUs split 2:1, three seeds.
- ``paper``: the quarter on 1,024 GPUs split 2:1 under the paper's four placements, nobody goes
  before a job that has waited 168 h.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from plexrl_slurm.core.backlog import HOUR_US
from plexrl_slurm.sim.cluster import Plan, split
from plexrl_slurm.sim.run import simulate
from plexrl_slurm.sim.trace import compressed, read_trace
from plexrl_slurm.sim.world import World

SEEDS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    group: str
    trace: str
    gpus: int
    placement: str
    plan: Plan
    compress: float = 1.0

    @property
    def key(self) -> str:
        return f"{self.group}/{self.placement}/seed{self.plan.seed}"


def cases() -> list[Case]:
    """All of them; the shortest first."""
    week = [
        Case(group=group, trace="week", gpus=1024, placement="fit",
             plan=Plan(seed=seed, widest=widest))
        for group, widest in (("week-fit", 2.0), ("week-fit-plain", 1.0))
        for seed in SEEDS
    ]  # fmt: skip
    quarter = [
        Case(group="quarter-fit", trace="quarter", gpus=2048, placement="fit",
             plan=Plan(seed=seed), compress=2.7)
        for seed in SEEDS
    ]  # fmt: skip
    paper = [
        Case(group="paper", trace="quarter", gpus=1024, placement=placement,
             plan=Plan(guard_us=168 * HOUR_US))
        for placement in ("isolated", "pack", "spread", "spread_backfill")
    ]  # fmt: skip
    return week + quarter + paper


def run(case: Case, traces: Path) -> dict[str, Any]:
    """Its figures."""
    trace = compressed(read_trace(traces / f"{case.trace}.jsonl"), case.compress)
    begin = perf_counter()

    def progress(world: World) -> None:
        ended = sum(record.end_us >= 0 for record in world.records.values())
        line = f"{case.key}: {ended} of {len(trace)} jobs, {perf_counter() - begin:,.0f} s"
        print(line, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)

    cluster = split(case.gpus, "2:1")
    ran = simulate(trace, cluster, placement=case.placement, plan=case.plan, progress=progress)
    return {**ran.figures.as_json(), "moves": ran.world.mover.count}


def main() -> None:
    """Run what is missing, then print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", help="cases whose name begins so")
    given = parser.parse_args()
    done: dict[str, Any] = {}
    if given.results.exists():
        done = json.loads(given.results.read_text())
    for case in cases():
        if case.key not in done and case.key.startswith(given.only or ""):
            done[case.key] = run(case, given.traces)
            part = given.results.with_suffix(".part")
            part.write_text(json.dumps(done, indent=1))
            part.replace(given.results)
    print(tables(done))


def tables(done: dict[str, Any]) -> str:
    """Markdown of what has been run."""
    lines = [
        "| run | seeds | work per GPU-hour | slowdown mean | p95 | promises missed | moves |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in ("week-fit", "week-fit-plain", "quarter-fit"):
        runs = [each for key, each in done.items() if key.startswith(f"{group}/")]
        if runs:
            cells = [
                _interval([each["efficiency"] for each in runs], "{:.3f}"),
                _interval([each["slowdown"]["mean"] for each in runs], "{:.3f}"),
                _interval([each["slowdown"]["p95"] for each in runs], "{:.3f}"),
                _interval([each["promises_missed_percent"] for each in runs], "{:.1f} %"),
                _interval([each["moves"] for each in runs], "{:.0f}"),
            ]
            lines.append(f"| {group} | {len(runs)} | " + " | ".join(cells) + " |")
    paper = {k.split("/")[1]: v for k, v in done.items() if k.startswith("paper/")}
    if paper:
        lines += [
            "",
            "| placement | mean completion | of isolated | makespan | work per GPU-hour |",
            "|---|---|---|---|---|",
        ]
        base = paper.get("isolated", {}).get("mean_completion_us")
        for name, each in paper.items():
            mean_us = each["mean_completion_us"]
            share = f"{100 * mean_us / base:.1f} %" if base else ""
            lines.append(
                f"| {name} | {mean_us / HOUR_US:,.0f} h | {share} | "
                f"{each['makespan_us'] / HOUR_US:,.0f} h | {each['efficiency']:.3f} |"
            )
    return "\n".join(lines)


def _interval(values: Sequence[float], form: str) -> str:
    """The median, and the least and most of all seeds."""
    middle = form.format(median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


if __name__ == "__main__":
    main()
