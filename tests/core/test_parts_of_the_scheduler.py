"""Residency, switch costs, estimates and phases, each by itself."""

import pytest

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.core.estimates import PRIOR_STEP_US, Estimates, ewma
from plexrl_slurm.core.ids import CauseId, JobId, WpgId
from plexrl_slurm.core.messages import FunctionKind, Pool
from plexrl_slurm.core.phase import Phase
from plexrl_slurm.core.residency import STEPS, STORY_LINES, Residency, Whereabouts

CAUSE = CauseId("test")
JOB = JobId(1)
SECOND = 1_000_000
HOLD = 2 * SECOND
FB, OPTIM = FunctionKind.FORWARD_BACKWARD, FunctionKind.OPTIM_STEP
PUBLISH, SAMPLE = FunctionKind.PUBLISH, FunctionKind.SAMPLE


def test_an_illegal_step_tells_the_story() -> None:
    where = Whereabouts("model", Residency.HOST).step(Residency.LOADING, cause=CAUSE)
    with pytest.raises(InvalidTransition) as caught:
        where.step(Residency.SAVING, cause=CAUSE)
    assert caught.value.story == ("[test] host -> loading: load began",)


def test_every_residency_can_be_reached_and_left() -> None:
    assert {start for start, _ in STEPS} == {to for _, to in STEPS} == set(Residency)


def test_a_story_has_an_end() -> None:
    where = Whereabouts("model", Residency.HOST)
    for _ in range(STORY_LINES):
        where = where.step(Residency.LOADING, cause=CAUSE).step(Residency.HOST, cause=CAUSE)
    assert len(where.story) == STORY_LINES


def test_a_switch_costs_what_was_measured() -> None:
    costs, wpg = SwitchCosts(prior_bytes_per_s=1000, floor_us=5), WpgId("train-0")
    assert costs.estimate_us(wpg, 500) == 500_005
    costs.learn(wpg, moved_bytes=4000, duration_us=SECOND)
    assert costs.bytes_per_s(wpg) == 4000
    costs.learn(wpg, moved_bytes=2000, duration_us=SECOND)
    assert costs.bytes_per_s(wpg) == 3400
    costs.learn(wpg, moved_bytes=0, duration_us=SECOND)
    assert costs.bytes_per_s(wpg) == 3400
    assert costs.bytes_per_s(WpgId("train-1")) == 1000


def test_the_newest_weighs_three_tenths() -> None:
    assert ewma(None, 7) == 7
    assert ewma(100, 200) == 130


def test_a_step_alone_is_its_time_without_the_waits() -> None:
    estimates = Estimates()
    estimates.saw_step(JOB, 10 * SECOND)
    assert estimates.step_us(JOB) == PRIOR_STEP_US
    estimates.saw_wait(JOB, 3 * SECOND)
    estimates.saw_step(JOB, 20 * SECOND)
    assert estimates.step_us(JOB) == 7 * SECOND
    estimates.forget(JOB)
    assert estimates.step_us(JOB) == PRIOR_STEP_US


def ran(phase: Phase, estimates: Estimates, kind: FunctionKind, at_s: float) -> None:
    """One function of a second."""
    at_us = int(at_s * SECOND)
    phase.wait(kind, at_us, estimates, HOLD)
    phase.begin(at_us, estimates)
    phase.open_step = kind is FB or (phase.open_step and kind is not OPTIM)
    phase.end(kind, at_us + SECOND, estimates, HOLD)


def test_an_open_step_is_waited_for_and_a_closed_one_is_not() -> None:
    phase, estimates = Phase(job=JOB, pool=Pool.TRAIN), Estimates()
    ran(phase, estimates, FB, 0)
    assert phase.hold_until_us(estimates, HOLD) == 3 * SECOND
    ran(phase, estimates, OPTIM, 1.1)
    assert phase.hold_until_us(estimates, HOLD) is None
    assert not phase.in_middle()
    assert estimates.phase_us(JOB, Pool.TRAIN) == 2 * SECOND


def test_the_hold_is_twice_the_gap_within_limits() -> None:
    phase, estimates = Phase(job=JOB, pool=Pool.TRAIN), Estimates()
    ran(phase, estimates, FB, 0)
    ran(phase, estimates, FB, 1.2)
    assert phase.hold_until_us(estimates, HOLD) == int(2.2 * SECOND) + 400_000
    ran(phase, estimates, FB, 2.201)
    assert phase.last_end_us is not None
    estimates.saw_gap(JOB, FB, 0)
    assert phase.hold_until_us(estimates, HOLD) == phase.last_end_us + 2 * 98_210


def test_a_publish_that_always_follows_is_waited_for() -> None:
    phase, estimates = Phase(job=JOB, pool=Pool.TRAIN), Estimates()
    for step in range(2):
        ran(phase, estimates, FB, 20 * step)
        ran(phase, estimates, OPTIM, 20 * step + 1)
        held = phase.hold_until_us(estimates, HOLD)
        ran(phase, estimates, PUBLISH, 20 * step + 2)
        assert (held is not None) == (step == 1)
    assert not phase.in_middle()


def test_a_client_that_is_always_slow_is_not_waited_for() -> None:
    phase, estimates = Phase(job=JOB, pool=Pool.TRAIN), Estimates()
    ran(phase, estimates, FB, 0)
    ran(phase, estimates, FB, 9)
    assert phase.open_step
    assert phase.hold_until_us(estimates, HOLD) is None


def test_a_sampler_is_waited_for_only_if_history_says_so() -> None:
    phase, estimates = Phase(job=JOB, pool=Pool.ROLLOUT), Estimates()
    ran(phase, estimates, SAMPLE, 0)
    assert not phase.in_middle()
    ran(phase, estimates, SAMPLE, 1.3)
    assert phase.hold_until_us(estimates, HOLD) == int(2.3 * SECOND) + 600_000


def test_a_phase_that_was_long_overdue_has_its_due_once_it_runs() -> None:
    phase, estimates = Phase(job=JOB, pool=Pool.TRAIN), Estimates()
    for at_us, waited_us in ((0, PRIOR_STEP_US), (PRIOR_STEP_US + SECOND, 0)):
        phase.wait(FB, at_us, estimates, HOLD)
        phase.open_step = True
        phase.begin(at_us + PRIOR_STEP_US, estimates)
        phase.end(FB, at_us + PRIOR_STEP_US, estimates, HOLD)
        assert phase.waited_us == waited_us
