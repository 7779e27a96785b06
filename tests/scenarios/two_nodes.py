"""A train and a rollout node, each with a real agent and its ranks and a host folder of its own;
the daemon runs in the test, and Slurm is scripted."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from plexrl_slurm import wire
from plexrl_slurm.core.ids import CallId
from plexrl_slurm.daemons.agent_config import AgentConfig
from plexrl_slurm.db.store import Store
from plexrl_slurm.model_folder import read_model_folder
from plexrl_slurm.settings import Settings
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.links import AgentServer
from tests.daemons.holds_bench import Daemon, Slurm, World, settings_in, world_in
from tests.transport.bulk_proxy import Proxy

MODEL = "tiny"
SNAPSHOT_BYTES = 32 << 20
NODES = ("n1", "n2")


class LiveDaemon(Daemon):
    """The bench's daemon with a real link to its agents, which outlives it."""

    def __init__(self, settings: Settings, store: Store, slurm: Slurm, link: AgentServer) -> None:
        super().__init__(settings, store, slurm)
        self.hub._server = link

    async def start(self) -> None:
        await super().start()
        # Agents are heard once it is known which are expected.
        self._hearing = asyncio.create_task(self.hub.listen())

    def check(self) -> None:
        """Fail if it hears nobody any more."""
        if self._hearing.done():
            self._hearing.result()

    async def die(self, *, written: bool = True) -> None:
        self._hearing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._hearing
        await super().die(written=written)


class Site:
    """Both nodes."""

    def __init__(self, world: World, folder: Path, *, shared: bool, wire_: Proxy | None) -> None:
        self.world, self.folder = world, folder
        self.host = Path("/dev/shm") / f"plexrl-test-{os.getpid()}-{folder.name}"
        self.shared = folder / "snapshots" if shared else folder / "a file" / "snapshots"
        (folder / "a file").write_text("no folder")
        #: Between the nodes; ``None``: both see each other's memory.
        self.wire = wire_
        self.hold = ""
        self.link = AgentServer(folder)
        self.endpoint = self.link.start("127.0.0.1")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    async def daemon(self) -> LiveDaemon:
        world = self.world
        daemon = LiveDaemon(world.settings, world.store, world.slurm, self.link)
        world.daemons.append(daemon)
        if self.wire is not None:
            self._between(daemon, self.wire)
        await daemon.start()
        return daemon

    def _between(self, daemon: LiveDaemon, between: Proxy) -> None:
        """What one agent learns of the other leads through the wire only."""
        real = daemon.hub.snapshots.sources

        def sources(name: str) -> list[tm.SnapshotSource]:
            found = []
            for each in real(name):
                between.target = (each.host, each.port)
                host, port = between.address
                found.append(_at(each, host, port))
            return found

        daemon.hub.snapshots.sources = sources  # type: ignore[method-assign]

    def config(self, node: str) -> Path:
        component = NODES.index(node)
        config = AgentConfig(
            agent=f"{self.hold}.{component}.{node}",
            hold=self.hold,
            node=node,
            endpoint=self.endpoint,
            state_dir=str(self.folder),
            host_dir=str(self.host_of(node)),
            host_bytes=1 << 30,
            snapshots_dir=str(self.shared),
            component=component,
        )
        path = self.folder / f"{node}.json"
        path.write_text(json.dumps(asdict(config)))
        return path

    def host_of(self, node: str) -> Path:
        return self.host / node / f"{self.hold}.{NODES.index(node)}"

    def start(self, node: str) -> None:
        with (self.folder / f"{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "plexrl_slurm.daemons.agentd",
                    str(self.config(node)),
                ],
                stdout=log,
                stderr=log,
            )

    def kill(self, node: str) -> None:
        """With -9; its ranks go with it."""
        agent = self.agents.pop(node)
        agent.kill()
        agent.wait()

    def log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text()

    def close(self) -> None:
        for agent in self.agents.values():
            agent.send_signal(signal.SIGKILL)
            agent.wait()
        self.link.close()
        shutil.rmtree(self.host, ignore_errors=True)


