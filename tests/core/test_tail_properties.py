"""Whatever happens to rollouts whose tails are paused: nothing is lost, nobody starves, and every
microsecond is in the books once (``World.close`` audits them)."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.messages import Pause
from plexrl_slurm.core.policy import POLICIES
from tests.core.effort import effort, tried
from tests.core.harness import MS
from tests.core.tailed import EAGER, Tailed, rollouts
from tests.core.test_scheduler_properties import check_outcome
from tests.core.workloads import ROLLOUT, TRAIN

FEW = effort(40, costs=20)
SEEDS = st.integers(0, 2**32)
NAMES = st.sampled_from(sorted(POLICIES))


def played(seed: int, policy: str, *, deaths: float, restarts: int = 0) -> Tailed:
    world = Tailed(seed, policy=policy, wpgs=(TRAIN, ROLLOUT), deaths=deaths, unit_us=100 * MS)
    rollouts(world, jobs=3, each=3, calls=12)
    for _ in range(restarts):
        at_us = world.rng.randint(0, 200 * world.unit_us)
        world.after(at_us, world.stop_daemon, world.rng.randint(0, 20 * world.unit_us))
    world.run()
    world.close()
    return world


@FEW
@given(seed=SEEDS, policy=NAMES, deaths=st.sampled_from([0.0, 0.01]), restarts=st.integers(0, 2))
def test_every_call_ends_and_none_is_paused_too_often(
    seed: int, policy: str, deaths: float, restarts: int
) -> None:
    world = played(seed, policy, deaths=deaths, restarts=restarts)
    check_outcome(world)
    # A core that was started again has forgotten how often it was.
    most = EAGER.pauses * (restarts + 1)
    assert all(pauses <= most for pauses in world.pauses.values())
    tried("tails: outcome")


def test_the_workload_pauses_tails() -> None:
    paused = [
        order
        for seed in range(5)
        for order in played(seed, "atc_h", deaths=0.0).log
        if isinstance(order, Pause)
    ]
    assert len(paused) > 5


@FEW
@given(seed=SEEDS, policy=NAMES)
def test_the_same_events_give_the_same_pauses(seed: int, policy: str) -> None:
    world = played(seed, policy, deaths=0.01)
    again, log = world.make_core(), []
    for event in world.events:
        log += (
            again.plan(event, CauseId("other")) if isinstance(event, int) else again.handle(event)
        )
    assert log == world.log
    tried("tails: the same pauses")
