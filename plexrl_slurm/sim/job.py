"""One job of a trace: what its controller asks, and when; and what it would take alone."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import FunctionKind
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.sim.trace import DRIFT_STEPS, Lasting, TraceJob

SECOND_US = 1_000_000
#: The scheduler's weights are whole numbers, a trace's priorities need not be: only proportions
#: count, and a power of two changes no rounding.
_WEIGHT = 1024


def micro(seconds: float) -> int:
    """Seconds as microseconds."""
    return round(seconds * SECOND_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Durations of one step, microseconds."""

    #: Pull of the weights, the rollout with its tool stalls.
    sample_us: int
    #: The stalls, and how long each is.
    stalls: int
    stall_us: int
    reward_us: int
    #: Training functions in their order.
    train: tuple[tuple[FunctionKind, int], ...]

    @property
    def sampling_us(self) -> tuple[int, ...]:
        """Of the rollout, what lies between its stalls: all alike."""
        each_us, left_us = divmod(self.sample_us - self.stalls * self.stall_us, self.stalls + 1)
        return (each_us + left_us, *[each_us] * self.stalls)


@dataclass(slots=True, eq=False, kw_only=True)
class SimJob:
    """A job and its random numbers: the same, whatever it shares."""

    number: JobId
    trace: TraceJob
    gap_us: int
    #: From its start to its first call, and from its last answer to its end.
    begin_us: int
    end_us: int
    #: To bring the base model in.
    create_us: int
    _rollout: NDArray[np.float64] = field(repr=False)
    _reward: NDArray[np.float64] = field(repr=False)
    _train: NDArray[np.float64] = field(repr=False)

    @classmethod
    def of(cls, number: int, trace: TraceJob) -> "SimJob":
        """Draws what is random in it, in the order that the format defines."""
        rng, phases = np.random.default_rng(trace.seed), trace.phases
        rollout, reward, train = (
            np.exp(sigma * rng.standard_normal(trace.steps))
            for sigma in (phases.rollout_s.sigma, phases.reward_s.sigma, phases.fwdbwd_s.sigma)
        )
        return cls(
            number=JobId(number),
            trace=trace,
            gap_us=micro(phases.client_gap_s),
            begin_us=micro(phases.client_start_s),
            end_us=micro(phases.client_end_s),
            create_us=micro(phases.create_s),
            _rollout=rollout,
            _reward=reward,
            _train=train,
        )

    @property
    def weight(self) -> int:
        """On its WPGs."""
        return max(1, round(_WEIGHT * self.trace.priority))

    def step(self, number: int) -> Step:
        """Durations of step ``number``, from 0."""
        phases, drift = self.trace.phases, self.trace.drift.per_150_steps
        grown = 1 + drift * min(number, DRIFT_STEPS) / DRIFT_STEPS
        factor = float(self._train[number])
        stall_us = micro(phases.tool.stall_s)
        stalls = phases.tool.stalls if stall_us else 0
        rollout_s = phases.rollout_s.median * float(self._rollout[number]) * grown
        forward = (FunctionKind.FORWARD, micro(phases.logprob_s.median * factor))
        micro_step = (FunctionKind.FORWARD_BACKWARD, micro(phases.fwdbwd_s.median * factor))
        return Step(
            sample_us=micro(phases.pull_s.median + rollout_s) + stalls * stall_us,
            stalls=stalls,
            stall_us=stall_us,
            reward_us=micro(phases.reward_s.median * float(self._reward[number])),
            train=(
                forward,
                *[micro_step] * phases.fwdbwd_s.count,
                (FunctionKind.OPTIM_STEP, micro(phases.optim_s.median)),
                (FunctionKind.PUBLISH, micro(phases.publish_s.median)),
            ),
        )

    def step_us(self, number: int) -> int:
        """Step ``number`` alone, once the first rollout has ended."""
        step = self.step(number)
        train_us = sum(length for _, length in step.train) + self.gap_us * (len(step.train) - 1)
        if self.trace.overlaps:
            return max(step.sample_us, train_us)
        return step.sample_us + step.reward_us + train_us

    def alone_us(self) -> int:
        """From its start to its end on WPGs of its own."""
        sampled = trained = begun_us = self.begin_us + self.create_us
        for number in range(self.trace.length):
            step = self.step(number)
            gaps_us = self.gap_us * (len(step.train) - 1)
            train_us = sum(duration for _, duration in step.train) + gaps_us
            if self.trace.overlaps:
                # The rollout of a step needs the weights of the last but one.
                begin_us = max(sampled, begun_us)
                begun_us = trained
                sampled = begin_us + step.sample_us
                trained = max(trained, sampled + step.reward_us) + train_us
            else:
                trained += step.sample_us + step.reward_us + train_us
        return trained + self.end_us

    def declared(self, switch_us: int) -> Profile:
        """What the medians of the trace say of its steps."""
        phases = self.trace.phases
        count = phases.fwdbwd_s.count
        phase_s = (
            _mean(phases.logprob_s)
            + count * _mean(phases.fwdbwd_s)
            + phases.optim_s.median
            + phases.publish_s.median
            + (count + 2) * phases.client_gap_s
        )
        grown = 1 + self.trace.drift.per_150_steps * min(1.0, self.trace.length / DRIFT_STEPS) / 2
        rollout_s = phases.rollout_s.median * grown
        away_s = rollout_s + phases.tool.stalls * phases.tool.stall_s + phases.pull_s.median
        reward_s = _mean(phases.reward_s)
        together = self.trace.overlaps
        step_s = max(away_s, phase_s) if together else away_s + reward_s + phase_s
        longest_s = max(phases.logprob_s.median, phases.fwdbwd_s.median)
        return Profile(
            step_us=micro(step_s),
            phase_us=micro(phase_s),
            function_us=micro(longest_s),
            switch_us=switch_us,
            overlaps=together,
            weight=self.weight,
            slack_us=micro(max(0.0, away_s - phase_s - reward_s)) if together else 0,
            spread_us=micro(rollout_s * phases.rollout_s.sigma),
        )

    def measured(self, steps: int, switch_us: int) -> Profile:
        """What its first ``steps`` steps were, without what it waited."""
        taken = [self.step(number) for number in range(steps)]
        gaps_us = self.gap_us * (len(taken[0].train) - 1)
        phases = [sum(length for _, length in step.train) + gaps_us for step in taken]
        phase_us = sum(phases) // steps
        away_us = sum(step.sample_us for step in taken) // steps
        reward_us = sum(step.reward_us for step in taken) // steps
        together = self.trace.overlaps
        return Profile(
            step_us=max(away_us, phase_us) if together else away_us + reward_us + phase_us,
            phase_us=phase_us,
            function_us=max(length for _, length in taken[0].train),
            switch_us=switch_us,
            overlaps=together,
            weight=self.weight,
            slack_us=max(0, away_us - phase_us - reward_us) if together else 0,
            spread_us=int(np.std([step.sample_us for step in taken])),
        )


def _mean(lasting: Lasting) -> float:
    return lasting.median * float(np.exp(lasting.sigma**2 / 2))
