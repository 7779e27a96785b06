"""Who runs next on a WPG. A policy is a pure function over candidates; the frame is shared.

The frame (anticipatory hold, hysteresis, two guards against starvation) is worth more than the
index: without it two deployments that alternate pay a switch for every function.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp
from typing import Final, Protocol

from plexrl_slurm.core import records
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId


@dataclass(slots=True, kw_only=True)  # not frozen: built at every decision, and that is slow
class Candidate:
    """One deployment (or content) that wants the WPG. A value: nobody changes one."""

    key: str
    #: Of the call that has waited longest.
    job: JobId
    weight: int
    #: How long that call has waited.
    waited_us: int
    #: What bringing it in costs; 0 for the resident.
    switch_us: int
    #: Expected rest of its phase, at least one function.
    remaining_us: int
    #: The job's step time alone.
    step_us: int
    #: Time its phase has waited before, without ``waited_us``.
    phase_waited_us: int
    resident: bool
    #: Its phase has begun and is not over.
    mid_phase: bool
    #: The resident without a call: it may only keep the WPG for its next one.
    virtual: bool
    #: When it last ran, as a count of turns.
    turn: int
    #: Time until the job needs the end of this phase: it samples meanwhile. 0: it waits for it.
    slack_us: int = 0
    #: GPU time that its job has had on this WPG.
    attained_us: int = 0
    #: Waited so long, its phase has waited two steps;
    long_us: int = field(init=False)
    #: not even so long, no guard looks at it.
    calm_us: int = field(init=False)
    #: Its switch and the rest of its phase.
    work_us: int = field(init=False)
    #: Its weight over its work and its step: who is in no hurry gets less of it.
    pull: float = field(init=False)

    def __post_init__(self) -> None:  # once here, not at every decision
        step_us = self.step_us
        long_us = self.long_us = 2 * step_us - self.phase_waited_us
        self.calm_us = step_us if step_us < long_us else long_us
        self.fares(self.switch_us)

    def fares(self, switch_us: int) -> None:
        """Bringing it in costs that now."""
        self.switch_us = switch_us
        self.work_us = switch_us + (self.remaining_us if self.remaining_us > 1 else 1)
        self.pull = self.weight / (self.work_us * self.step_us)


class Rule(StrEnum):
    """Why a candidate won."""

    #: Its phase has waited two steps.
    LONG_OVERDUE = "long overdue"
    #: Its call has waited one step.
    OVERDUE = "overdue"
    #: The resident ends sooner than a switch takes.
    NEARLY_DONE = "nearly done"
    #: The policy's own order.
    INDEX = "index"
    #: Nobody is so much better that leaving the resident's phase pays.
    HYSTERESIS = "hysteresis"


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The winner, and why."""

    winner: Candidate
    rule: Rule


