"""WPGs that share GPUs: whatever happens, one is awake, nobody starves, and time is booked once."""

from hypothesis import example, given
from hypothesis import strategies as st

from plexrl_slurm.core.ids import CauseId, WpgId
from plexrl_slurm.core.messages import Activity, Charge, FunctionKind, Grant
from plexrl_slurm.core.policy import POLICIES
from tests.core.effort import effort, tried
from tests.core.harness import MS, SECOND
from tests.core.shared import ROLLOUT, SharedWorld
from tests.core.test_scheduler_properties import check_outcome, disturb
from tests.core.workloads import TRAIN, crowd, sample_stream, sampled, train_loop, trained

FEW = effort(40, costs=20)
SEEDS = st.integers(0, 2**32)
NAMES = st.sampled_from(sorted(POLICIES))


def trouble(world: SharedWorld, *, kills: int, drains: int, horizon_us: int) -> None:
    names = [TRAIN.id, ROLLOUT.id]
    for _ in range(kills):
        world.after(world.rng.randint(0, horizon_us), world.kill_now, world.rng.choice(names))
    for _ in range(drains):
        pause_us = world.rng.randint(0, 30 * world.unit_us)
        world.after(
            world.rng.randint(0, horizon_us), world.drain, world.rng.choice(names), pause_us
        )


@FEW
@given(
    seed=SEEDS,
    policy=NAMES,
    deaths=st.sampled_from([0.0, 0.02, 0.1]),
    failures=st.sampled_from([0.0, 0.1]),
    refusals=st.sampled_from([0.0, 0.3]),
    restarts=st.integers(0, 3),
    kills=st.integers(0, 4),
    drains=st.integers(0, 2),
    drops=st.integers(0, 2),
)
@example(
    seed=1, policy="atc_h", deaths=0.1, failures=0.1, refusals=0.3, restarts=3, kills=4, drains=2,
    drops=2,
)  # fmt: skip
def test_one_is_awake_and_states_answers_and_charges_survive_any_trouble(
    seed: int, policy: str, deaths: float, failures: float, refusals: float, restarts: int,
    kills: int, drains: int, drops: int,
) -> None:  # fmt: skip
    world = SharedWorld(seed, policy=policy, deaths=deaths, failures=failures, refusals=refusals)
    crowd(world, trainers=2, samplers=2, steps=3, trouble=0.04)
    horizon_us = 300 * world.unit_us
    disturb(world, restarts=restarts, drops=drops, horizon_us=horizon_us)
    trouble(world, kills=kills, drains=drains, horizon_us=horizon_us)
    world.run()
    world.close()
    check_outcome(world)
    tried("shared GPUs: outcome")


@FEW
@given(seed=SEEDS, policy=NAMES)
def test_the_same_events_give_the_same_instructions(seed: int, policy: str) -> None:
    world = SharedWorld(seed, policy=policy, deaths=0.03, refusals=0.1)
    crowd(world, trainers=2, samplers=2, steps=2, trouble=0.05)
    world.run()
    again, log = world.make_core(), []
    for event in world.events:
        log += (
            again.plan(event, CauseId("other")) if isinstance(event, int) else again.handle(event)
        )
    assert log == world.log
    tried("shared GPUs: the same instructions")


@effort(15, costs=20)
@given(seed=SEEDS, policy=NAMES, k=st.integers(1, 3), greedy=st.integers(10, 400))
def test_nobody_waits_longer_than_the_bound(seed: int, policy: str, k: int, greedy: int) -> None:
    world = SharedWorld(seed, policy=policy, unit_us=100 * MS)
    for job in range(1, k + 1):
        world.after(
            0, train_loop, world, trained(job), steps=4, micro=3, gap_us=greedy * MS,
            pause_us=job * SECOND,
        )  # fmt: skip
        snapshot = sampled(job, f"snapshot-{job}")
        world.after(0, sample_stream, world, snapshot, calls=100 // job, every_us=greedy * job * MS)
    world.run()
    world.close()
    check_outcome(world)
    # Whose turn comes waits for what runs, a save, a grant and a load; 2k deployments compete.
    longest_us = world.longest_us["run"] + 2 * world.longest_us["move"] + world.longest_us["grant"]
    ended = {(r.call.deployment, r.call.seq): r.ended_us for r in world.records.values()}
    for record in world.records.values():
        call = record.call
        ready_us = record.arrived_us
        if call.kind is not FunctionKind.SAMPLE and call.seq:
            ready_us = max(ready_us, ended[call.deployment, call.seq - 1])
        assert record.begun_us is not None
        bound_us = 2 * world.step_us[call.job] + 2 * k * longest_us + 2 * SECOND
        assert record.begun_us - ready_us <= bound_us, f"{call.id} waited too long"
    tried("shared GPUs: the bound")


def test_a_step_of_a_job_that_trains_and_samples_in_turn_takes_two_turns() -> None:
    world = SharedWorld(4, policy="atc_h", image_every=100)
    model, steps = trained(1), 6
    world.after(0, train_loop, world, model, steps=steps, micro=3, gap_us=50 * MS, pause_us=SECOND)
    snapshot = sampled(1, "snapshot")
    world.after(0, world.place, snapshot)
    world.after(5 * MS, sample_stream, world, snapshot, calls=steps, every_us=SECOND)
    world.run()
    world.close()
    check_outcome(world)
    grants = [order for order in world.log if isinstance(order, Grant)]
    assert 2 <= len(grants) <= 2 * steps + 2
    charges: list[Charge] = world.charges[TRAIN.id]
    for activity in (Activity.BUSY, Activity.SWITCH):
        paid = {charge.job for charge in charges if charge.activity is activity}
        assert paid == {1}, "whoever wants the GPUs pays for the turn"
    assert not world.charges[WpgId("rollout-0")]
