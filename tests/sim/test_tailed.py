"""Rollouts with tails on WPGs that are held and shared: left alone, paused, or beside others."""

import pytest

from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.tails import TailRules
from plexrl_slurm.sim.cluster import Plan
from plexrl_slurm.sim.run import simulate_held
from plexrl_slurm.sim.tailed import TailedWorld
from plexrl_slurm.sim.trace import TraceJob
from tests.sim.test_held import CLUSTER, wpgs
from tests.sim.traces import alike

WAIT = TailRules(pause=False)
PAUSE = TailRules()
BESIDE = TailRules(co_resident=True)


def run(
    trace: list[TraceJob], rules: TailRules, *, slowdown: int = 20, hours: float = 0
) -> TailedWorld:
    plan = Plan(tails=rules, slowdown=slowdown, node_loss_hours=hours)
    ran = simulate_held(trace, wpgs(trace, len(trace), 1), CLUSTER, plan=plan)
    assert isinstance(ran.world, TailedWorld)
    ran.world.core.check_invariants()
    assert all(record.end_us >= 0 for record in ran.world.records.values())
    return ran.world


def makespan_us(world: TailedWorld) -> int:
    return max(record.end_us for record in world.records.values())


def test_alone_a_rollout_takes_as_long_as_without_a_tail() -> None:
    trace = alike(1, steps=8)
    (record,) = run(trace, BESIDE).records.values()
    whole = simulate_held(trace, wpgs(trace), CLUSTER, plan=Plan()).world
    (same,) = whole.records.values()
    assert record.end_us == same.end_us


def test_what_waited_for_tails_runs_beside_them_and_the_same_work_is_done_sooner() -> None:
    trace = alike(3, steps=12)
    wait, pause, beside = (run(trace, rules) for rules in (WAIT, PAUSE, BESIDE))
    assert (wait.pauses, wait.besides) == (0, 0)
    assert pause.pauses > 0 and pause.besides == 0
    assert beside.besides > 0
    assert makespan_us(beside) < 0.9 * makespan_us(wait)
    assert makespan_us(beside) < makespan_us(pause)


def test_two_at_once_that_slow_each_other_down_gain_less() -> None:
    trace = alike(2, steps=12)
    assert makespan_us(run(trace, BESIDE, slowdown=0)) < makespan_us(
        run(trace, BESIDE, slowdown=60)
    )


@pytest.mark.parametrize("rules", [WAIT, PAUSE, BESIDE])
def test_every_held_microsecond_is_booked_once(rules: TailRules) -> None:
    trace = alike(3, steps=6, phases__tool={"stalls": 2, "stall_s": 9})
    world = run(trace, rules)
    gpus = {Pool.TRAIN: 3 * trace[0].train.gpus, Pool.ROLLOUT: trace[0].rollout.gpus}
    for pool in Pool:
        booked = sum(us for (where, _), us in world.gpu_us.items() if where is pool)
        assert booked == gpus[pool] * makespan_us(world)


def test_nodes_that_are_lost_end_both_and_every_job_ends() -> None:
    world = run(alike(3, steps=12), BESIDE, hours=1.0)
    assert world.besides > 0
