"""The last samples of a rollout, which keep a whole WPG from those that wait for it.

A tail may be paused at a token boundary: its calls wait again and go on later where they were,
after their tokens have been computed once more (the *re-prefill*). That is decided here, by the
exchange of two neighbours in a queue: with the tail first the others wait for its rest; with the
tail second it waits for their work, and costs a switch and the re-prefill more.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.ids import JobId

#: Sample calls of a job whose lengths are remembered, and how many tell something.
KEPT: Final = 64
ENOUGH: Final = 8
#: Between two looks at a tail that was left alone: its expected rest grows with its age.
LOOK_US: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TailRules:
    """``[tails]`` of the configuration."""

    pause: bool = True
    #: So many running calls are a tail, if there were more,
    running: int = 4
    #: or so many percent of those that ran at once.
    share: int = 10
    #: A shorter rest is not worth the trouble.
    least_us: int = 5_000_000
    #: A call is paused at most so often.
    pauses: int = 4
    #: On WPGs with a second engine slot it runs on there instead, beside who waited,
    co_resident: bool = False
    #: while each is believed to take so many percent longer.
    slowdown: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What runs, while others wait."""

    #: Calls that run, and the most that ran at once since the WPG was last switched.
    running: int
    most: int
    #: The largest and the smallest number of times that one of them was paused before.
    pauses: int
    fewest: int
    #: Since the last of them began, or went on.
    ran_us: int
    #: Until the last of them is expected to end; ``None``: nothing is known.
    rest_us: int | None
    #: What a pause costs: the switch back, and the re-prefill.
    back_us: int
    weight: int
    step_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """Who would run instead."""

    #: Its switch and the rest of its phase.
    work_us: int
    weight: int
    step_us: int
    #: It has waited so long that the policy's order does not count any more.
    overdue: bool
    #: Of its work, the switch.
    switch_us: int = 0


def few_left(rules: TailRules, tail: Tail) -> bool:
    """Whether few of many are left, or what was paused goes on."""
    few = tail.running <= rules.running or 100 * tail.running <= rules.share * tail.most
    left = tail.running < tail.most or tail.fewest > 0
    return few and left and tail.running > 0


def is_tail(rules: TailRules, tail: Tail) -> bool:
    """Whether it is one, and may be paused at all."""
    return rules.pause and few_left(rules, tail) and tail.pauses < rules.pauses


def pays(rules: TailRules, tail: Tail, waiter: Waiter) -> bool:
    """Whether a tail had better be paused for ``waiter``.

    Weights are priority over the job's own step time, as in the policies. Of somebody overdue only
    the time counts that the WPG saves: the tail has no claim against them.
    """
    rest_us = tail.rest_us
    if rest_us is None or rest_us < rules.least_us or rest_us <= tail.back_us:
        return False
    if tail.ran_us < tail.back_us:
        return False  # it would do little more than come and go
    if waiter.overdue:
        return True
    saves = rest_us * waiter.weight * tail.step_us
    costs = (waiter.work_us + tail.back_us) * tail.weight * waiter.step_us
    return saves > costs


def pays_beside(rules: TailRules, tail: Tail, waiter: Waiter) -> bool:
    """Whether ``waiter`` had better come in beside a tail that runs on.

    It saves what it would have waited, less what it runs slower; the tail runs slower as long.
    """
    rest_us = tail.rest_us
    if rest_us is None or rest_us < rules.least_us or rest_us <= waiter.switch_us:
        return False  # it comes in as soon when the tail has ended
    if waiter.overdue:
        return True
    slower_us = min(rest_us, waiter.work_us) * rules.slowdown // 100
    saves = (rest_us - slower_us) * waiter.weight * tail.step_us
    return saves > slower_us * tail.weight * waiter.step_us


class Lengths:
    """How long sample calls of each job ran; forgotten with the job."""

    def __init__(self) -> None:
        self._lengths: dict[JobId, deque[int]] = {}

    def saw(self, job: JobId, busy_us: int) -> None:
        """One ended after so long, pauses left out."""
        self._lengths.setdefault(job, deque(maxlen=KEPT)).append(busy_us)

    def rest_us(self, job: JobId, age_us: int) -> int | None:
        """Expected rest of one that has run for ``age_us``; ``None``: too few are known.

        The mean of those that lasted longer. If none did, half its age: what a Pareto tail of
        shape 3 expects.
        """
        known = self._lengths.get(job, ())
        if len(known) < ENOUGH:
            return None
        longer = [length for length in known if length > age_us]
        return sum(longer) // len(longer) - age_us if longer else age_us // 2

    def forget(self, job: JobId) -> None:
        """The job is over."""
        self._lengths.pop(job, None)
