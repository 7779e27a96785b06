"""Images are damaged wherever they are, nodes are lost, daemons killed: nothing is lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.core.damages import DamagedWorld
from tests.core.effort import tried
from tests.core.test_node_properties import MANY, SEEDS, WPGS, nodes_fail
from tests.core.test_scheduler_properties import check_outcome
from tests.core.workloads import crowd


def run(
    seed: int, *, trouble: float = 0.0, deaths: float = 0.0, failures: float = 0.0,
    durable_every: int = 2, losses: int = 0, drains: int = 0, moves: int = 0, restarts: int = 0,
) -> DamagedWorld:  # fmt: skip
    world = DamagedWorld(
        seed, wpgs=WPGS, deaths=deaths, failures=failures, copy_failures=0.1,
        durable_every=durable_every,
    )  # fmt: skip
    crowd(world, trainers=3, samplers=1, steps=5, trouble=trouble)
    nodes_fail(world, losses=losses, drains=drains, moves=moves, restarts=restarts)
    world.run()
    world.close()
    check_outcome(world)
    return world


@MANY
@given(
    seed=SEEDS,
    deaths=st.sampled_from([0.0, 0.05]),
    failures=st.sampled_from([0.0, 0.05]),
    trouble=st.sampled_from([0.0, 0.08]),
    losses=st.integers(0, 5),
    drains=st.integers(0, 3),
    moves=st.integers(0, 6),
    restarts=st.integers(0, 3),
    durable_every=st.integers(1, 3),
)
def test_states_and_answers_survive_damaged_images(
    seed: int, deaths: float, failures: float, trouble: float, losses: int, drains: int,
    moves: int, restarts: int, durable_every: int,
) -> None:  # fmt: skip
    run(
        seed, trouble=trouble, deaths=deaths, failures=failures, losses=losses, drains=drains,
        moves=moves, restarts=restarts, durable_every=durable_every,
    )  # fmt: skip
    tried("damaged images: outcome")


def test_no_call_fails_because_an_image_was_damaged_and_the_worlds_see_it() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        world = run(seed, losses=4, drains=2, moves=4, restarts=2)
        seen += world.seen
        for record in world.records.values():
            assert record.finished is not record.call.doomed, f"{record.call} failed"
    assert all(seen[what] > 10 for what in ("damaged", "durable damaged", "Replay", "Forget")), seen
    assert seen["durable scrubbed"] > 5
