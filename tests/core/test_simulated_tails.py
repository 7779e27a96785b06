"""Two jobs on one rollout WPG, one of them with a long tail: what a pause is worth."""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

from plexrl_slurm.core.ids import CallId
from plexrl_slurm.core.messages import (
    AnyInstruction,
    Call,
    CallArrived,
    Deployment,
    FunctionKind,
    Pause,
    Run,
    Switch,
)
from plexrl_slurm.core.tails import TailRules
from tests.core.hand import CAUSE, SECOND, Hand
from tests.core.workloads import ROLLOUT, call, sampled

SWITCH_US = SECOND
#: Of a paused call that goes on.
PREFILL_US = SECOND // 2


@dataclass
class Sim:
    """Rollouts of some calls each, one after another with a pause for training."""

    rules: TailRules | None
    hand: Hand = field(init=False)
    #: What is left of each call, and since when it runs.
    left_us: dict[CallId, int] = field(default_factory=dict)
    began_us: dict[CallId, int] = field(default_factory=dict)
    calls: dict[CallId, Call] = field(default_factory=dict)
    #: Of each job: rollouts that are left, and the length of each call of one.
    plans: dict[Deployment, tuple[int, list[int]]] = field(default_factory=dict)
    open: dict[Deployment, int] = field(default_factory=dict)
    #: Ends of each job's rollouts.
    ended_us: dict[Deployment, list[int]] = field(default_factory=lambda: defaultdict(list))
    pauses: int = 0
    _soon: list[tuple[int, int, str, CallId, Deployment | None]] = field(default_factory=list)
    _count: int = 0

    def run(self, plans: dict[Deployment, tuple[int, list[int]]]) -> None:
        self.hand = Hand(ROLLOUT, policy="atc_h", tails=self.rules)
        self.hand.place(*plans)
        self.hand.up()
        self.plans = plans
        for each in plans:
            self._at(0, "rollout", CallId(""), each)
        while self._soon:
            wake_us = min(self.hand.wakes, default=self._soon[0][0] + 1)
            if wake_us <= self._soon[0][0]:
                self.hand.wakes.remove(wake_us)
                self.hand.now = max(self.hand.now, wake_us)
                self._follow(self.hand.tick())
                continue
            at_us, _, what, name, job = heapq.heappop(self._soon)
            self.hand.now = max(self.hand.now, at_us)
            self._happens(what, name, job)

    def _at(self, delay_us: int, what: str, name: CallId, job: Deployment | None = None) -> None:
        self._count += 1
        heapq.heappush(self._soon, (self.hand.now + delay_us, self._count, what, name, job))

    def _happens(self, what: str, name: CallId, job: Deployment | None) -> None:
        hand = self.hand
        if what == "rollout" and job is not None:
            left, lengths = self.plans[job]
            self.plans[job] = (left - 1, lengths)
            calls = [
                call(job, FunctionKind.SAMPLE, left * 100 + seq, tokens=100)
                for seq in range(len(lengths))
            ]
            self.open[job] = len(calls)
            for asked, length in zip(calls, lengths, strict=True):
                self.calls[asked.id], self.left_us[asked.id] = asked, length
                hand.core.handle(CallArrived(call=asked, at_us=hand.now, cause=CAUSE))
            self._follow(hand.tick())
        elif what == "switched":
            self._follow(hand.switched(moved_bytes=500_000))
        elif what == "end" and self.began_us.get(name, 0) + self.left_us[name] == hand.now:
            del self.began_us[name]
            self._follow(hand.end(self.calls[name]))
            self._one_ended(self.calls[name])

    def _one_ended(self, ended: Call) -> None:
        job = next(each for each in self.plans if each.id == ended.deployment)
        self.open[job] -= 1
        if self.open[job] == 0:
            self.ended_us[job].append(self.hand.now)
            if self.plans[job][0] > 0:
                self._at(20 * SECOND, "rollout", CallId(""), job)

    def _follow(self, orders: list[AnyInstruction]) -> None:
        for order in orders:
            if isinstance(order, Run):
                self.left_us[order.call] += PREFILL_US * (order.attempt > 1)
                self.began_us[order.call] = self.hand.now
                self._at(self.left_us[order.call], "end", order.call)
            elif isinstance(order, Switch):
                self._at(SWITCH_US, "switched", CallId(""))
            elif isinstance(order, Pause):
                for name in order.calls:
                    self.pauses += 1
                    self.left_us[name] -= self.hand.now - self.began_us.pop(name)
                    self._follow(self.hand.paused(self.calls[name]))


LONG, SHORT = sampled(1, "long"), sampled(2, "short")


def simulated(rules: TailRules | None) -> Sim:
    """Rollouts with a tail of 400 s, beside many of 20 s."""
    sim = Sim(rules)
    tailed = [10 * SECOND] * 15 + [400 * SECOND]
    sim.run({LONG: (4, tailed), SHORT: (30, [20 * SECOND] * 8)})
    return sim


def test_pausing_tails_lets_others_through_and_costs_their_job_little() -> None:
    without, paused = simulated(None), simulated(TailRules())
    assert without.pauses == 0 and paused.pauses > 0
    meanwhile = [
        sum(end_us < sim.ended_us[LONG][-1] for end_us in sim.ended_us[SHORT])
        for sim in (without, paused)
    ]
    assert meanwhile[1] >= 4 * meanwhile[0], "rollouts of the other job"
    assert paused.ended_us[LONG][-1] < 1.3 * without.ended_us[LONG][-1]
    assert paused.ended_us[SHORT][-1] < without.ended_us[SHORT][-1]
