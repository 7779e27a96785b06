"""Whatever happens to disks and agent, at every step: no image is lost, and none is wrong."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.core.effort import effort, tried
from tests.daemons.tier_world import IMAGE, World
from tests.memory.faults import BROKEN, FAULTS, FULL, SHORT, STOP, TEAR

#: Thousands of folders are made and removed: not on a disk, if that can be.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FEW = effort(60, costs=20)
#: Of lives in which the disk had room for all: whether memory was full.
FULL_TIERS: list[bool] = []


async def life(
    world: World, *, events: int, kills: float, cuts: float, flips: float = 0.0, copies: int = 9
) -> None:
    """A random program; at most ``copies`` go to the durable tier at once."""
    rng = world.rng
    await world.start()
    for _ in range(events):
        names = list(world.complete)
        what = rng.random()
        if len(names) < 2 or what < 0.1:
            if len(names) < 7 and not world.lane.locked():
                if world.dirty:
                    world.spawn(world.save())
                    await world.settle()
                if not world.dirty:
                    world.create()
        elif what < 0.35:
            world.spawn(world.switch(rng.choice(names)))
        elif what < 0.5:
            if not world.lane.locked():
                world.step()
        elif what < 0.65:
            world.spawn(world.save())
        elif what < 0.75:
            name = rng.choice([*names, world.resident or names[0]])
            if len(world.persisting) < copies:
                world.spawn(world.persist(name))
                await asyncio.sleep(0)  # it has begun
        elif what < 0.85:
            world.expect(rng.choice([*names, ""]))
        elif what < 0.9:
            world.spawn(world.tier.idle(quiet=lambda: rng.random() < 0.8))
        elif what < 0.93:
            world.spawn(world.scrub())
        elif what < 0.96:
            world.drop(rng.choice(names))
        await world.turn()
        if rng.random() < kills:
            await world.restart()
        elif flips and rng.random() < flips:
            await world.flip()
        elif rng.random() < cuts:
            await world.cut_power()
        if not world.disk.dead:
            world.check()
    await world.audit()


def play(seed: int, scene: Callable[[World], object], **sizes: int) -> World:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder, pytest.MonkeyPatch.context() as patch:
        world = World(Path(folder) / "w", seed, **sizes)
        world.patch(patch)
        scene(world)
    return world


def now_and_then(world: World, rate: float, kinds: Sequence[str]) -> Callable[[int, str], str]:
    """Faults at random; never two in a row, so that one may try again."""
    last = [0]

    def fault(step: int, _kind: str) -> str:
        if step == last[0] + 1 or world.rng.random() >= rate:
            return ""
        last[0] = step
        return world.rng.choice(kinds)

    return fault


@FEW
@given(
    seed=st.integers(0, 2**32),
    faults=st.sampled_from([0.0, 0.01, 0.05, 0.2]),
    kinds=st.sets(st.sampled_from(FAULTS), min_size=1),
    kills=st.sampled_from([0.0, 0.02, 0.1]),
    cuts=st.sampled_from([0.0, 0.0, 0.03]),
    flips=st.sampled_from([0.0, 0.0, 0.05]),
    slots=st.integers(3, 6),
    copies=st.integers(4, 9),
)
@example(
    seed=0, faults=0.05, kinds=set(FAULTS), kills=0.05, cuts=0.02, flips=0.0, slots=4, copies=8
)
@example(
    seed=20_000, faults=0.05, kinds={STOP, TEAR}, kills=0.0, cuts=0.0, flips=0.05, slots=4, copies=4
)
@example(  # a read ahead waited for who made room, who waited for the read to give way
    seed=309946508, faults=0.0, kinds={STOP}, kills=0.0, cuts=0.0, flips=0.0, slots=3, copies=4
)
@example(
    seed=2487515223, faults=0.0, kinds={STOP}, kills=0.0, cuts=0.0, flips=0.0, slots=3, copies=5
)
@example(  # copies that were made ahead made room for each other
    seed=750, faults=0.0, kinds={STOP}, kills=0.0, cuts=0.0, flips=0.0, slots=3, copies=4
)
@example(  # a copy that was whole, but for its name's sync, took room that nobody counted
    seed=3,
    faults=0.2,
    kinds={FULL, BROKEN, SHORT},
    kills=0.0,
    cuts=0.0,
    flips=0.0,
    slots=3,
    copies=4,
)
def test_an_image_is_never_lost_and_never_wrong(
    seed: int, faults: float, kinds: set[str], kills: float, cuts: float, flips: float,
    slots: int, copies: int,
) -> None:  # fmt: skip
    def scene(world: World) -> None:
        world.disk.fault = now_and_then(world, faults, sorted(kinds))
        asyncio.run(life(world, events=60, kills=kills, cuts=cuts, flips=flips))

    play(seed, scene, slots=slots, copies=copies)
    tried("tiers: lives")


@effort(30, costs=20)
@given(seed=st.integers(0, 2**32), kills=st.sampled_from([0.0, 0.05]), slots=st.integers(4, 6))
def test_host_memory_is_never_exceeded_where_the_disk_has_room(
    seed: int, kills: float, slots: int
) -> None:
    """At no step of a disk, in the middle of switches, saves, reads ahead and a copy to the durable
    tier. Several of those at once may hold more images than there is room for beside a switch;
    then it is exceeded, and said."""
    world = play(
        seed,
        lambda world: asyncio.run(life(world, events=60, kills=kills, cuts=0.0, copies=1)),
        slots=slots,
        copies=9,
    )
    assert world.most_bytes <= slots * IMAGE
    FULL_TIERS.append(world.most_bytes == slots * IMAGE)
    tried("tiers: memory")


def test_those_programs_have_filled_the_memory() -> None:
    if not FULL_TIERS:
        test_host_memory_is_never_exceeded_where_the_disk_has_room()
    assert sum(FULL_TIERS) > len(FULL_TIERS) / 3


def test_the_random_programs_write_over_images_and_are_killed_meanwhile() -> None:
    def scene(world: World) -> None:
        asyncio.run(life(world, events=120, kills=0.03, cuts=0.0))

    worlds = [play(seed, scene, slots=5, copies=8) for seed in range(4)]
    assert sum(world.overs for world in worlds) > 10
    assert sum(world.restarts for world in worlds) > 10


def test_the_random_programs_flip_bits_of_images_that_are_loaded_later() -> None:
    told: list[str] = []

    def scene(world: World) -> None:
        world.told = told
        asyncio.run(life(world, events=120, kills=0.0, cuts=0.0, flips=0.1))

    worlds = [play(seed, scene, slots=6, copies=8) for seed in range(4)]
    assert sum(world.flips for world in worlds) > 10
    assert any("is damaged in memory" in each for each in told)
