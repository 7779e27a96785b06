"""Whatever happens, in whatever order: the invariants of the architecture hold."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.messages import WRITES, Pool
from plexrl_slurm.core.policy import POLICIES
from tests.core.harness import World, chain
from tests.core.workloads import ROLLOUT, TRAIN, crowd, sampled, trained

FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
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
