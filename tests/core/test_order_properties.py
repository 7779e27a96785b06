"""What must not matter (the order within one instant), and what must (a weight)."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CauseId, JobId
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    CallArrived,
    DeploymentPlaced,
    FunctionKind,
    Pool,
    Run,
    RunEnded,
    SaveImage,
    Switch,
    SwitchEnded,
    Tick,
    WakeAt,
    WpgHeld,
    WpgUp,
)
from plexrl_slurm.core.policy import POLICIES, find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from tests.core.adversary import Adversary, Manner
from tests.core.effort import effort, tried
from tests.core.workloads import ROLLOUT, TRAIN, call, sampled, trained

CAUSE = CauseId("test")
SECOND = 1_000_000
KINDS = (FunctionKind.FORWARD_BACKWARD, FunctionKind.FORWARD_BACKWARD, FunctionKind.OPTIM_STEP)


class Bursts:
    """Facts come in bursts of one instant; ``shuffle`` orders the arrivals of each otherwise.

    What ends at an instant comes before what arrives then: between the end of a call and the next
    of its job is a gap, of nothing if they are one instant, and that is learned.
    """

    def __init__(self, seed: int, policy: str, shuffle: int) -> None:
        self.rng, self.order = random.Random(seed), random.Random(shuffle)
        self.core = SchedulerCore(find_policy(policy), costs=SwitchCosts())
        self.homes = [*(trained(job) for job in range(1, 5)),
                      *(sampled(job, f"s{job}") for job in range(1, 4))]  # fmt: skip
        self.asked = Counter[str]()
        self.under_way: list[AnyInstruction] = []
        self.ticks: list[int] = []

    def burst(self, at_us: int, ends: list[AnyEvent], arrivals: list[AnyEvent]) -> list[str]:
        """What comes of them, in an order of its own; its ends come later."""
        self.order.shuffle(arrivals)
        said = [order for event in (*ends, *arrivals) for order in self.core.handle(event)]
        said += self.core.plan(at_us, CAUSE)
        self.core.check_invariants()
        new = [order for order in said if isinstance(order, Run | Switch | SaveImage)]
        self.under_way = sorted([*self.under_way, *new], key=repr)
        self.ticks += [order.at_us for order in said if isinstance(order, WakeAt)]
        return sorted(map(repr, said))

    def play(self, bursts: int) -> list[list[str]]:
        """The decisions of a whole run."""
        said = []
        for wpg in (TRAIN, ROLLOUT):
            for event in (WpgHeld(wpg=wpg, at_us=0, cause=CAUSE),
                          WpgUp(wpg=wpg.id, at_us=0, cause=CAUSE)):  # fmt: skip
                said.append(self.burst(0, [event], []))
        placed: list[AnyEvent] = [
            DeploymentPlaced(deployment=home, at_us=0, cause=CAUSE) for home in self.homes
        ]
        said.append(self.burst(0, placed, []))
        at_us = 0
        for _ in range(bursts):
            at_us += self.rng.choice((1, 50_000, SECOND, 20 * SECOND))
            ends: list[AnyEvent] = []
            arrivals: list[AnyEvent] = []
            for home in self.homes:
                if self.rng.random() < 0.4:
                    seq = self.asked[home.id]
                    self.asked[home.id] += 1
                    kind = KINDS[seq % 3] if seq else FunctionKind.CREATE
                    kind = kind if home.pool is Pool.TRAIN else FunctionKind.SAMPLE
                    asked = call(home, kind, seq)
                    arrivals.append(CallArrived(call=asked, at_us=at_us, cause=CAUSE))
            left = []
            for order in self.under_way:
                if self.rng.random() < 0.5:
                    left.append(order)
                elif isinstance(order, Run):
                    ends.append(RunEnded(wpg=order.wpg, call=order.call, part=order.part, ok=True,
                                           at_us=at_us, cause=CAUSE))  # fmt: skip
                elif isinstance(order, Switch | SaveImage):
                    ends.append(SwitchEnded(wpg=order.wpg, ok=True, moved_bytes=10**6,
                                              at_us=at_us, cause=CAUSE))  # fmt: skip
            if any(tick <= at_us for tick in self.ticks):
                self.ticks.clear()
                ends.append(Tick(at_us=at_us, cause=CAUSE))
            self.under_way = left
            said.append(self.burst(at_us, ends, arrivals))
        return said


@effort(40)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(sorted(POLICIES)))
def test_the_order_of_facts_of_one_instant_changes_nothing(seed: int, policy: str) -> None:
    first, second = (Bursts(seed, policy, shuffle).play(30) for shuffle in (1, 2))
    assert first == second
    tried("order of one instant")


def share_of(policy: str, weight: int, seed: int, others: int) -> float:
    """Of the training WPG, for the first of some clients that always want it."""
    world = Adversary(seed, policy, "nobody")
    for number in range(others + 1):
        manner = Manner(
            takes=(200_000, 200_000), gaps=(0, 0), rests=(0, 0), depth=4,
            priority=weight if number == 0 else 2,
        )  # fmt: skip
        world.invite(manner, TRAIN)
    world.run(1_200)
    had = {job: us for (wpg, job), us in world.core._books.attained_us.items() if wpg == TRAIN.id}
    return had[JobId(1)] / sum(had.values())


@pytest.mark.parametrize("policy", sorted(POLICIES))
@effort(3, costs=60)
@given(seed=st.integers(0, 2**32), others=st.integers(1, 4), weights=st.tuples(
    st.integers(1, 4), st.integers(0, 8)))  # fmt: skip
def test_a_larger_weight_is_no_smaller_share(
    policy: str, seed: int, others: int, weights: tuple[int, int]
) -> None:
    less, more = weights[0], weights[0] + weights[1]
    # A phase that is cut off by the end of the world may be anybody's.
    assert share_of(policy, more, seed, others) >= share_of(policy, less, seed, others) - 0.03
    tried("weights")
