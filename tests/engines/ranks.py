"""Gangs as an agent runs them, without the agent: real rank processes, real links."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.daemons.gang import Gang
from plexrl_slurm.engines import ranklink
from plexrl_slurm.transport.messages import WpgConfig


class Ranks:
    """Some gangs, and the socket that they talk to."""

    def __init__(self, folder: Path, models: Mapping[str, ModelSpec]) -> None:
        self._folder, self._models = folder, models
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._endpoint = f"ipc://{folder}/ranks"
        self._numbers = count()
        self._changed = asyncio.Event()
        self.gangs: dict[str, Gang] = {}
        #: Why each went down, in order.
        self.reasons: dict[str, list[str]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, folder: Path, models: Mapping[str, ModelSpec], *configs: WpgConfig
    ) -> AsyncIterator["Ranks"]:
        """Start a gang for each, and wait until all are up."""
        ranks = cls(folder, models)
        ranks._socket.bind(ranks._endpoint)
        hear = asyncio.create_task(ranks._hear())
        try:
            for config in configs:
                ranks._start(config)
            for config in configs:
                await ranks.reaches(config.name, incarnation=1)
            yield ranks
        finally:
            await asyncio.gather(*(gang.stop() for gang in ranks.gangs.values()))
            hear.cancel()
            await asyncio.wait((hear,))
            ranks._socket.close()
            ranks._context.term()

    def _start(self, config: WpgConfig) -> None:
        self.reasons[config.name] = []
        gang = self.gangs[config.name] = Gang(
            config,
            models={name: asdict(model) for name, model in self._models.items()},
            endpoint=self._endpoint,
            folder=self._folder,
            specs=self._folder,
            writer="test",
            send=self._send,
            changed=self._gang_changed,
        )
        gang.start()

    def _gang_changed(self, gang: Gang, reason: str) -> None:
        if gang.state == "down":
            self.reasons[gang.config.name].append(reason)
        self._changed.set()

    async def _send(self, identity: bytes, data: bytes) -> None:
        await self._socket.send_multipart([identity, data])

    async def _hear(self) -> None:
        while True:
            identity, data = await self._socket.recv_multipart()
            name = identity.decode()
            self.gangs[name.split("/")[0]].heard(name, ranklink.decode_report(data))

    async def reaches(self, name: str, *, incarnation: int) -> None:
        """Wait until that start of a gang is up."""
        gang = self.gangs[name]
        async with asyncio.timeout(500):
            while (gang.state, gang.incarnation) != ("up", incarnation):
                assert gang.incarnation <= incarnation, self.reasons[name]
                self._changed.clear()
                await self._changed.wait()

    async def orders(
        self, name: str, make: Callable[[int], ranklink.Operation]
    ) -> list[ranklink.Answer]:
        """One operation for each rank; every rank's answer."""
        gang = self.gangs[name]
        operations = [make(rank) for rank in range(gang.processes)]
        answers: list[ranklink.Answer] = await asyncio.wait_for(
            gang.order(f"order-{next(self._numbers)}", operations), 300
        )
        return answers

    async def order(self, name: str, operation: ranklink.Operation) -> ranklink.Answer:
        """The same for every rank; the first one's answer."""
        return (await self.orders(name, lambda _: operation))[0]

    async def load(self, name: str, path: Path | str, *, model: str) -> ranklink.Answer:
        """Bring a snapshot in."""
        return await self.order(name, ranklink.Load("s", str(path), model=model))

    async def sample(self, name: str, **fields: Any) -> wire.SampleOutput:
        """One sample call; it must succeed."""
        usual: dict[str, Any] = {"prompt": [10, 42, 7, 33, 5], "num_samples": 2, "max_tokens": 12}
        body = wire.Sample(**{**usual, "seed": 11, "ignore_eos": True, **fields})
        answer = await self.order(name, ranklink.Call("c", "d", wire.encode(body)))
        assert answer.ok, answer.error
        result = wire.decode_result(answer.result)
        assert isinstance(result, wire.SampleOutput)
        return result


def wpg(name: str, engine: str, *, gpus: int = 1, **options: Any) -> WpgConfig:
    """A WPG of this machine."""
    return WpgConfig(name=name, engine=engine, world=gpus, gpus=gpus, options=options, cores=[])
