"""Brings snapshots from the agents of other nodes, in the background, and gives them ours."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage, PlexError
from plexrl_slurm.daemons.snapshot_store import SnapshotStore
from plexrl_slurm.logs import say
from plexrl_slurm.transport import bulk
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.bulk_client import BulkFetch
from plexrl_slurm.transport.bulk_server import BulkServer

log = logging.getLogger(__name__)

#: So long a snapshot is waited for that nobody can give: its agent may be coming back.
WAIT_S: Final = 60.0
#: Transfers to here at once.
_TRANSFERS: Final = 4
#: Between two tries.
LOOK_S: Final = 0.5


@dataclass(slots=True, eq=False)
class _Wanted:
    """A snapshot that is being brought."""

    name: str
    bytes: int
    sources: list[tm.SnapshotSource]
    #: Other sources are known.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    transfer: BulkFetch | None = None
    #: Set when it is to be ended; ``kept``: what has come stays.
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    kept: bool = False
    task: "asyncio.Task[None] | None" = None


class SnapshotLinks:
    """Both ends of one agent."""

    def __init__(
        self,
        store: SnapshotStore,
        *,
        agent: str,
        key: bytes,
        room: Callable[[int], Awaitable[None]],
        here: Callable[[str, int, str, int], None],
    ) -> None:
        """``room`` makes room in memory for so many bytes; ``here`` is told ``(snapshot, bytes,
        agent that gave it, microseconds)`` when one has come."""
        self._store, self._agent, self._key = store, agent, key
        self._room, self._here = room, here
        self._wanted: dict[str, _Wanted] = {}
        self._turns = asyncio.Semaphore(_TRANSFERS)
        self._server = BulkServer(key, store.find_published)
        self._host, self._port = "", 0

    async def start(self, endpoint: str) -> None:
        """Give snapshots at this node's address on the way to the daemon's ``endpoint``."""
        try:
            self._host = bulk.address_towards(endpoint)
            self._port = await self._server.start(self._host)
        except OSError as problem:  # others take the copies in the shared folder
            say(log, "bulk_not_served", host=self._host, reason=problem)

    def source(self) -> tm.SnapshotSource:
        """How others get what is published here."""
        return tm.SnapshotSource(
            agent=self._agent,
            host=self._host,
            port=self._port,
            folder=str(self._store.published),
            token=self._store.token,
        )

    def published(self, name: str) -> None:
        """It is on this node from now on; other nodes, if there are any, may ask for it."""
        if not self._store.alone:
            self._server.prepare(name)

    async def close(self) -> None:
        """Neither give nor fetch any more; what was half fetched stays."""
        tasks = [each.task for each in self._wanted.values() if each.task is not None]
        for wanted in self._wanted.values():
            wanted.kept = True
            self._end(wanted)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()

    # -- orders ------------------------------------------------------------------------------
    def want(self, name: str, size: int, sources: Iterable[tm.SnapshotSource]) -> None:
        """Bring it in the background, or go on with these sources."""
        given = [each for each in sources if each.agent != self._agent]
        known = self._wanted.get(name)
        if known is not None:
            if given and given != known.sources:
                known.sources = given
                known.changed.set()
            return
        if self._store.find(name, given) is None:
            self._begin(name, size, given)

    def _begin(self, name: str, size: int, sources: list[tm.SnapshotSource]) -> _Wanted:
        wanted = self._wanted[name] = _Wanted(name, size, sources)
        wanted.task = asyncio.create_task(self._bring(wanted))
        wanted.task.add_done_callback(lambda task: self._ended(wanted, task))
        return wanted

    def _ended(self, wanted: _Wanted, task: "asyncio.Task[None]") -> None:
        if self._wanted.get(wanted.name) is wanted:
            del self._wanted[wanted.name]
        if not task.cancelled() and (problem := task.exception()) is not None:
            say(log, "snapshot_not_fetched", snapshot=wanted.name, reason=problem)

    async def ready(self, order: tm.SwitchOrder) -> str:
        """The file to load for a switch, once there is one. Raises ``BadImage``."""
        name = order.incoming
        given = [each for each in order.sources if each.agent != self._agent]
        if (path := self._store.find(name, given)) is not None:
            return str(path)
        self.want(name, order.snapshot_bytes, given)
        wanted = self._wanted.get(name)
        if wanted is not None and wanted.task is not None:
            await asyncio.wait([wanted.task])
            if (problem := wanted.task.exception()) is not None:
                raise problem
            given = wanted.sources
        path = self._store.find(name, given) or self._store.find_shared(name)
        if path is None:
            raise BadImage(name, "was dropped while it was brought here")
        return str(path)

    def drop(self, names: Iterable[str]) -> None:
        """Nobody needs them any more."""
        for name in names:
            if (wanted := self._wanted.get(name)) is not None:
                self._end(wanted)

    def keep_only(self, names: Iterable[str]) -> None:
        """Nobody needs any other."""
        self.drop(self._wanted.keys() - set(names))

    def _end(self, wanted: _Wanted) -> None:
        wanted.dropped.set()
        wanted.changed.set()
        if wanted.transfer is not None:
            wanted.transfer.cancel()

    # -- bringing ----------------------------------------------------------------------------
    async def _bring(self, wanted: _Wanted) -> None:
        """Until it is on this node, or in the shared folder; raises ``BadImage``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_S
        reasons: dict[str, str] = {}
        while not wanted.dropped.is_set():
            if wanted.changed.is_set():
                wanted.changed.clear()
                deadline = loop.time() + WAIT_S
                reasons.clear()
            if self._store.find(wanted.name, wanted.sources) is not None:
                return
            for source in wanted.sources:
                if source.port and await self._fetch(wanted, source, reasons):
                    return
            if wanted.dropped.is_set():
                break
            if await asyncio.to_thread(self._store.find_shared, wanted.name) is not None:
                say(log, "snapshot_from_shared", snapshot=wanted.name, reasons=reasons)
                return
            if loop.time() > deadline:
                said = "; ".join(f"{agent}: {why}" for agent, why in reasons.items())
                why = f"cannot be had from any agent ({said or 'none has it'})"
                raise BadImage(wanted.name, f"{why}, and is not in the shared folder either")
            try:
                async with asyncio.timeout(LOOK_S):
                    await wanted.changed.wait()
            except TimeoutError:
                pass
        if not wanted.kept:
            self._store.drop(wanted.name)  # with what came meanwhile

    async def _fetch(
        self, wanted: _Wanted, source: tm.SnapshotSource, reasons: dict[str, str]
    ) -> bool:
        began = now_us()
        transfer = wanted.transfer = BulkFetch(
            (source.host, source.port),
            self._key,
            wanted.name,
            self._store.fetched_path(wanted.name),
            size=wanted.bytes or None,
            spare=self._store.spare,
            maps=self._store.maps,
        )
        try:
            async with self._turns:
                await self._room(wanted.bytes)
                got = await asyncio.to_thread(transfer.run)
        except (PlexError, OSError) as problem:
            why = str(problem) or type(problem).__name__
            if reasons.get(source.agent) != why and not wanted.dropped.is_set():
                say(
                    log,
                    "snapshot_fetch_failed",
                    snapshot=wanted.name,
                    agent=source.agent,
                    reason=why,
                )
            reasons[source.agent] = why
            return False
        finally:
            wanted.transfer = None
        took = now_us() - began
        say(
            log,
            "snapshot_fetched",
            snapshot=wanted.name,
            agent=source.agent,
            bytes=got.bytes,
            received=got.received,
            connections=got.connections,
            took_us=took,
        )
        if not wanted.dropped.is_set():
            self._here(wanted.name, got.bytes, source.agent, took)
        return True