def _at(source: tm.SnapshotSource, host: str, port: int) -> tm.SnapshotSource:
    return tm.SnapshotSource(
        agent=source.agent, host=host, port=port, folder="/nowhere", token=source.token
    )


@contextlib.asynccontextmanager
async def site_in(
    folder: Path, model: Path, *, shared: bool, wire_: Proxy | None
) -> AsyncIterator[tuple[Site, LiveDaemon]]:
    """Both agents up."""
    async with world_in(folder) as world:
        world.settings = _settings(folder, model)
        for private in ("ranks", "durable", "snapshots"):
            (folder / private).mkdir(mode=0o700)
        site = Site(world, folder, shared=shared, wire_=wire_)
        try:
            daemon = await site.daemon()
            site.hold = await daemon.hold(*NODES)
            for node in NODES:
                site.start(node)
            await until(lambda: all_up(daemon))
            yield site, daemon
        finally:
            site.close()


def _settings(folder: Path, model: Path) -> Settings:
    settings = settings_in(folder)
    train, rollout = settings.wpgs
    found = read_model_folder(model, dtype="float32")
    spec = dataclasses.replace(
        settings.models[MODEL], path=str(model), architecture=found.architecture
    )
    return replace(
        settings,
        wpgs=(replace(train, options={"snapshot_bytes": SNAPSHOT_BYTES}), rollout),
        models={MODEL: spec},
    )


def all_up(daemon: LiveDaemon) -> bool:
    daemon.check()
    views = daemon.hub.wpgs.values()
    return len(views) == 2 and all(view.state == "up" for view in views)


async def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Learner:
    """A controller's loop, straight on the service."""

    def __init__(self, daemon: LiveDaemon) -> None:
        self.daemon = daemon
        self.seq = 0
        self.model = self.session = ""

    async def begin(self) -> None:
        self.job = await self.daemon.job()
        self.session = await self.daemon.session(self.job)
        call, self.model = await self.daemon.model(self.job, self.session)
        await self.answer(call)

    async def answer(self, call: CallId) -> Any:
        who = self.daemon.who(self.job)
        async with asyncio.timeout(90):
            while True:
                outcome = await self.daemon.service.outcome(who, call, wait_s=1)
                if type(outcome).__name__ != "Pending":
                    return outcome

    async def step(self) -> None:
        who = self.daemon.who(self.job)
        tokens = wire.Array.of(np.array([4, 5 + self.seq % 7, 6], dtype=np.int64))
        datum = wire.Datum(tokens, {"target_tokens": tokens})
        for body in (
            wire.ForwardBackward([datum], "cross_entropy"),
            wire.OptimStep(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0),
        ):
            self.seq += 1
            call = await self.daemon.service.submit(
                who, model_id=self.model, seq_id=self.seq, body=body
            )
            await self.answer(call)

    async def publish(self) -> CallId:
        self.seq += 1
        return await self.daemon.service.publish(
            self.daemon.who(self.job),
            model_id=self.model,
            seq_id=self.seq,
            name=None,
            sampling_session_seq_id=self.seq,
        )

    async def sample(self, published: CallId) -> list[list[int]]:
        ready = await self.answer(published)
        body = wire.Sample(prompt=[4, 5, 6], num_samples=3, max_tokens=6, seed=0)
        call = await self.daemon.service.sample(
            self.daemon.who(self.job),
            sampling_session_id=ready.sampling_session_id,
            seq_id=1,
            body=body,
            seed_given=False,
        )
        output = await self.answer(call)
        return [sequence.tokens for sequence in output.sequences]

    async def run(self, steps: int = 2) -> list[list[list[int]]]:
        seen = []
        for _ in range(steps):
            await self.step()
            seen.append(await self.sample(await self.publish()))
        return seen
