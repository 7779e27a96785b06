"""A WPG over two nodes is one to the core, and its parts live and die together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.transport import messages as tm
from tests.daemons.gang_bench import (
    IMAGE,
    MODEL,
    NEWER,
    Play,
    Site,
    image,
    player,
)
from tests.daemons.holds_bench import TICK_S, TRAIN, World


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return player(tmp_path)


# ---- incarnations ------------------------------------------------------------------------------


def test_ranks_start_when_all_agents_have_come_and_meet_at_the_first_node(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        site = await Site.of(daemon)
        await daemon.hello(site.hold, "n1")
        assert not daemon.orders(site.first, tm.PrepareOrder)
        await daemon.hello(site.hold, "n2")
        configs = [
            next(wpg for wpg in welcome.wpgs if wpg.name == TRAIN)
            for welcome in site.last(tm.Welcome)
        ]
        assert [list(config.ranks) for config in configs] == [[0, 1], [2, 3]]
        assert [config.devices for config in configs] == [[0, 1], [0, 1]]
        assert {order.incarnation for order in site.last(tm.PrepareOrder)} == {1}
        await daemon.hub.gangs.ready(
            site.first, tm.PartReady(wpg=TRAIN, incarnation=1, port=9000, images=[])
        )
        assert not daemon.orders(site.first, tm.StartOrder)
        await site.ready(1)
        one, other = site.last(tm.StartOrder)
        assert one == other
        assert (one.address, one.port, one.incarnation) == ("n1", 9000, 1)
        site.changed("up", 1, site.second)
        assert site.activity() == Activity.DOWN
        site.changed("up", 1, site.first)
        assert site.activity() == Activity.IDLE

    play(scene)


def test_a_dead_part_takes_the_other_with_it_and_no_other_wpg(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        site = await Site.up(daemon)
        names = [order.name for order in site.last(tm.StartOrder)]
        site.changed("down", 1, site.second)
        assert site.activity() == Activity.DOWN
        assert {order.incarnation for order in site.last(tm.PrepareOrder)} == {2}
        assert not daemon.orders(f"{site.hold}.1.r1".encode(), tm.PrepareOrder)
        (rollout,) = [v for v in daemon.shell.core.views() if v.wpg == "rollout-0"]
        assert str(rollout.activity) == Activity.IDLE
        # What the other part says of the incarnation before counts no more.
        site.changed("down", 1, site.first)
        assert {order.incarnation for order in site.last(tm.PrepareOrder)} == {2}
        await site.ready(2)
        again = [order.name for order in site.last(tm.StartOrder)]
        assert len({*names, *again}) == 2, "ranks of the incarnation before know the name"
        site.changed("up", 2)
        assert site.activity() == Activity.IDLE

    play(scene)


def test_an_agent_that_is_started_again_has_the_gang_start_again(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        site = await Site.up(daemon)
        await daemon.hello(site.hold, "n2", epoch=2)
        assert site.activity() == Activity.DOWN
        assert {order.incarnation for order in site.last(tm.PrepareOrder)} == {2}
        await site.ready(2)
        site.changed("up", 2)
        assert site.activity() == Activity.IDLE

    play(scene)


def test_a_lost_node_ends_the_part_of_the_other(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        site = await Site.up(daemon)
        live = daemon.keeper.live[site.hold]
        (place,) = [place for place in live.places if place.node == "n2"]
        daemon.keeper._wpgs.lose_place(live, place, "Slurm lost node n2")
        assert daemon.orders(site.first, tm.PrepareOrder)[-1].incarnation == 0
        assert TRAIN not in live.wpgs and TRAIN not in daemon.hub.wpgs
        await daemon.settle()
        assert await daemon.flaws(site.hold) == []
        # The first node's agent comes again: it has nothing to run.
        await daemon.hello(site.hold, "n1", epoch=2)
        assert daemon.orders(site.first, tm.Welcome)[-1].wpgs == []

    play(scene)


def test_a_part_that_never_starts_costs_its_own_node(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        site = await Site.of(daemon)
        for node in ("n1", "n2"):
            await daemon.hello(site.hold, node)
        for incarnation in range(1, 5):
            site.changed("down", incarnation, site.second)
        found = daemon.hub.hopeless()
        assert [place.node for place, _ in found] == ["n2"]
        assert "n2: rank 0 ended" in found[0][1]

    play(scene)


def test_every_gpu_of_all_nodes_is_booked_once(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        site = await Site.up(daemon)
        (view,) = [view for view in daemon.shell.core.views() if view.wpg == TRAIN]
        assert view.gpus == 4
        assert await daemon.flaws(site.hold) == []

    play(scene)


# ---- a daemon that is new ----------------------------------------------------------------------


def held(**facts: Any) -> tm.WpgHeld:
    values: dict[str, Any] = {
        "name": TRAIN, "state": "up", "resident": MODEL, "progress": NEWER, "running": [],
        "incarnation": 3, "pids": [1, 2],
    }  # fmt: skip
    return tm.WpgHeld(**(values | facts))


async def next_daemon(world: World, site: Site) -> Site:
    await site.daemon.die()
    return Site(await world.daemon(), site.hold)


def test_a_gang_outlives_the_daemon(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site = await next_daemon(world, site)
        for node, images in (("n1", [image(1), image(4)]), ("n2", [image(1)])):
            await site.daemon.hello(site.hold, node, wpgs=[held()], images=images)
        assert site.activity() == Activity.IDLE
        assert not site.daemon.orders(site.first, tm.PrepareOrder)
        assert site.settled() == IMAGE
        assert site.last(tm.SettleOrder)[0].images == {MODEL: IMAGE}

    play(scene)


def test_a_gang_of_which_one_part_got_an_order_is_started_again(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site = await next_daemon(world, site)
        await site.daemon.hello(site.hold, "n1", wpgs=[held()])
        await site.daemon.hello(site.hold, "n2", wpgs=[held(running=[("c9", 0)])])
        assert site.activity() == Activity.DOWN
        assert {order.incarnation for order in site.last(tm.PrepareOrder)} == {4}

    play(scene)


def test_a_part_that_died_before_the_other_was_heard_is_no_living_gang(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        site = await next_daemon(world, site)
        await site.daemon.hello(site.hold, "n1", wpgs=[held(resident="")])
        site.changed("down", 3, site.first)
        await site.daemon.hello(site.hold, "n2", wpgs=[held(resident="")])
        assert site.activity() == Activity.DOWN
        assert {order.incarnation for order in site.last(tm.PrepareOrder)} == {4}

    play(scene)


# ---- orders ------------------------------------------------------------------------------------


def test_a_call_has_ended_when_every_part_has_answered(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        call = await site.model()
        one, other = site.last(tm.RunOrder)
        assert one == other
        site.answer(site.second, other, "run", call=call)
        await asyncio.sleep(TICK_S)
        entry = site.daemon.shell.entries[call]
        assert not entry.ended.is_set()
        site.answer(site.first, one, "run", call=call, result=wire.encode(wire.Created(100)))
        await site.daemon.writer.drain()
        assert entry.ended.is_set()
        assert not isinstance(entry.outcome, wire.Failed)
        for address in (site.first, site.second):
            assert site.daemon.orders(address, tm.Ack)

    play(scene)


def test_a_call_fails_if_one_part_says_so(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        call = await site.model()
        one, other = site.last(tm.RunOrder)
        site.answer(site.first, one, "run", call=call, result=wire.encode(wire.Created(100)))
        site.answer(site.second, other, "run", call=call, ok=False, error="no room")
        await site.daemon.writer.drain()
        outcome = site.daemon.shell.entries[call].outcome
        assert outcome == wire.Failed("no room", "user")

    play(scene)


def test_a_call_that_one_part_answered_before_the_gang_died_runs_again(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        call = await site.model()
        one, _ = site.last(tm.RunOrder)
        site.answer(site.first, one, "run", call=call, result=wire.encode(wire.Created(100)))
        site.changed("down", 1, site.second)
        await site.ready(2)
        site.changed("up", 2)
        await asyncio.sleep(TICK_S)
        again = site.last(tm.RunOrder)
        assert [order.call for order in again] == [call, call]
        assert [order.incarnation for order in again] == [2, 2]
        assert again[0].id != one.id

    play(scene)
