"""A WPG over two nodes is one to the core, and its parts live and die together."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm import wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, SlurmId
from plexrl_slurm.core.messages import Activity, Persist, SaveImage, Switch
from plexrl_slurm.daemons.shell import Durable
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from plexrl_slurm.settings import WpgSettings
from plexrl_slurm.slurm_settings import ComponentSettings
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import TICK_S, TRAIN, Daemon, World, settings_in

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[[Scene], None]
MODEL = DeploymentId("s1-1:train:0")
IMAGE, NEWER = (1, 0), (4, 0)


@contextlib.asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[World]:
    """Holds have a training WPG over n1 and n2, and a rollout WPG on r1."""
    components = (
        ComponentSettings(pool="train", partition="gpu", nodes=2, gpus_per_node=2),
        ComponentSettings(pool="rollout", partition="gpu", gpus_per_node=1),
    )
    settings = dataclasses.replace(
        settings_in(folder, components=components),
        wpgs=(
            WpgSettings(pool="train", engine="fake_train", gpus=4, nodes=2),
            WpgSettings(pool="rollout", engine="fake_sample"),
        ),
    )
    engine = open_database(settings.database_url)
    upgrade(engine)
    async with Store(engine) as store:
        world = World(settings, store)
        try:
            yield world
        finally:
            for daemon in world.daemons:
                await daemon.die(written=False)
    engine.dispose()


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with two_nodes(tmp_path) as world:
                await scene(world)

        asyncio.run(whole())

    return run


class Site:
    """One hold, and the agents of its three nodes."""

    def __init__(self, daemon: Daemon, hold: str) -> None:
        self.daemon, self.hold = daemon, hold
        self.first, self.second = f"{hold}.0.n1".encode(), f"{hold}.0.n2".encode()
        self._number = 0

    @classmethod
    async def of(cls, daemon: Daemon) -> "Site":
        """The hold runs; no agent has said hello."""
        before = set(daemon.keeper.live)
        await daemon.look()
        (hold,) = set(daemon.keeper.live) - before
        number = daemon.keeper.live[hold].slurm_id
        other = SlurmId(f"{number}1")
        daemon.slurm.run(number, "n1", "n2", components=(number, other))
        daemon.slurm.run(other, "r1", leader=number)
        await daemon.look()
        return cls(daemon, hold)

    @classmethod
    async def up(cls, daemon: Daemon) -> "Site":
        """All WPGs of the hold are up."""
        site = await cls.of(daemon)
        rollout = await daemon.hello(site.hold, "r1", component=1)
        daemon.up(rollout, "rollout-0")
        await daemon.hello(site.hold, "n1")
        await daemon.hello(site.hold, "n2")
        await site.ready(1)
        site.changed("up", 1)
        return site

    async def ready(self, incarnation: int, *images: list[tm.ImageHeld]) -> None:
        """Both agents have ended what lived, and the pause is over."""
        held = images or ([], [])
        for port, (address, mine) in enumerate(zip((self.first, self.second), held, strict=True)):
            report = tm.PartReady(wpg=TRAIN, incarnation=incarnation, port=9000 + port, images=mine)
            await self.daemon.hub.gangs.ready(address, report)
        await asyncio.sleep(TICK_S)

    def changed(self, state: str, incarnation: int, *addresses: bytes) -> None:
        for address in addresses or (self.first, self.second):
            self._number += 1
            report = tm.WpgChanged(
                number=self._number,
                name=TRAIN,
                state=state,
                reason="rank 0 ended" if state == "down" else "",
                incarnation=incarnation,
                pids=[self._number],
                at_us=now_us(),
            )
            self.daemon.hub._heard(address, report)

    def answer(self, address: bytes, order: Any, what: str, **facts: Any) -> None:
        self._number += 1
        values: dict[str, Any] = {"ok": True} | facts
        done = tm.Done(number=self._number, wpg=TRAIN, order=order.id, what=what, **values)
        self.daemon.hub._heard(address, done)

    def last(self, kind: type[Any]) -> list[Any]:
        """The last order of a kind to each of the two agents."""
        return [self.daemon.orders(address, kind)[-1] for address in (self.first, self.second)]

    def activity(self) -> str:
        (view,) = [view for view in self.daemon.shell.core.views() if view.wpg == TRAIN]
        return str(view.activity)

    async def model(self) -> CallId:
        """A job's deployment that is about to be created."""
        job = await self.daemon.job()
        session = await self.daemon.session(job)
        call, name = await self.daemon.model(job, session)
        assert name == MODEL
        await asyncio.sleep(TICK_S)
        return call

    async def created(self) -> None:
        """It is resident on both nodes."""
        call = await self.model()
        for address, order in zip((self.first, self.second), self.last(tm.RunOrder), strict=True):
            result = wire.encode(wire.Created(100)) if address == self.first else b""
            self.answer(address, order, "run", call=call, result=result)
        await asyncio.sleep(TICK_S)

    def settled(self) -> Any:
        gang = self.daemon.hub.gangs.get(TRAIN)
        assert gang is not None
        return gang.settled.get(MODEL)


def image(seq: int, part: int = 0) -> tm.ImageHeld:
    return tm.ImageHeld(wpg=TRAIN, deployment=MODEL, progress=(seq, part), bytes=8)


def save_step(progress: tuple[int, int]) -> SaveImage:
    return SaveImage(wpg=TRAIN, deployment=MODEL, progress=progress, cause=CauseId("test"))


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


# ---- images ------------------------------------------------------------------------------------


