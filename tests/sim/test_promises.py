"""What is left of a promise, by the steps that a job has taken."""

import pytest

from plexrl_slurm.core.grouping import Group, Member
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.sim.job import SimJob
from plexrl_slurm.sim.promises import EVERY, Promises
from tests.sim.traces import job

S = 1_000_000


def member(number: int) -> Member:
    profile = Profile(
        step_us=97 * S, phase_us=25 * S, function_us=5 * S, switch_us=S, overlaps=False
    )
    return Member(
        job=JobId(number), train_gpus=8, rollout_gpus=8, image_bytes=1, profile=profile,
        max_slowdown=1.1,
    )  # fmt: skip


def after(steps: int, late: float, members: int = 1) -> tuple[list[bool], float]:
    """What each step said, and what the job is allowed; each step takes ``late`` times as long."""
    group = Group(
        number=1,
        gpus=8,
        host_bytes=100,
        members={JobId(n): member(n) for n in range(1, members + 1)},
    )
    sim, promises, taken_us, said = SimJob.of(1, job(steps=80)), Promises(), 0.0, []
    for number in range(steps):
        taken_us += sim.step_us(number) * late
        said.append(promises.stepped(sim, number + 1, int(taken_us), group))
    return said, group.members[JobId(1)].allowed


@pytest.mark.parametrize("mode", ["sync", "async1"])
def test_steps_alone_add_up_to_the_time_alone(mode: str) -> None:
    sim = SimJob.of(1, job(mode=mode, steps=50))
    steps_us = sum(sim.step_us(number) for number in range(50))
    assert steps_us == pytest.approx(sim.alone_us(), rel=0.02)


def test_it_is_looked_at_after_some_steps() -> None:
    assert after(EVERY - 1, 1.0)[1] == 0
    assert after(EVERY, 1.0)[1] > 1.1


def test_who_is_late_is_allowed_less_and_who_is_not_more() -> None:
    assert after(40, 1.05)[1] == pytest.approx(1.15, abs=0.003)
    assert after(40, 1.15)[1] == pytest.approx(1.05, abs=0.003)


def test_a_group_that_asks_too_much_of_a_late_job_is_named() -> None:
    assert not any(after(40, 1.15)[0])  # alone it is not slowed down
    assert not any(after(40, 1.0, members=3)[0])
    said = after(40, 1.15, members=3)[0]
    assert said[-1]
    assert {number + 1 for number, each in enumerate(said) if each} <= {8, 16, 24, 32, 40}
