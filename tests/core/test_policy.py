"""Policies over candidates: who wins, and by which rule."""

import pytest

from plexrl_slurm import whereabouts
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.policy import POLICIES, Candidate, Rule, find_policy
from plexrl_slurm.settings import Settings

MS, SECOND = 1_000, 1_000_000


def one(
    job: int, *, waited: float = 0, switch: float = 0, rest: float = 1, step: float = 100,
    phase: float = 0, resident: bool = False, mid: bool = False, virtual: bool = False,
    turn: int = 0, weight: int = 1, slack: float = 0, attained: float = 0,
) -> Candidate:  # fmt: skip
    return Candidate(
        key=f"job {job}", job=JobId(job), weight=weight, waited_us=int(waited * SECOND),
        switch_us=int(switch * SECOND), remaining_us=int(rest * SECOND),
        step_us=int(step * SECOND), phase_waited_us=int(phase * SECOND), resident=resident,
        mid_phase=mid, virtual=virtual, turn=turn,
        slack_us=int(slack * SECOND), attained_us=int(attained * SECOND),
    )  # fmt: skip


HELD = one(1, resident=True, mid=True, virtual=True)

CASES = [
    pytest.param("hrrs", [one(1, waited=2, rest=2), one(2, waited=2, rest=1)], 2, Rule.INDEX,
                 id="the shorter work has the higher ratio"),
    pytest.param("hrrs", [one(1, waited=3, switch=2), one(2, waited=2)], 2, Rule.INDEX,
                 id="a switch counts as work"),
    pytest.param("hrrs", [one(1, waited=2), one(2, waited=2)], 1, Rule.INDEX,
                 id="ties go to the lower job"),
    pytest.param("hrrs", [one(1, waited=1, rest=1), one(2, waited=2, rest=2)], 2, Rule.INDEX,
                 id="equal ratios go to the longer wait"),
    pytest.param("hrrs", [one(1, waited=1), one(2, waited=1, weight=2)], 2, Rule.INDEX,
                 id="a weight multiplies"),
    pytest.param("hrrs", [HELD, one(2, waited=3)], 1, Rule.HYSTERESIS,
                 id="a phase is not left for a little"),
    pytest.param("hrrs", [HELD, one(2, waited=4.1)], 2, Rule.INDEX,
                 id="a phase is left for five times the index"),
    pytest.param("hrrs", [one(1, resident=True), one(2, waited=3)], 2, Rule.INDEX,
                 id="between two phases there is no hysteresis"),
    pytest.param("hrrs", [one(1, waited=9, rest=1), one(2, waited=8, rest=99, step=8)], 2,
                 Rule.OVERDUE, id="a call that waited a step wins"),
    pytest.param("hrrs", [one(1, waited=30, step=20), one(2, waited=19, step=10)], 2,
                 Rule.OVERDUE, id="the larger ratio is more overdue"),
    pytest.param("hrrs", [one(1, resident=True, mid=True), one(2, waited=101, switch=2)], 1,
                 Rule.NEARLY_DONE, id="a resident that ends within the switch may end"),
    pytest.param("hrrs", [one(1, resident=True, mid=True), one(2, waited=103, switch=2)], 2,
                 Rule.OVERDUE, id="but not for longer than the switch takes"),
    pytest.param("hrrs", [one(1, waited=15, step=10), one(2, waited=1, step=10, phase=20)], 2,
                 Rule.LONG_OVERDUE, id="two steps in a phase come before one step of a call"),
    pytest.param("hrrs", [one(1, waited=22, step=10), one(2, waited=25, step=12)], 1,
                 Rule.LONG_OVERDUE, id="the longest overdue goes first"),
    pytest.param("atc_h", [one(1, rest=2), one(2, rest=1)], 2, Rule.INDEX,
                 id="atc: the shorter rest"),
    pytest.param("atc_h", [one(1), one(2, step=50)], 2, Rule.INDEX,
                 id="atc: whose step is shorter loses more by a wait"),
    pytest.param("atc_h", [one(1), one(2, rest=0.5, slack=5)], 1, Rule.INDEX,
                 id="atc: a job that still samples has time"),
    pytest.param("atc_h", [one(1), one(2, rest=0.5, slack=0.5)], 2, Rule.INDEX,
                 id="atc: but not when its rollout ends before its phase would"),
    pytest.param("atc_h", [one(1), one(2, switch=0.5, rest=0.6)], 1, Rule.INDEX,
                 id="atc: a switch counts as work"),
    pytest.param("atc_h", [HELD, one(2, rest=0.21)], 1, Rule.HYSTERESIS,
                 id="atc: a phase is not left for a little"),
    pytest.param("atc_h", [HELD, one(2, rest=0.19)], 2, Rule.INDEX,
                 id="atc: a phase is left for five times the index"),
    pytest.param("least_attained", [one(1, attained=2, waited=5), one(2, attained=1)], 2,
                 Rule.INDEX, id="least attained: who has had least"),
    pytest.param("least_attained", [one(1, attained=3, weight=2), one(2, attained=2)], 1,
                 Rule.INDEX, id="least attained: for its weight"),
    pytest.param("least_attained", [HELD, one(2, attained=0)], 1, Rule.INDEX,
                 id="least attained: but the resident ends first"),
    pytest.param("fifo", [HELD, one(2, waited=1), one(3, waited=2)], 3, Rule.INDEX,
                 id="fifo: who waited longest"),
    pytest.param("drain_first", [HELD, one(2, waited=50)], 1, Rule.INDEX,
                 id="drain first: the resident, even for a call that is yet to come"),
    pytest.param("drain_first", [HELD, one(2, waited=101)], 2, Rule.OVERDUE,
                 id="drain first: the guards hold"),
    pytest.param("drain_first", [one(2, waited=1), one(3, waited=2)], 3, Rule.INDEX,
                 id="drain first: then who waited longest"),
    pytest.param("round_robin", [one(1, turn=7), one(2, turn=4), one(3, turn=5)], 2, Rule.INDEX,
                 id="round robin: who ran least recently"),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "candidates", "winner", "rule"), CASES)
def test_choice(policy: str, candidates: list[Candidate], winner: int, rule: Rule) -> None:
    for order in (candidates, candidates[::-1]):
        choice = find_policy(policy).choose(order, hysteresis=4.0)
        assert (choice.winner.job, choice.rule) == (winner, rule)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="no policy 'best': choose one of atc_h, hrrs"):
        find_policy("best")


def test_the_configuration_knows_every_policy() -> None:
    assert set(whereabouts.POLICIES) == set(POLICIES)
    assert whereabouts.POLICIES[0] == Settings.__dataclass_fields__["policy"].default == "atc_h"
