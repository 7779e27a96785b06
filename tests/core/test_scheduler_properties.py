"""Whatever happens, in whatever order: the invariants of the architecture hold."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plexrl_slurm.core.estimates import PRIOR_STEP_US
from plexrl_slurm.core.ids import CallId, CauseId
from plexrl_slurm.core.messages import WRITES, Activity, FunctionKind, Pool, Switch
from plexrl_slurm.core.policy import POLICIES
from tests.core.effort import effort, tried
from tests.core.harness import MS, SECOND, World, chain
from tests.core.workloads import (
    ROLLOUT,
    TRAIN,
    call,
    crowd,
    sample_stream,
    sampled,
    train_loop,
    trained,
)

CREATE = FunctionKind.CREATE
FEW = effort(60, costs=20)
SEEDS = st.integers(0, 2**32)
NAMES = st.sampled_from(sorted(POLICIES))


def check_outcome(world: World) -> None:
    """Every call was answered, and every state is the one of an undisturbed run."""
    for record in world.records.values():
        assert record.finished is not None, f"{record.call} was never answered"
    for name, deployment in world.deployments.items():
        if deployment.pool is not Pool.TRAIN or name in world.dropped:
            continue
        state = ""
        mine = sorted(
            (r for r in world.records.values() if r.call.deployment == name),
            key=lambda r: r.call.seq,
        )
        for record in mine:
            for part in range(record.effect):
                known = world.truth[name, record.call.seq, part]
                assert known == state, f"{record.call.id} part {part} saw another state"
                if record.call.kind in WRITES:
                    state = chain(state, record.call.id, part)
            if record.finished:
                assert record.effect == record.call.parts or record.call.kind not in WRITES


def disturb(world: World, *, restarts: int, drops: int, horizon_us: int) -> None:
    for _ in range(restarts):
        pause_us = world.rng.randint(0, 20 * world.unit_us)
        world.after(world.rng.randint(0, horizon_us), world.stop_daemon, pause_us)
    names = [trained(1).id, sampled(1, "snapshot-1-0").id]
    for name in names[:drops]:
        world.after(world.rng.randint(horizon_us // 4, horizon_us), world.drop, name)


@FEW
@given(
    seed=SEEDS,
    policy=NAMES,
    deaths=st.sampled_from([0.0, 0.02, 0.1]),
    failures=st.sampled_from([0.0, 0.1]),
    trouble=st.sampled_from([0.0, 0.08]),
    restarts=st.integers(0, 3),
    drops=st.integers(0, 2),
)
@example(seed=0, policy="hrrs", deaths=0.1, failures=0.1, trouble=0.08, restarts=3, drops=2)
def test_states_answers_and_charges_survive_any_trouble(
    seed: int, policy: str, deaths: float, failures: float, trouble: float, restarts: int,
    drops: int,
) -> None:  # fmt: skip
    world = World(seed, policy=policy, wpgs=(TRAIN, ROLLOUT), deaths=deaths, failures=failures)
    crowd(world, trainers=3, samplers=2, steps=4, trouble=trouble)
    disturb(world, restarts=restarts, drops=drops, horizon_us=300 * world.unit_us)
    world.run()
    world.close()
    check_outcome(world)
    tried("scheduler: outcome")


@FEW
@given(seed=SEEDS, policy=NAMES)
def test_the_same_events_give_the_same_instructions(seed: int, policy: str) -> None:
    world = World(seed, policy=policy, wpgs=(TRAIN, ROLLOUT), deaths=0.03)
    crowd(world, trainers=2, samplers=2, steps=2, trouble=0.05)
    world.run()
    again, log = world.make_core(), []
    for event in world.events:
        log += (
            again.plan(event, CauseId("other")) if isinstance(event, int) else again.handle(event)
        )
    assert log == world.log
    tried("scheduler: the same instructions")


@effort(25, costs=20)
@given(seed=SEEDS, policy=NAMES, k=st.integers(2, 5), greedy=st.integers(10, 400))
def test_nobody_waits_longer_than_the_bound(seed: int, policy: str, k: int, greedy: int) -> None:
    world = World(seed, policy=policy, wpgs=(TRAIN, ROLLOUT), unit_us=100 * MS)
    for job in range(1, k + 1):
        world.after(
            0, train_loop, world, trained(job), steps=4, micro=3, gap_us=greedy * MS,
            pause_us=job * SECOND,
        )  # fmt: skip
        snapshot = sampled(job, f"snapshot-{job}")
        world.after(0, sample_stream, world, snapshot, calls=200 // job, every_us=greedy * job * MS)
    world.run()
    world.close()
    check_outcome(world)
    longest_us = world.longest_us["run"] + world.longest_us["move"]
    ended = {(r.call.deployment, r.call.seq): r.ended_us for r in world.records.values()}
    for record in world.records.values():
        call = record.call
        ready_us = record.arrived_us
        if call.kind is not FunctionKind.SAMPLE and call.seq:
            ready_us = max(ready_us, ended[call.deployment, call.seq - 1])
        assert record.begun_us is not None
        bound_us = 2 * world.step_us[call.job] + k * longest_us + 2 * SECOND
        assert record.begun_us - ready_us <= bound_us, f"{call.id} waited too long"
    tried("scheduler: the bound")


def switches_of(policy: str) -> int:
    world = World(7, policy=policy, wpgs=(TRAIN,))
    for job in (1, 2):
        world.after(
            0, train_loop, world, trained(job), steps=10, micro=4, gap_us=80 * MS,
            pause_us=2500 * MS,
        )  # fmt: skip
    world.run()
    world.close()
    check_outcome(world)
    return sum(isinstance(order, Switch) for order in world.log)


def test_the_hold_saves_the_switches_that_a_queue_without_it_pays() -> None:
    held, thrashed = switches_of("hrrs"), switches_of("fifo")
    assert held <= 2 * 10 + 4, "about one switch per job and step"
    assert thrashed > 1.5 * held


def test_a_job_alone_never_waits_for_anybody() -> None:
    world = World(3, wpgs=(TRAIN,), image_every=100)
    world.after(0, train_loop, world, trained(1), steps=5, micro=3, gap_us=80 * MS, pause_us=SECOND)
    world.run()
    world.close()
    used = {charge.activity for charge in world.charges[TRAIN.id]}
    assert used == {Activity.DOWN, Activity.IDLE, Activity.BUSY}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_endless_queue_does_not_keep_others_out(policy: str) -> None:
    world = World(5, policy=policy, wpgs=(TRAIN, ROLLOUT), unit_us=100 * MS)
    greedy, modest = sampled(1, "greedy"), sampled(2, "modest")
    world.after(0, sample_stream, world, greedy, calls=700, every_us=100 * MS)
    world.after(SECOND, sample_stream, world, modest, calls=1, every_us=0)
    hungry, humble = trained(1), trained(2)
    world.place(hungry)
    for seq in range(150):
        world.submit(call(hungry, FunctionKind.FORWARD_BACKWARD if seq else CREATE, seq))
    world.after(SECOND, world.place, humble)
    world.after(SECOND, world.submit, call(humble, CREATE, 0))
    world.run()
    world.close()
    check_outcome(world)
    longest_us = world.longest_us["run"] + world.longest_us["move"]
    assert world.now > 70 * SECOND, "the greedy ones went on for much longer"
    for name in (modest.id, humble.id):
        record = world.records[CallId(f"{name}/0")]
        assert record.begun_us is not None
        waited_us = record.begun_us - record.arrived_us
        assert waited_us <= PRIOR_STEP_US + 2 * longest_us + 2 * SECOND
