"""A WPG over two nodes on a bench: the agents are scripted."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, SlurmId
from plexrl_slurm.core.messages import SaveImage
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from plexrl_slurm.settings import WpgSettings
from plexrl_slurm.slurm_settings import ComponentSettings
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import TICK_S, TRAIN, Daemon, World, settings_in

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[[Scene], None]
MODEL = DeploymentId("job7-1:train:0")
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


def player(folder: Path) -> Play:
    """Plays a scene in a world of two nodes."""

    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with two_nodes(folder) as world:
                await scene(world)

        asyncio.run(whole())

    return run
