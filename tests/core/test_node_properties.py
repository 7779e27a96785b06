"""Nodes are lost, WPGs given back, deployments moved, the daemon killed: nothing is lost."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from tests.core.effort import effort, tried
from tests.core.nodes import NodeWorld
from tests.core.test_scheduler_properties import check_outcome
from tests.core.workloads import ROLLOUT, ROLLOUT_1, TRAIN, TRAIN_1, crowd, sampled, trained

WPGS = (TRAIN, TRAIN_1, ROLLOUT, ROLLOUT_1)
MANY = effort(30, costs=20)
SEEDS = st.integers(0, 2**32)
HORIZON = 300


def nodes_fail(world: NodeWorld, *, losses: int, drains: int, moves: int, restarts: int) -> None:
    """Trouble for nodes, at any instant."""
    rng = world.rng
    for _ in range(losses):
        world.after(world.some(0, HORIZON), world.lose_node, rng.choice(WPGS).id)
    for _ in range(drains):
        world.after(world.some(0, HORIZON), world.drain, rng.choice(WPGS).id)
    for _ in range(restarts):
        world.after(world.some(0, HORIZON), world.stop_daemon, world.some(0, 20))
    for _ in range(moves):
        world.after(world.some(1, HORIZON), wander, world)


def wander(world: NodeWorld) -> None:
    if world.deployments:
        world.wander(world.rng.choice(sorted(world.deployments)))


def run(
    seed: int, *, trouble: float = 0.0, deaths: float = 0.0, failures: float = 0.0,
    copy_failures: float = 0.3, durable_every: int | None = 2, losses: int = 0, drains: int = 0,
    moves: int = 0, restarts: int = 0, drops: int = 0,
) -> NodeWorld:  # fmt: skip
    """A world from its beginning to its end, with every check."""
    world = NodeWorld(
        seed, wpgs=WPGS, deaths=deaths, failures=failures, copy_failures=copy_failures,
        durable_every=durable_every,
    )  # fmt: skip
    crowd(world, trainers=3, samplers=2, steps=4, trouble=trouble)
    nodes_fail(world, losses=losses, drains=drains, moves=moves, restarts=restarts)
    for name in (trained(1).id, sampled(1, "snapshot-1-0").id)[:drops]:
        world.after(world.some(HORIZON // 4, HORIZON), world.drop, name)
    world.run()
    world.close()
    check_outcome(world)
    return world


@MANY
@given(
    seed=SEEDS,
    deaths=st.sampled_from([0.0, 0.05]),
    failures=st.sampled_from([0.0, 0.1]),
    trouble=st.sampled_from([0.0, 0.08]),
    losses=st.integers(0, 6),
    drains=st.integers(0, 4),
    moves=st.integers(0, 8),
    restarts=st.integers(0, 3),
    drops=st.integers(0, 2),
    durable_every=st.integers(1, 3),
)
@example(seed=0, deaths=0.05, failures=0.1, trouble=0.08, losses=6, drains=4, moves=8, restarts=3,
         drops=2, durable_every=1)  # fmt: skip
def test_states_answers_and_charges_survive_the_loss_of_nodes(
    seed: int, deaths: float, failures: float, trouble: float, losses: int, drains: int,
    moves: int, restarts: int, drops: int, durable_every: int,
) -> None:  # fmt: skip
    run(
        seed, trouble=trouble, deaths=deaths, failures=failures, losses=losses, drains=drains,
        moves=moves, restarts=restarts, drops=drops, durable_every=durable_every,
    )  # fmt: skip
    tried("nodes: outcome")


@effort(15, costs=20)
@given(seed=SEEDS, losses=st.integers(1, 8), drains=st.integers(0, 4), restarts=st.integers(0, 3))
def test_no_call_fails_because_a_node_was_lost(
    seed: int, losses: int, drains: int, restarts: int
) -> None:
    world = run(seed, losses=losses, drains=drains, moves=4, restarts=restarts)
    for record in world.records.values():
        assert record.finished is not record.call.doomed, f"{record.call} failed"
    tried("nodes: no call fails")


@effort(15, costs=20)
@given(seed=SEEDS, drains=st.integers(1, 6), restarts=st.integers(0, 2))
def test_a_drain_without_a_durable_tier_loses_nothing(
    seed: int, drains: int, restarts: int
) -> None:
    world = run(seed, drains=drains, restarts=restarts, durable_every=None)
    assert not world.seen["Persist"]
    tried("nodes: without a durable tier")


def test_the_worlds_see_what_they_are_made_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += run(seed, losses=6, drains=4, moves=8, restarts=2).seen
    wanted = ("lost", "moved", "refused", "lossless", "Persist", "Drained", "Replay", "Forget")
    assert all(seen[what] > 10 for what in wanted), seen
