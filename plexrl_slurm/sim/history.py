"""A trace from what a partition did: its own jobs, as its ledger has them.

Durations are busy time, so what a job waited for others is not in them; what it spent outside
(rewards, tools, its own arithmetic) is what is left of the time between its calls.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any, Final

from plexrl_slurm.core.messages import Activity, FunctionKind
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

_SECOND: float = 1e6
#: New weights come of these.
_LAST: Final = frozenset({FunctionKind.OPTIM_STEP, FunctionKind.PUBLISH})
#: More in one rollout are counted as so many longer ones.
_MOST_STALLS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """What the queue knows of a job."""

    #: In the books.
    id: str
    #: As its user knows it; unique.
    name: str
    user: str
    account: str
    qos: str
    #: Its own, times the weight of its QOS.
    priority: int
    #: Of what its steps in the trace vary by: two jobs alike must not vary alike.
    seed: int
    submit_us: int
    #: When it had its place (what starts its script is its own time), and when it ended.
    start_us: int
    end_us: int
    model: str
    #: Of the model; 0: the catalogue has it no more.
    parameters: int
    #: Bytes of a training image for each of them.
    bytes_per_param: float
    walltime_s: float
    #: How much slower than alone it might become.
    max_slowdown: float = 1.1


@dataclass(slots=True)
class _Seen:
    """Stretches of one job, by what it did."""

    train_gpus: int = 0
    rollout_gpus: int = 0
    #: ``(start, stop)`` of samples, and of training functions with their call and kind.
    samples: list[tuple[int, int]] = field(default_factory=list)
    stretches: list[tuple[int, int, str, FunctionKind]] = field(default_factory=list)
    #: ``(start, stop)`` of what brought its model in.
    created: list[tuple[int, int]] = field(default_factory=list)
    #: Where it sampled, and which WPGs were kept for it when.
    wpgs: set[str] = field(default_factory=set)
    kept: list[tuple[str, int, int]] = field(default_factory=list)
    #: When a training function that began at an instant was asked for, where that is known.
    asked: dict[int, int] = field(default_factory=dict)

    def calls(self) -> list[tuple[int, int, FunctionKind]]:
        """Training functions in their order; the books may have one in several pieces."""
        found: list[tuple[int, int, FunctionKind]] = []
        before = ""
        for start, stop, call, kind in sorted(self.stretches):
            if call and call == before and start == found[-1][1]:
                found[-1] = (found[-1][0], stop, kind)
            else:
                found.append((start, stop, kind))
            before = call
        return found


def from_ledger(
    stretches: Iterable[Mapping[str, Any]],
    jobs: Sequence[PastJob],
    asked_us: Mapping[str, int] | None = None,
) -> tuple[list[TraceJob], dict[str, str]]:
    """A trace job for each job that took at least one step, and why others have none, by name.

    ``stretches``: rows of ``cli.ledger.stretches``, in any order. ``asked_us``: when each call
    came, without which the wait of a training function counts as time that its job spent outside.
    """
    seen: dict[str, _Seen] = {}
    idle: dict[str, list[tuple[int, int]]] = {}
    for row in stretches:
        start, stop = int(row["start_us"]), int(row["stop_us"])
        if row["activity"] == Activity.IDLE:
            idle.setdefault(row["wpg"], []).append((start, stop))
        if row["job_id"] is None:
            continue
        mine = seen.setdefault(str(row["job_id"]), _Seen())
        if row["activity"] == Activity.KEPT:
            mine.kept.append((row["wpg"], start, stop))
        if row["activity"] != Activity.BUSY:
            continue
        kind = FunctionKind(row["kind"]) if row["kind"] else FunctionKind.SAMPLE
        gpus = max(1, round(row["gpu_us"] / max(1, stop - start)))
        if kind is FunctionKind.SAMPLE:
            mine.rollout_gpus = max(mine.rollout_gpus, gpus)
            mine.samples.append((start, stop))
            mine.wpgs.add(row["wpg"])
        elif kind is FunctionKind.CREATE:
            mine.created.append((start, stop))
        else:
            mine.train_gpus = max(mine.train_gpus, gpus)
            mine.stretches.append((start, stop, row["call_id"] or "", kind))
            if asked_us is not None and row["call_id"] in asked_us:
                mine.asked[start] = min(start, asked_us[row["call_id"]])
    found, left_out = [], {}
    first_us = min((job.submit_us for job in jobs), default=0)
    for job in sorted(jobs, key=lambda each: (each.submit_us, each.id)):
        mine = seen.get(job.id, _Seen())
        steps = _steps(mine.calls())
        if not steps:
            left_out[job.name] = "it took no optimizer step"
        elif not mine.samples:
            left_out[job.name] = "it sampled nothing here"
        elif not job.parameters:
            left_out[job.name] = f"the catalogue has no model {job.model}"
        else:
            free = [span for wpg in mine.wpgs for span in idle.get(wpg, ())]
            free += [(start, stop) for wpg, start, stop in mine.kept if wpg in mine.wpgs]
            found.append(_trace(job, mine, steps, first_us, sorted(free)))
    return found, left_out


def _steps(
    calls: Sequence[tuple[int, int, FunctionKind]],
) -> list[list[tuple[int, int, FunctionKind]]]:
    """Training functions by step; a publish belongs to the step before it, and the first
    weights to none."""
    steps: list[list[tuple[int, int, FunctionKind]]] = []
    current: list[tuple[int, int, FunctionKind]] = []
    for call in calls:
        if call[2] is FunctionKind.PUBLISH and not current:
            if steps:
                steps[-1].append(call)
            continue
        current.append(call)
        if call[2] is FunctionKind.OPTIM_STEP:
            steps.append(current)
            current = []
    return steps


def _trace(
    job: PastJob,
    mine: _Seen,
    steps: list[list[tuple[int, int, FunctionKind]]],
    first_us: int,
    free: Sequence[tuple[int, int]],
) -> TraceJob:
    def of(kind: FunctionKind) -> list[float]:
        """Seconds of each step in functions of a kind, without steps that had none."""
        sums = [sum(b - a for a, b, what in step if what is kind) / _SECOND for step in steps]
        return [each for each in sums if each > 0]

    mine.samples.sort()
    rollouts, pauses_s = _rollouts(mine.samples, steps, mine.asked)
    micro = [
        (b - a) / _SECOND
        for step in steps
        for a, b, k in step
        if k is FunctionKind.FORWARD_BACKWARD
    ]
    count = max(1, round(len(micro) / len(steps)))
    tool = _tool(_stalls(_merged(mine.samples), steps, free), len(steps))
    gaps = [(after[0] - before[1]) / _SECOND for step in steps for before, after in pairwise(step)]
    first = min(mine.samples[0][0], steps[0][0][0])
    created = sum(stop - start for start, stop in mine.created if start < first)
    together = _overlap(mine.samples, [(step[0][0], step[-1][1]) for step in steps])
    return TraceJob(
        v=1,
        id=job.name,
        submit_us=job.submit_us - first_us,
        user=job.user,
        account=job.account or "none",
        qos=job.qos or "normal",
        priority=float(max(1, job.priority)),
        algo="grpo",
        mode="async1" if together else "sync",
        kind="agentic" if tool.stalls else "reasoning",
        steps=len(steps),
        fail_step=None,
        seed=job.seed,
        walltime_s=max(1.0, job.walltime_s),
        model=Model(
            name=job.model,
            params=job.parameters,
            active=job.parameters,
            train_bytes_per_param=job.bytes_per_param,
            rollout_bytes_per_param=2,
        ),
        train=Train(gpus=mine.train_gpus, tp=1, pp=1, dp=mine.train_gpus, min_gpus=mine.train_gpus),
        rollout=Rollout(
            gpus=mine.rollout_gpus, engines=1, gpus_per_engine=mine.rollout_gpus, requests=1
        ),
        phases=Phases(
            rollout_s=_lasting(rollouts),
            tail=Tail(frac=0, engines_needed=1, longest_over_median=1),
            tool=tool,
            reward_s=_lasting(pauses_s),
            logprob_s=_lasting(of(FunctionKind.FORWARD)),
            fwdbwd_s=MicroSteps(**_fields(micro), count=count),
            optim_s=_lasting(of(FunctionKind.OPTIM_STEP)),
            publish_s=_lasting(of(FunctionKind.PUBLISH)),
            pull_s=Lasting(dist="const", median=0),
            client_gap_s=max(0.0, median(gaps)) if gaps else 0.0,
            create_s=created / _SECOND,
            client_start_s=max(0, first - created - job.start_us) / _SECOND,
            client_end_s=max(0, job.end_us - steps[-1][-1][1]) / _SECOND,
        ),
        drift=Drift(kind="linear", per_150_steps=0),
        slo=Slo(max_slowdown=job.max_slowdown),
    )


def _rollouts(
    samples: Sequence[tuple[int, int]],
    steps: list[list[tuple[int, int, FunctionKind]]],
    asked: Mapping[int, int],
) -> tuple[list[float], list[float]]:
    """Seconds of sampling before each step's training, and from its end until training is asked
    for."""
    merged = _merged(samples)
    lengths, pauses = [], []
    before = -math.inf
    for step in steps:
        begin = step[0][0]
        mine = [(max(a, before), b) for a, b in merged if a < begin and b > before]
        if mine:
            lengths.append(sum(min(b, begin) - a for a, b in mine) / _SECOND)
            pauses.append(max(0.0, asked.get(begin, begin) - mine[-1][1]) / _SECOND)
        before = begin
    return lengths, pauses


def _stalls(
    merged: Sequence[tuple[int, int]],
    steps: list[list[tuple[int, int, FunctionKind]]],
    free: Sequence[tuple[int, int]],
) -> list[float]:
    """Seconds of each pause within a rollout: while the job waited for its tools.

    A pause in which a step ended was for new weights. The job asked for more when its WPG, which
    was ``free``, was so no longer; of a pause in which it never was nobody knows what it was for.
    """
    ends = [b for step in steps for _, b, kind in step if kind in _LAST]
    begun = [a for a, _ in free]
    found = []
    for (_, begin), (end, _) in pairwise(merged):
        if bisect_right(ends, end) > bisect_left(ends, begin):
            continue
        last = bisect_left(begun, end) - 1
        asked = min(free[last][1], end) if last >= 0 else begin
        if begin < asked and begin < steps[-1][0][0]:
            found.append((asked - begin) / _SECOND)
    return found


def _tool(stalls: Sequence[float], steps: int) -> Tool:
    """As many of one length in each step."""
    if not (count := min(_MOST_STALLS, -(-len(stalls) // steps))):
        return Tool(stalls=0, stall_s=0)
    return Tool(stalls=count, stall_s=round(sum(stalls) / (steps * count), 6))


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _overlap(samples: Sequence[tuple[int, int]], phases: Sequence[tuple[int, int]]) -> bool:
    """Whether the job samples during more than a tenth of its training."""
    merged = _merged(samples)
    both = sum(max(0, min(b, stop) - max(a, start)) for start, stop in phases for a, b in merged)
    return both > 0.1 * sum(stop - start for start, stop in phases)


def _lasting(seconds: Sequence[float]) -> Lasting:
    return Lasting(**_fields(seconds))


def _fields(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and spread of the logarithm, so that the mean is that of the data."""
    positive = [each for each in seconds if each > 0]
    if not positive:
        return {"dist": "const", "median": 0.0}
    sigma = pstdev([math.log(each) for each in positive]) if len(positive) > 1 else 0.0
    sigma = min(sigma, 1.5)
    return {
        "dist": "lognormal",
        "median": round(fmean(positive) / math.exp(sigma**2 / 2), 6),
        "sigma": round(sigma, 6),
    }
