"""Nobody waits for longer than the bound, whatever the others do (``adversary`` derives it).

A few thousand facts of each attack here; a million in ``python -m benchmarks.starvation``.
"""

import pytest

from plexrl_slurm.core.policy import POLICIES
from tests.core.adversary import ATTACKS, Adversary


@pytest.mark.parametrize("attack", sorted(ATTACKS))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nobody_waits_for_longer_than_the_bound(policy: str, attack: str) -> None:
    world = Adversary(1, policy, attack)
    world.run(1_500)
    assert world.waits > 300
    assert 0 < world.worst <= 1


def test_newcomers_do_not_keep_others_from_their_turn() -> None:
    world = Adversary(2, "round_robin", "newcomers")
    world.run(12_000)
    assert world.worst <= 1


def test_the_bound_is_no_larger_than_it_has_to_be() -> None:
    world = Adversary(1, "fifo", "long queues")
    world.run(4_000)
    assert world.worst > 0.5


def test_a_wait_above_the_bound_is_seen() -> None:
    world = Adversary(1, "fifo", "short phases flood")
    world.bound_us = lambda client: 1  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"fifo: \S+ has waited \d+ us and the bound is 1"):
        world.run(1_500)
