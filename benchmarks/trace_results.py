"""What do whole traces save? Runs them, one after the other, and keeps each result at once.

``python -m benchmarks.trace_results TRACES results.json [--only quarter-fit]``: TRACES is the
folder with ``week.jsonl`` and ``quarter.jsonl``. Stopped, it goes on where it was; what is in
the file is not run again. At the end it prints the tables of docs/scheduling.md.

- ``week-fit``: 1,024 GPUs split 2:1, fit, three seeds; with ``-plain``: only on the shape that
  a job asked, as a group was filled before.
- ``quarter-fit``: the quarter arrives 2.7 times as fast on 2,048 GPUs split 2:1, three seeds.
- ``paper``: the quarter on 1,024 GPUs split 2:1 under the paper's four placements, nobody goes
  before a job that has waited 168 h, nobody moves, and a group has at most six members, or, in
  ``paper-pairs``, two as in the paper's tables.

A job on WPGs of its own takes what it takes alone and its first load (``tests/sim``), so
``isolated`` is the core's queue and placement only; ``--every-function`` runs it as all others,
and counts every micro-step for itself. Without it, those of both are put together up to a
minute, which halves an hour.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from plexrl_slurm.core.backlog import HOUR_US
from plexrl_slurm.core.grouping import Member, Placement, Rules
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.sim.cluster import Cluster, Plan, split
from plexrl_slurm.sim.controller import Controller
from plexrl_slurm.sim.report import figures
from plexrl_slurm.sim.run import simulate
from plexrl_slurm.sim.trace import TraceJob, compressed, read_trace
from plexrl_slurm.sim.world import World

SEEDS = (1, 2, 3)
#: Of an hour of a training GPU to one of a rollout GPU: H800 to H20, as WEAVE (OSDI 2026) pays,
#: whose 1.84 is a sum of money.
PRICES = (2.85, 1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    group: str
    trace: str
    gpus: int
    placement: str
    plan: Plan
    compress: float = 1.0
    #: Micro-steps are counted together as one function of at most so many seconds; 0: as they are.
    together_s: float = 0.0

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
        Case(group=group, trace="quarter", gpus=1024, placement=placement, together_s=60,
             plan=Plan(rules=Rules(most=most), guard_us=168 * HOUR_US, regroup_us=0))
        for group, most in (("paper", 6), ("paper-pairs", 2))
        for placement in ("isolated", "pack", "spread", "spread_backfill")
    ]  # fmt: skip
    return week + quarter + paper


def run(case: Case, traces: Path, *, every_function: bool) -> dict[str, Any]:
    """Its figures."""
    trace = compressed(read_trace(traces / f"{case.trace}.jsonl"), case.compress)
    if case.together_s and not every_function:
        trace = [together(job, case.together_s) for job in trace]
    begin = perf_counter()
    if case.placement == "isolated" and not every_function:
        return {**isolated(trace, split(case.gpus, "2:1"), case.plan), "moves": 0}

    def progress(world: World) -> None:
        ended = sum(record.end_us >= 0 for record in world.records.values())
        line = f"{case.key}: {ended} of {len(trace)} jobs, {perf_counter() - begin:,.0f} s"
        print(line, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)

    cluster = replace(split(case.gpus, "2:1"), train_price=PRICES[0], rollout_price=PRICES[1])
    ran = simulate(trace, cluster, placement=case.placement, plan=case.plan, progress=progress)
    return {**ran.figures.as_json(), "moves": ran.world.mover.count}


def together(job: TraceJob, most_s: float) -> TraceJob:
    """The same job, in fewer functions: a run has half of them to decide on."""
    phases, micro = job.phases, job.phases.fwdbwd_s
    count = min(micro.count, max(1, ceil(micro.count * micro.median / most_s)))
    gaps_s = (micro.count - count) * phases.client_gap_s
    median_s = (micro.count * micro.median + gaps_s) / count
    merged = msgspec.structs.replace(micro, count=count, median=median_s)
    return msgspec.structs.replace(job, phases=msgspec.structs.replace(phases, fwdbwd_s=merged))


class Lone(World):
    """Jobs on WPGs of their own: only when they begin is decided."""

    def begin(self, member: Member, rollout: WpgId) -> None:
        job = self.records[member.job].job
        self._controllers[member.job] = Controller(job, self)
        self._kept[member.job] = deque()
        self.at(self.now_us + job.alone_us(), self._ended, job)


def isolated(trace: list[TraceJob], cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """The figures that can be told without running functions."""
    rules = replace(plan.rules, placement=Placement.ISOLATED)
    world = Lone(trace, cluster, replace(plan, rules=rules, backfill=False))
    world.run()
    found = figures(world, "isolated", 0.0).as_json()
    told = ("efficiency", "makespan_us", "mean_completion_us", "held_percent", "slowdown")
    return {name: found[name] for name in told}


def main() -> None:
    """Run what is missing, then print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", help="cases whose name begins so")
    parser.add_argument("--every-function", action="store_true", help="of isolated jobs, too")
    given = parser.parse_args()
    done: dict[str, Any] = {}
    if given.results.exists():
        done = json.loads(given.results.read_text())
    for case in cases():
        if case.key not in done and case.key.startswith(given.only or ""):
            done[case.key] = run(case, given.traces, every_function=given.every_function)
            part = given.results.with_suffix(".part")
            part.write_text(json.dumps(done, indent=1))
            part.replace(given.results)
    print(tables(done))


def tables(done: dict[str, Any]) -> str:
    """Markdown of what has been run."""
    lines = [
        "| run | seeds | work per GPU-hour | for its price | slowdown mean | p95 | promises missed "
        "| moves |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in ("week-fit", "week-fit-plain", "quarter-fit"):
        runs = [each for key, each in done.items() if key.startswith(f"{group}/")]
        if runs:
            cells = [
                _interval([each["efficiency"] for each in runs], "{:.3f}"),
                _interval([each["cost_efficiency"] for each in runs], "{:.3f}"),
                _interval([each["slowdown"]["mean"] for each in runs], "{:.3f}"),
                _interval([each["slowdown"]["p95"] for each in runs], "{:.3f}"),
                _interval([each["promises_missed_percent"] for each in runs], "{:.1f} %"),
                _interval([each["moves"] for each in runs], "{:.0f}"),
            ]
            lines.append(f"| {group} | {len(runs)} | " + " | ".join(cells) + " |")
    for group in ("paper", "paper-pairs"):
        paper = {k.split("/")[1]: v for k, v in done.items() if k.startswith(f"{group}/")}
        if not paper:
            continue
        lines += [
            "",
            f"| {group} | mean completion | of isolated | makespan | work per GPU-hour |",
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
