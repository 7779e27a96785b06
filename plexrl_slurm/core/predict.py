"""How much slower a job gets on a WPG that it shares: an estimate, before anybody runs.

Each job alternates a training phase with a time in which it needs no training WPG. In every step

- its phase may find another's running. It waits for the rest of it, or, if ATC-H interrupts that
  one for it, for the rest of a function. Who has the shorter rest of a phase, the shorter step and
  the larger weight goes first; a phase is left only for an index five times its own (the
  hysteresis), so a phase that is nearly done, or one of a job alike, is not left.
- its own phase may be interrupted in the same way, by each that comes meanwhile.
- what waits behind one another grows as the WPG fills.

A synchronous job loses all of that; one that samples meanwhile only what exceeds its slack. The
weights are a fit to 660 simulated groups of jobs of the quarter trace (2 to 5 jobs of one shape,
ATC-H; without intercept, and each near 1 as the reasoning asks). ``benchmarks/predictor.py``
measures the error; docs/decisions/0037 tells what it replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import erf, exp, pi, sqrt
from typing import Final

#: How much of a WPG's time phases can fill at all.
USABLE: Final = 0.985
#: An index must be so many times the resident's: 1 + the hysteresis of ATC-H.
_LEAD: Final = 5.0
#: Of what a phase finds running, and of what interrupts it; by whether the other one has slack.
_FOUND: Final = {False: 1.1, True: 0.92}
_INTERRUPTS: Final = {False: 0.8, True: 1.1}
#: Of the congestion: phase * load^2 / (1 - load).
_CROWD: Final = 0.1
#: Waits are less even than the above: their mean and variance beside slack.
_UNEVEN_MEAN: Final = 1.6
_UNEVEN_VARIANCE: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one step of a job asks of its training WPG when it is alone."""

    #: A whole step.
    step_us: int
    #: From the first training function of a step to the end of its last one.
    phase_us: int
    #: The longest of these functions: nobody is preempted within one.
    function_us: int
    #: To take its state out and another's in.
    switch_us: int
    #: Whether it samples for the next step meanwhile.
    overlaps: bool
    #: How long its phase may begin late without making a step longer; 0 unless it overlaps.
    slack_us: int = 0
    #: Standard deviation of the time between two phases.
    spread_us: int = 0
    #: Its job's, to those of others.
    weight: int = 1

    @property
    def load(self) -> float:
        """Share of the WPG that it needs, switches included."""
        return (self.phase_us + self.switch_us) / max(1, self.step_us)


def slowdowns(members: Sequence[Profile]) -> list[float]:
    """Expected step time over step time alone, for each of the jobs that share a WPG."""
    if len(members) < 2:
        return [1.0] * len(members)
    load = sum(member.load for member in members)
    floor = max(1.0, load / USABLE)
    found = []
    for number, mine in enumerate(members):
        mean = variance = 0.0
        for other, theirs in enumerate(members):
            if other != number:
                wait, square = _wait(mine, theirs)
                mean += wait
                variance += square
        others = min(0.95, load - mine.load)
        mean += _CROWD * mine.phase_us * others * others / (1 - others)
        found.append(max(floor, _slowdown(mine, mean, variance)))
    return found


@lru_cache(maxsize=1 << 15)
def foreseen(members: tuple[Profile, ...]) -> tuple[float, ...]:
    """:func:`slowdowns`, remembered: a queue asks the same of the same groups again and again."""
    return tuple(slowdowns(members))


def _wait(mine: Profile, theirs: Profile) -> tuple[float, float]:
    """Mean wait of a step for one other job, and its variance."""
    length = theirs.phase_us + theirs.switch_us
    own = mine.phase_us + mine.switch_us
    step_us, their_step_us = max(1, mine.step_us), max(1, theirs.step_us)
    busy = min(1.0, length / their_step_us)
    heavier = theirs.weight / mine.weight
    # With no more left than this, theirs is not interrupted.
    rest = min(float(length), heavier * _LEAD * step_us * own / their_step_us)
    left = 1 - rest / max(1, length)
    function = theirs.function_us
    found = busy * (left * function / 2 + (1 - left) * rest / 2 + theirs.switch_us)
    square = busy * (left * function**2 + (1 - left) * rest**2) / 3
    # Mine is interrupted while it has more left than this.
    safe = _LEAD * their_step_us * length / step_us / heavier
    times = max(0.0, mine.phase_us - safe) / their_step_us
    mean = _FOUND[theirs.overlaps] * found + _INTERRUPTS[theirs.overlaps] * times * length
    return mean, max(0.0, square - found * found) + times * length**2


def _slowdown(mine: Profile, wait_us: float, variance: float) -> float:
    step_us = max(1, mine.step_us)
    if not mine.overlaps:
        return 1 + (wait_us + mine.switch_us) / step_us
    alone = _excess(-mine.slack_us, mine.spread_us)
    spread_us = sqrt(mine.spread_us**2 + _UNEVEN_VARIANCE * variance)
    late = _excess(_UNEVEN_MEAN * wait_us + mine.switch_us - mine.slack_us, spread_us)
    return 1 + max(0.0, late - alone) / step_us


def _excess(mean: float, spread: float) -> float:
    """Expected positive part of a normal variable."""
    if spread <= 0:
        return max(0.0, mean)
    z = mean / spread
    return mean * (1 + erf(z / sqrt(2))) / 2 + spread * exp(-z * z / 2) / sqrt(2 * pi)