def test_an_image_counts_when_every_part_has_it(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.daemon.hub.save(save_step(IMAGE))
        one, other = site.last(tm.SaveOrder)
        site.answer(site.first, one, "save")
        assert site.settled() is None
        assert not site.daemon.orders(site.first, tm.SettleOrder)
        site.answer(site.second, other, "save")
        assert site.settled() == IMAGE
        assert [order.images for order in site.last(tm.SettleOrder)] == [{MODEL: IMAGE}] * 2

    play(scene)


def test_an_image_that_one_part_could_not_write_is_none(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        for progress, ok in ((IMAGE, True), (NEWER, False)):
            site.daemon.hub.save(save_step(progress))
            one, other = site.last(tm.SaveOrder)
            site.answer(site.first, one, "save")
            site.answer(site.second, other, "save", ok=ok, error="" if ok else "full")
        assert site.settled() == IMAGE
        assert [order.images for order in site.last(tm.SettleOrder)] == [{MODEL: IMAGE}] * 2

    play(scene)


def test_a_save_that_ended_on_one_part_before_the_gang_died_is_forgotten(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.daemon.hub.save(save_step(NEWER))
        one, _ = site.last(tm.SaveOrder)
        site.answer(site.first, one, "save")
        site.changed("down", 1, site.second)
        await site.ready(2, [image(1), image(4)], [image(1)])
        assert site.settled() == IMAGE
        assert site.last(tm.SettleOrder)[0].images == {MODEL: IMAGE}
        assert site.last(tm.StartOrder)[0].incarnation == 2

    play(scene)


def test_a_save_that_ended_on_all_parts_counts_though_the_daemon_did_not_hear_of_it(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.changed("down", 1, site.second)
        await site.ready(2, [image(1), image(4)], [image(4), image(1)])
        assert site.settled() == NEWER

    play(scene)


def switch_step(incoming: str, *, outgoing: str | None = MODEL) -> Switch:
    return Switch(
        wpg=TRAIN,
        outgoing=DeploymentId(outgoing) if outgoing else None,
        outgoing_progress=NEWER,
        incoming=DeploymentId(incoming),
        cause=CauseId("test"),
    )


def test_ranks_switch_when_every_node_has_what_comes_in(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        durable = Durable(progress=(9, 0), path="/durable/b")
        site.daemon.hub.switch(switch_step("b"), None, durable)
        one, other = site.last(tm.FetchOrder)
        assert (one.image, one.durable_path) == ((9, 0), "/durable/b")
        site.answer(site.first, one, "fetch")
        assert not site.daemon.orders(site.first, tm.SwitchOrder)
        site.answer(site.second, other, "fetch")
        one, other = site.last(tm.SwitchOrder)
        assert (one.incoming, one.outgoing, one.image) == ("b", MODEL, (9, 0))
        site.answer(site.first, one, "switch")
        site.answer(site.second, other, "switch")
        settled = [order.images for order in site.daemon.orders(site.second, tm.SettleOrder)]
        assert settled == [{"b": (9, 0)}, {MODEL: NEWER}]

    play(scene)


def test_no_rank_is_disturbed_if_a_node_cannot_get_what_comes_in(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.daemon.hub.switch(switch_step("b"), None, Durable(progress=(9, 0), path="/durable/b"))
        one, other = site.last(tm.FetchOrder)
        site.answer(site.first, one, "fetch")
        site.answer(site.second, other, "fetch", ok=False, error="it is damaged")
        assert not site.daemon.orders(site.first, tm.SwitchOrder)
        assert site.daemon.hub.wpgs[TRAIN].reason == "it is damaged"

    play(scene)


def persist_step() -> Persist:
    return Persist(deployment=MODEL, wpg=TRAIN, progress=IMAGE, cause=CauseId("test"))


async def with_image(world: World) -> Site:
    site = await Site.up(await world.daemon())
    await site.created()
    site.changed("down", 1, site.second)
    await site.ready(2, [image(1)], [image(1)])
    site.changed("up", 2)
    for address in (site.first, site.second):
        site.daemon.server.posted = [
            each for each in site.daemon.server.posted if each[0] != address
        ]
    return site


def test_a_durable_image_is_made_whole_by_one_when_all_have_written(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        site.daemon.hub.persist(persist_step(), None)
        one, other = site.last(tm.PersistOrder)
        assert one == other and one.image == IMAGE and one.shares == []
        site.answer(site.second, other, "share", result=b"of n2")
        assert len(site.daemon.orders(site.first, tm.PersistOrder)) == 1
        site.answer(site.first, one, "share", result=b"of n1")
        last = site.daemon.orders(site.first, tm.PersistOrder)[-1]
        assert last.shares == [b"of n1", b"of n2"] and last.share == one.share
        assert len(site.daemon.orders(site.second, tm.PersistOrder)) == 1

    play(scene)


def test_a_durable_image_that_one_node_could_not_write_is_tried_again(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        site.daemon.hub.persist(persist_step(), None)
        one, other = site.last(tm.PersistOrder)
        site.answer(site.first, one, "share", result=b"of n1")
        site.answer(site.second, other, "share", ok=False, error="full")
        assert len(site.daemon.orders(site.first, tm.PersistOrder)) == 1
        assert MODEL not in site.daemon.hub._persisting

    play(scene)


def test_a_copy_goes_on_while_ranks_start_again_and_ends_with_an_agent(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        site.daemon.hub.persist(persist_step(), None)
        one, _ = site.last(tm.PersistOrder)
        site.changed("down", 2, site.second)
        assert MODEL in site.daemon.hub._persisting
        site.answer(site.first, one, "share", result=b"of n1")
        await site.daemon.hello(site.hold, "n2", epoch=2)
        assert MODEL not in site.daemon.hub._persisting

    play(scene)
