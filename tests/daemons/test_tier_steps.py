"""One short life of the tiers, with a fault at one of its disk steps: at each in turn."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import pytest

from tests.core.effort import MANY
from tests.daemons.test_tier_properties import play
from tests.daemons.tier_world import World
from tests.memory.faults import BROKEN, FAULTS, FULL, READ_ONLY, SHORT, STOP, TEAR, Stopped


async def life(world: World) -> None:
    """Everything once: three images with memory for two, all tiers, one after the other."""
    await world.start()
    for _ in range(3):
        first = world.create()
        await attempt(world, world.save())
    await attempt(world, world.persist(first))
    for name in list(world.complete):
        await attempt(world, world.switch(name))
        world.step()
    await attempt(world, world.tier.idle(quiet=lambda: True))
    if world.complete:
        world.expect(next(iter(world.complete)))
        await world.settle()
    await attempt(world, world.scrub())
    world.drop(first)
    await attempt(world, world.save())
    world.check()
    await world.audit()


async def attempt(world: World, work: object) -> None:
    world.spawn(work)  # type: ignore[arg-type]
    await world.settle()


def at(step: int, fault: str, *, lasting: bool) -> World:
    """Play it with a fault at one step, or at every step from there to the audit."""

    def scene(world: World) -> None:
        world.disk.fault = lambda now, _kind: (
            fault if now == step or (lasting and now > step and world.serving) else ""
        )
        asyncio.run(life(world))

    return play(1, scene, slots=3, copies=4)


def tried(steps: int, fault: str, *, lasting: bool = False) -> Iterable[int]:
    """Every step at night; by day some of them, of each fault others."""
    stride = 1 if MANY else 12 if lasting else 4
    return range(1 + FAULTS.index(fault) % stride, steps + 1, stride)


@pytest.mark.parametrize("fault", [STOP, TEAR, SHORT])
def test_a_process_may_end_at_any_step(fault: str) -> None:
    steps = at(0, "", lasting=False).disk.steps
    assert steps > 60
    for step in tried(steps, fault):
        with suppress(Stopped):
            at(step, fault, lasting=False)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("fault", [FULL, BROKEN, READ_ONLY])
def test_a_disk_may_fail_at_any_step(fault: str, lasting: bool) -> None:
    steps = at(0, "", lasting=False).disk.steps
    for step in tried(steps, fault, lasting=lasting):
        at(step, fault, lasting=lasting)
