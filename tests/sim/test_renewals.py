"""Holds end at their time limit: what that costs, and that nothing is lost."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Activity, Pool, Wpg
from plexrl_slurm.sim.cluster import Plan, split
from plexrl_slurm.sim.run import Ran, simulate, simulate_held
from tests.sim.traces import alike

SIZE = split(64, "2:1")
HOUR_US = 3_600_000_000
PLAN = Plan(learn_steps=0, guess_sigma=0.0)
NEVER = replace(PLAN, hold_hours=0.0)
OFTEN = replace(PLAN, hold_hours=0.25)


def run(plan: Plan, jobs: int = 3, placement: str = "pack") -> Ran:
    return simulate(alike(jobs, steps=40), SIZE, placement=placement, plan=plan)


def test_without_a_time_limit_nothing_is_renewed() -> None:
    assert run(NEVER).world.renewals.count == 0


def test_each_wpg_is_renewed_again_and_again_and_every_job_ends() -> None:
    before, after = run(NEVER), run(OFTEN)
    hours = before.figures.makespan_us / HOUR_US
    wpgs = 1 + 3  # one that trains, and a private one for each job's samples
    assert after.world.renewals.count >= wpgs * (int(hours / 0.25) - 1) > wpgs
    assert after.figures.steps == before.figures.steps == 120
    assert all(record.end_us > 0 for record in after.world.records.values())
    assert after.figures.makespan_us >= before.figures.makespan_us
    assert after.figures.efficiency < before.figures.efficiency


def test_while_two_holds_have_a_wpg_it_is_paid_for_twice() -> None:
    world = run(OFTEN).world
    down_us = sum(us for (_, what), us in world.gpu_us.items() if what is Activity.DOWN)
    assert down_us == world.renewals.count * 8 * PLAN.restart_us
    held_us = sum(world._group_us.values())
    held_us += sum(record.own_gpu_us for record in world.records.values())
    assert sum(world.gpu_us.values()) == held_us


@pytest.mark.parametrize("losses", [0.0, 0.5])
@pytest.mark.parametrize("placement", ["isolated", "spread", "fit"])
def test_renewals_losses_and_moves_at_once_lose_no_step(placement: str, losses: float) -> None:
    plan = replace(PLAN, hold_hours=0.2, node_loss_hours=losses, restart_us=1_000_000,
                   regroup_us=60_000_000, seed=4)  # fmt: skip
    trace = alike(6, steps=12)
    found = simulate(trace, SIZE, placement=placement, plan=plan)
    assert found.figures.steps == 72
    assert all(record.end_us > 0 for record in found.world.records.values())
    assert found.world.renewals.count > 6
    assert all(device is None for device in map(found.world.device, found.world._devices))


def test_wpgs_of_a_configuration_are_renewed_too() -> None:
    wpgs = [
        Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=8),
        Wpg(id=WpgId("rollout-0"), pool=Pool.ROLLOUT, gpus=8),
    ]
    found = simulate_held(alike(2, steps=20), wpgs, SIZE, plan=OFTEN)
    assert found.world.renewals.count >= 2
    assert found.figures.steps == 40
    assert sum(found.world.gpu_us.values()) == sum(found.world._group_us.values())
