"""Whatever happens to rollouts whose tails run on beside others: nothing is lost, nobody starves,
no third is on the device, and every microsecond is in the books once (the harness and
``World.close`` check that)."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.messages import FunctionKind
from plexrl_slurm.core.policy import POLICIES
from tests.core.effort import effort
from tests.core.harness import MS, SECOND
from tests.core.tailed import Together, rollouts
from tests.core.test_scheduler_properties import check_outcome, disturb
from tests.core.workloads import ROLLOUT, TRAIN, crowd, sample_stream, sampled

FEW = effort(40, costs=20)
SEEDS = st.integers(0, 2**32)
NAMES = st.sampled_from(sorted(POLICIES))
TWO = replace(ROLLOUT, second_slot=True)


def played(
    seed: int, policy: str, *, deaths: float, failures: float = 0.0, restarts: int = 0
) -> Together:
    world = Together(
        seed, policy=policy, wpgs=(TRAIN, TWO), deaths=deaths, failures=failures, unit_us=100 * MS
    )
    rollouts(world, jobs=3, each=3, calls=12)
    for _ in range(restarts):
        at_us = world.rng.randint(0, 200 * world.unit_us)
        world.after(at_us, world.stop_daemon, world.rng.randint(0, 20 * world.unit_us))
    world.run()
    world.close()
    return world


@FEW
@given(
    seed=SEEDS,
    policy=NAMES,
    deaths=st.sampled_from([0.0, 0.01]),
    failures=st.sampled_from([0.0, 0.05]),
    restarts=st.integers(0, 2),
)
def test_every_call_ends_once_whoever_it_ran_beside(
    seed: int, policy: str, deaths: float, failures: float, restarts: int
) -> None:
    check_outcome(played(seed, policy, deaths=deaths, failures=failures, restarts=restarts))


def test_the_workload_lets_others_in_beside_tails() -> None:
    assert sum(played(seed, "atc_h", deaths=0.0).together() for seed in range(5)) > 20


@FEW
@given(
    seed=SEEDS,
    policy=NAMES,
    trouble=st.sampled_from([0.0, 0.08]),
    restarts=st.integers(0, 2),
    drops=st.integers(0, 2),
)
def test_calls_that_are_cancelled_dropped_or_deadly_leave_nothing_in_a_slot(
    seed: int, policy: str, trouble: float, restarts: int, drops: int
) -> None:
    world = Together(seed, policy=policy, wpgs=(TRAIN, TWO), deaths=0.02)
    crowd(world, trainers=2, samplers=3, steps=3, trouble=trouble)
    rollouts(world, jobs=2, each=2, calls=8, name="tailed")
    disturb(world, restarts=restarts, drops=drops, horizon_us=300 * world.unit_us)
    world.run()
    world.close()
    check_outcome(world)


@FEW
@given(seed=SEEDS, policy=NAMES)
def test_the_same_events_give_the_same_switches(seed: int, policy: str) -> None:
    world = played(seed, policy, deaths=0.01)
    again, log = world.make_core(), []
    for event in world.events:
        log += (
            again.plan(event, CauseId("other")) if isinstance(event, int) else again.handle(event)
        )
    assert log == world.log


@FEW
@given(seed=SEEDS, policy=NAMES, k=st.integers(2, 4), greedy=st.integers(10, 400))
def test_nobody_waits_longer_than_the_bound_beside_tails(
    seed: int, policy: str, k: int, greedy: int
) -> None:
    world = Together(seed, policy=policy, wpgs=(TRAIN, TWO), unit_us=100 * MS)
    for job in range(1, k + 1):
        snapshot = sampled(job, f"snapshot-{job}")
        world.after(0, sample_stream, world, snapshot, calls=200 // job, every_us=greedy * job * MS)
    world.run()
    world.close()
    check_outcome(world)
    longest_us = world.longest_us["run"] + world.longest_us["move"]
    for record in world.records.values():
        assert record.call.kind is FunctionKind.SAMPLE and record.begun_us is not None
        bound_us = 2 * world.step_us[record.call.job] + k * longest_us + 2 * SECOND
        assert record.begun_us - record.arrived_us <= bound_us, f"{record.call.id} waited too long"