class Policy(Protocol):
    """An order of candidates."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""

    @property
    def holds(self) -> bool:
        """Whether a mid-phase resident without a call may keep the WPG for a moment."""

    def choose(self, candidates: Sequence[Candidate], *, hysteresis: float) -> Choice:
        """The best of at least one candidate."""


def guard(candidates: Sequence[Candidate]) -> Choice | None:
    """Whoever has waited so long that no index counts any more.

    Guard 2 (a phase that waited two steps) goes by the instant it became overdue; guard 1 (a
    call that waited one step) by the ratio, unless the resident ends within the time that the
    switch takes. That exception lasts no longer than the switch itself.
    """
    for c in candidates:
        if c.waited_us >= c.calm_us:
            return _overdue(candidates)
    return None  # the usual case, cheaply


def _overdue(candidates: Sequence[Candidate]) -> Choice | None:
    best, most = None, -1
    for c in candidates:
        excess = c.waited_us - c.long_us
        if excess < most or c.virtual:
            continue
        if excess > most or (best is not None and _before(c, best)):
            best, most = c, excess
    if best is not None:
        return Choice(winner=best, rule=Rule.LONG_OVERDUE)
    late: tuple[tuple[float, int, int], Candidate] | None = None
    for c in candidates:
        if c.waited_us >= c.step_us and not c.virtual:
            ratio = (c.waited_us / c.step_us, c.waited_us, -c.job)
            if late is None or ratio > late[0]:
                late = (ratio, c)
    if late is None:
        return None
    winner = late[1]
    resident = _resident(candidates)
    if (
        resident is not None
        and resident is not winner
        and resident.remaining_us <= winner.switch_us
        and winner.waited_us < winner.step_us + winner.switch_us
    ):
        return Choice(winner=resident, rule=Rule.NEARLY_DONE)
    return Choice(winner=winner, rule=Rule.OVERDUE)


@dataclass(frozen=True, slots=True)
class Hrrs:
    """Highest response ratio with switch: ``w * (W + S + P) / (S + P)``, in the frame."""

    name: str = "hrrs"
    holds: bool = True

    def choose(self, candidates: Sequence[Candidate], *, hysteresis: float) -> Choice:
        guarded = guard(candidates)
        if guarded is not None:
            return guarded
        best = max(candidates, key=lambda c: (self.index(c), c.waited_us, -c.job))
        resident = _resident(candidates)
        if (
            resident is not None
            and resident is not best
            and resident.mid_phase
            and self.index(best) <= (1 + hysteresis) * self.index(resident)
        ):
            return Choice(winner=resident, rule=Rule.HYSTERESIS)
        return Choice(winner=best, rule=Rule.INDEX)

    @staticmethod
    def index(c: Candidate) -> float:
        """Response ratio, weighted."""
        return c.weight * (c.waited_us + c.work_us) / c.work_us


@dataclass(frozen=True, slots=True)
class AtcH:
    """Apparent tardiness cost with an anticipatory hold, in the frame.

    ``(w / P) * exp(-max(0, D - P) / (K * mean P))`` with ``P`` = switch and rest of the phase,
    ``w`` = priority over the job's own step time and ``D`` the slack: short rests first, of jobs
    that wait for them; a job that samples meanwhile has time. Vepsalainen and Morton 1987 for
    jobs with due dates; a phase is due when its job's rollout ends.
    """

    name: str = "atc_h"
    holds: bool = True
    #: How far ahead a due date is felt, in mean lengths of a phase.
    look_ahead: float = 0.5

    def choose(self, candidates: Sequence[Candidate], *, hysteresis: float) -> Choice:
        reach = 0.0
        best, most, resident, kept = candidates[0], -1.0, None, 0.0
        for c in candidates:
            if c.waited_us >= c.calm_us and (guarded := _overdue(candidates)) is not None:
                return guarded
            index = c.pull
            if c.slack_us > c.work_us:  # of few, so that a second pass for the mean is cheaper
                reach = reach or self.look_ahead * _mean_work_us(candidates)
                index *= exp((c.work_us - c.slack_us) / reach)
            if index > most or (index == most and _before(c, best)):
                best, most = c, index
            if c.resident:
                resident, kept = c, index
        if (
            resident is not None
            and resident is not best
            and resident.mid_phase
            and most <= (1 + hysteresis) * kept
        ):
            return Choice(winner=resident, rule=Rule.HYSTERESIS)
        return Choice(winner=best, rule=Rule.INDEX)


@dataclass(frozen=True, slots=True)
class DrainFirst:
    """The resident until it has nothing more, then whoever has waited longest; in the frame."""

    name: str = "drain_first"
    holds: bool = True

    def choose(self, candidates: Sequence[Candidate], *, hysteresis: float) -> Choice:
        guarded = guard(candidates)
        if guarded is not None:
            return guarded
        resident = _resident(candidates)
        return Choice(winner=resident or _longest(candidates), rule=Rule.INDEX)


@dataclass(frozen=True, slots=True)
class LeastAttained:
    """The resident until it has nothing more, then whose job has had least; in the frame."""

    name: str = "least_attained"
    holds: bool = True

    def choose(self, candidates: Sequence[Candidate], *, hysteresis: float) -> Choice:
        guarded = guard(candidates)
        if guarded is not None:
            return guarded
        least = min(candidates, key=lambda c: (c.attained_us / c.weight, -c.waited_us, c.job))
        return Choice(winner=_resident(candidates) or least, rule=Rule.INDEX)


@dataclass(frozen=True, slots=True)
class Fifo:
    """Function by function, in the order of waiting. For comparison: it thrashes."""

    name: str = "fifo"
    holds: bool = False

    def choose(self, candidates: Sequence[Candidate], *, hysteresis: float) -> Choice:
        return Choice(winner=_longest(candidates), rule=Rule.INDEX)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Function by function, whoever ran least recently. For comparison: it thrashes."""

    name: str = "round_robin"
    holds: bool = False

    def choose(self, candidates: Sequence[Candidate], *, hysteresis: float) -> Choice:
        return Choice(winner=min(candidates, key=lambda c: (c.turn, c.job)), rule=Rule.INDEX)


#: Every policy by the name that the configuration uses.
POLICIES: Final[dict[str, Policy]] = {
    policy.name: policy
    for policy in (AtcH(), Hrrs(), Fifo(), DrainFirst(), LeastAttained(), RoundRobin())
}


def find_policy(name: str) -> Policy:
    """The policy of that name."""
    try:
        return POLICIES[name]
    except KeyError:
        known = ", ".join(POLICIES)
        raise BadInput(f"there is no policy {name!r}: choose one of {known}") from None


def _resident(candidates: Sequence[Candidate]) -> Candidate | None:
    return next((c for c in candidates if c.resident), None)


def _mean_work_us(candidates: Sequence[Candidate]) -> float:
    return sum(c.work_us for c in candidates) / len(candidates)


def _before(c: Candidate, other: Candidate) -> bool:
    """Of two that are equal otherwise: the longer wait, then the lower job."""
    if c.waited_us != other.waited_us:
        return c.waited_us > other.waited_us
    return c.job < other.job


def _longest(candidates: Sequence[Candidate]) -> Candidate:
    return max(candidates, key=lambda c: (c.waited_us, -c.job))
