"""Learns what jobs are like from what the scheduler hears and says. Pure: facts in, numbers out.

Of each step: how long it would have lasted alone, how long it occupied each pool, its longest
function, how much of its training ran while it sampled. Kept are exponentially weighted means, the
spread of what lies between two training phases, and quantiles of the newest steps.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Final

from plexrl_slurm.core.estimates import LEAST_STEP_US, ewma
from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    Call,
    CallArrived,
    DeploymentDropped,
    DeploymentPlaced,
    Expected,
    Finish,
    FunctionKind,
    Pool,
    Rollouts,
    Run,
    RunEnded,
    Switch,
    SwitchEnded,
    WpgDown,
    WpgReleased,
)
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.core.profiles import Habits

#: A longer pause between two training calls is no part of a phase.
LONGEST_GAP_US: Final = 2_000_000
#: After them a job samples.
_LAST: Final = frozenset({FunctionKind.OPTIM_STEP, FunctionKind.PUBLISH})
#: Newest values that quantiles are taken from.
KEPT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of the newest values of something."""

    p50_us: int
    p90_us: int

    @classmethod
    def of(cls, values: Sequence[int]) -> "Quantiles":
        """Of at least one value."""
        ranked = sorted(values)
        return cls(
            p50_us=ranked[(len(ranked) - 1) // 2], p90_us=ranked[(len(ranked) * 9 + 9) // 10 - 1]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTimes:
    """How long one kind of function takes, of inputs of one size."""

    count: int
    mean_us: int
    quantiles: Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the steps of a job have been like."""

    #: Steps that were measured.
    steps: int
    step_us: int
    #: Busy and short pauses of the training WPG in a step, and its longest function there.
    phase_us: int
    function_us: int
    #: Busy time of the rollout WPG in a step.
    sample_us: int
    #: Standard deviation of what lies between two training phases.
    spread_us: int
    #: Share of the shorter pool's time in which both were busy, in percent.
    overlap_percent: int
    #: All of these steps, alone, and as they were with what they waited.
    alone_us: int = 0
    taken_us: int = 0
    #: ``None``: it was never switched.
    train_switch_us: int | None = None
    sample_switch_us: int | None = None
    #: Of ``step``, ``phase`` and ``sample``.
    quantiles: Mapping[str, Quantiles] = field(default_factory=dict)
    #: By kind and size, such as ``forward_backward/13``: up to 2**13 tokens.
    functions: Mapping[str, FunctionTimes] = field(default_factory=dict)
    #: Lengths and pauses of its samples; ``None``: of an earlier version.
    rollouts: Rollouts | None = None

    def expected(self) -> Expected:
        """For the scheduler's own estimates: functions by kind, whatever their size."""
        total: dict[FunctionKind, tuple[int, int]] = {}
        for name, times in self.functions.items():
            kind = FunctionKind(name.partition("/")[0])
            count, length_us = total.get(kind, (0, 0))
            total[kind] = (count + times.count, length_us + times.count * times.mean_us)
        return Expected(
            step_us=self.step_us,
            train_us=self.phase_us,
            sample_us=self.sample_us,
            functions={kind: length_us // count for kind, (count, length_us) in total.items()},
            rollouts=self.rollouts,
        )

    def habits(self, switch_us: int) -> Habits:
        """As profiles; ``switch_us``: what a switch costs if it was never seen."""
        both = self.overlap_percent >= 50
        ahead = self.sample_us - self.phase_us
        return Habits(
            train=Profile(
                step_us=self.step_us,
                phase_us=self.phase_us,
                function_us=self.function_us,
                switch_us=self.train_switch_us or switch_us,
                overlaps=both,
                slack_us=max(0, ahead) if both else 0,
                spread_us=self.spread_us,
            ),
            rollout=Profile(
                step_us=self.step_us,
                phase_us=self.sample_us,
                function_us=self.sample_us,
                switch_us=self.sample_switch_us or switch_us,
                overlaps=both,
                slack_us=max(0, -ahead) if both else 0,
                spread_us=self.spread_us,
            ),
        )


@dataclass(slots=True, eq=False)
class _Job:
    """One job while it is watched."""

    deployments: set[DeploymentId] = field(default_factory=set)
    #: Whose optimizer steps count.
    main: DeploymentId | None = None
    at_us: int = 0
    #: Calls that run, and that wait, by pool.
    running: dict[Pool, int] = field(default_factory=lambda: dict.fromkeys(Pool, 0))
    waiting: dict[Pool, int] = field(default_factory=lambda: dict.fromkeys(Pool, 0))
    #: A snapshot of its own comes in: that is no waiting for others.
    pulling: int = 0
    #: When its last training call ended, unless that ends a phase.
    trained_us: int | None = None
    #: Of the step that is under way; ``since_us``: when it began.
    since_us: int | None = None
    spoiled: bool = True
    train_us: int = 0
    sample_us: int = 0
    both_us: int = 0
    wait_us: int = 0
    longest_us: int = 0
    #: Learned so far.
    steps: int = 0
    alone_us: int = 0
    taken_us: int = 0
    means: dict[str, int] = field(default_factory=dict)
    variance: int = 0
    newest: dict[str, deque[int]] = field(default_factory=dict)
    switches: dict[Pool, int] = field(default_factory=dict)
    functions: dict[str, tuple[int, int, deque[int]]] = field(default_factory=dict)

    def pass_to(self, at_us: int) -> None:
        """Book what has passed until now."""
        passed = at_us - self.at_us
        if passed <= 0:
            return
        self.at_us = at_us
        trains, samples = self.running[Pool.TRAIN] > 0, self.running[Pool.ROLLOUT] > 0
        self.train_us += passed * trains
        self.sample_us += passed * samples
        self.both_us += passed * (trains and samples)
        if not (trains or samples or self.pulling) and any(self.waiting.values()):
            self.wait_us += passed

    def note(self, name: str, value: int) -> None:
        """A new value of something that is averaged."""
        self.means[name] = ewma(self.means.get(name), value)
        self.newest.setdefault(name, deque(maxlen=KEPT)).append(value)

    def end_step(self, at_us: int) -> bool:
        """An optimizer step has ended; whether the step could be measured."""
        measured = self.since_us is not None and not self.spoiled
        if self.since_us is not None and measured:
            step_us = max(LEAST_STEP_US, at_us - self.since_us - self.wait_us)
            step_us = max(step_us, self.train_us, self.sample_us)
            shorter = min(self.train_us, self.sample_us)
            overlap = 100 * self.both_us // shorter if shorter else 0
            away_us = self.sample_us if overlap >= 50 else step_us - self.train_us
            if "away" in self.means:
                off = away_us - self.means["away"]
                self.variance += (off * off - self.variance) * 3 // 10
            values = {
                "step": step_us,
                "phase": self.train_us,
                "function": self.longest_us,
                "sample": self.sample_us,
                "overlap": overlap,
                "away": away_us,
            }
            for name, value in values.items():
                self.note(name, value)
            self.steps += 1
            self.alone_us += step_us
            self.taken_us += max(step_us, at_us - self.since_us)
        self.since_us, self.spoiled = at_us, False
        self.train_us = self.sample_us = self.both_us = self.wait_us = self.longest_us = 0
        return measured

    def learned(self) -> Learned | None:
        """All there is, or ``None`` before the first measured step."""
        if not self.steps:
            return None
        return Learned(
            steps=self.steps,
            step_us=self.means["step"],
            phase_us=self.means["phase"],
            function_us=self.means["function"],
            sample_us=self.means["sample"],
            spread_us=isqrt(self.variance),
            overlap_percent=self.means["overlap"],
            alone_us=self.alone_us,
            taken_us=self.taken_us,
            train_switch_us=self.switches.get(Pool.TRAIN),
            sample_switch_us=self.switches.get(Pool.ROLLOUT),
            quantiles={
                name: Quantiles.of(self.newest[name]) for name in ("step", "phase", "sample")
            },
            functions={
                name: FunctionTimes(count=count, mean_us=mean, quantiles=Quantiles.of(newest))
                for name, (count, mean, newest) in self.functions.items()
            },
        )


class Learner:
    """Hears every event and every instruction of a scheduler, in their order."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _Job] = {}
        self._homes: dict[DeploymentId, tuple[JobId, Pool]] = {}
        #: Calls that have not ended, and those of them that run: where, which part, since when.
        self._calls: dict[CallId, Call] = {}
        self._runs: dict[CallId, tuple[WpgId, int, int]] = {}
        self._switches: dict[WpgId, tuple[JobId, Pool, int]] = {}
        #: What the scheduler itself has learned of a job's rollouts.
        self.rollouts_of: Callable[[JobId], Rollouts | None] = lambda _job: None

    def learned(self, job: JobId) -> Learned | None:
        """What is known of a job's own steps."""
        known = self._jobs.get(job)
        found = None if known is None else known.learned()
        return None if found is None else replace(found, rollouts=self.rollouts_of(job))

    def heard(self, event: AnyEvent) -> JobId | None:
        """A fact; the job of which a step was measured with it."""
        match event:
            case DeploymentPlaced(deployment=deployment):
                self._homes[deployment.id] = (deployment.job, deployment.pool)
                job = self._jobs.setdefault(deployment.job, _Job(at_us=event.at_us))
                job.deployments.add(deployment.id)
            case DeploymentDropped(deployment=name):
                self._dropped(name)
            case CallArrived(call=call, done=False) if call.id not in self._calls:
                self._arrived(call, event.at_us)
            case RunEnded():
                return self._ended(event)
            case SwitchEnded(wpg=wpg):
                self._switched(wpg, event.at_us, ok=event.ok)
            case WpgDown(wpg=wpg) | WpgReleased(wpg=wpg):
                self._lost(wpg, event.at_us)
            case _:
                pass
        return None

    def said(self, at_us: int, instructions: Sequence[AnyInstruction]) -> None:
        """What was decided at that instant."""
        for order in instructions:
            match order:
                case Run():
                    self._begun(order, at_us)
                case Finish(call=call):
                    self._finished(call, at_us)
                case Switch(wpg=wpg, incoming=name) if name in self._homes:
                    job, pool = self._homes[name]
                    self._switches[wpg] = (job, pool, at_us)
                    if pool is Pool.ROLLOUT and job in self._jobs:
                        self._jobs[job].pass_to(at_us)
                        self._jobs[job].pulling += 1
                case _:
                    pass

    # -- deployments and calls -------------------------------------------------------------
    def _dropped(self, name: DeploymentId) -> None:
        job, _ = self._homes.pop(name, (None, None))
        found = self._jobs.get(job) if job is not None else None
        if found is None or job is None:
            return
        found.deployments.discard(name)
        if found.main == name:
            found.main, found.spoiled = None, True
        if not any(pool is Pool.TRAIN for owner, pool in self._homes.values() if owner == job):
            found.spoiled = True
        if not found.deployments:
            del self._jobs[job]
            for call in [call for call, known in self._calls.items() if known.job == job]:
                del self._calls[call]
                self._runs.pop(call, None)

    def _arrived(self, call: Call, at_us: int) -> None:
        job = self._jobs.get(call.job)
        if job is None:
            return
        job.pass_to(at_us)
        pool = _pool(call)
        idle = not (job.running[pool] or job.waiting[pool])
        if pool is Pool.TRAIN and idle and job.trained_us is not None:
            gap_us = at_us - job.trained_us
            if 0 < gap_us <= LONGEST_GAP_US:
                job.train_us += gap_us
        self._calls[call.id] = call
        job.waiting[pool] += 1

    def _begun(self, order: Run, at_us: int) -> None:
        call = self._calls.get(order.call)
        job = self._jobs.get(call.job) if call is not None else None
        if call is None or job is None or order.call in self._runs:
            return
        job.pass_to(at_us)
        pool = _pool(call)
        job.waiting[pool] -= 1
        job.running[pool] += 1
        job.spoiled |= order.replay
        self._runs[order.call] = (order.wpg, order.part, at_us)

    def _ended(self, event: RunEnded) -> JobId | None:
        run, call = self._runs.get(event.call), self._calls.get(event.call)
        if run is None or call is None or run[1] != event.part:
            return None
        del self._runs[event.call]
        job, pool = self._jobs[call.job], _pool(call)
        job.pass_to(event.at_us)
        job.running[pool] -= 1
        lasted_us = max(0, event.at_us - run[2])
        if event.ok:
            self._note_function(job, call, lasted_us)
        if pool is Pool.TRAIN:
            job.longest_us = max(job.longest_us, lasted_us)
            job.trained_us = None if call.kind in _LAST else event.at_us
        if event.ok and event.part + 1 < call.parts:
            job.waiting[pool] += 1
            return None
        del self._calls[event.call]
        if call.kind is not FunctionKind.OPTIM_STEP or not event.ok:
            return None
        job.main = job.main or call.deployment
        if job.main == call.deployment and job.end_step(event.at_us):
            return call.job
        return None

    @staticmethod
    def _note_function(job: _Job, call: Call, lasted_us: int) -> None:
        name = f"{call.kind}/{(call.tokens // call.parts).bit_length()}"
        count, mean, newest = job.functions.get(name, (0, lasted_us, deque(maxlen=KEPT)))
        newest.append(lasted_us)
        job.functions[name] = (count + 1, ewma(mean, lasted_us), newest)

    def _finished(self, name: CallId, at_us: int) -> None:
        """One that never ran, or does not run again."""
        call = self._calls.get(name)
        if call is None or name in self._runs:
            return
        del self._calls[name]
        if (job := self._jobs.get(call.job)) is not None:
            job.pass_to(at_us)
            job.waiting[_pool(call)] -= 1

    # -- WPGs ------------------------------------------------------------------------------
    def _switched(self, wpg: WpgId, at_us: int, *, ok: bool) -> None:
        if wpg not in self._switches:
            return
        name, pool, since_us = self._switches.pop(wpg)
        job = self._jobs.get(name)
        if job is None:
            return
        if pool is Pool.ROLLOUT:
            job.pass_to(at_us)
            job.pulling = max(0, job.pulling - 1)
        if ok:
            job.switches[pool] = ewma(job.switches.get(pool), max(0, at_us - since_us))

    def _lost(self, wpg: WpgId, at_us: int) -> None:
        self._switched(wpg, at_us, ok=False)
        for name in [call for call, run in self._runs.items() if run[0] == wpg]:
            del self._runs[name]
            call = self._calls[name]
            if (job := self._jobs.get(call.job)) is not None:
                job.pass_to(at_us)
                job.spoiled = True
                job.running[_pool(call)] -= 1
                job.waiting[_pool(call)] += 1


def _pool(call: Call) -> Pool:
    return Pool.ROLLOUT if call.kind is FunctionKind.SAMPLE else Pool.TRAIN
