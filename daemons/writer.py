"""Everything the daemon writes to its database while it works, as few transactions as possible.

Writes queue up while a transaction is under way, and share the next one. What waits for a write
(an answer to a controller, an acknowledgement to an agent) happens after its commit. When the
database cannot be used the queue waits, for as long as it takes; nothing is dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plexrl_slurm.core.errors import DatabaseUnavailable
from plexrl_slurm.db.store import Store
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: How long a write that nobody waits for may be held back.
LAZY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One change: ``function(session, *arguments)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    after: Callable[[], None] | None


def _all(session: Any, writes: list[Write]) -> None:
    for write in writes:
        write.function(session, *write.arguments)


def _nothing(_session: Any) -> None:
    """A write that only marks a place in the queue."""


class Writer:
    """The daemon's only writer of hot rows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: list[Write] = []
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        #: Why nothing can be written now; "" if all is well.
        self.trouble = ""

    def add(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        after: Callable[[], None] | None = None,
        lazy: bool = False,
    ) -> None:
        """Queue a write. ``lazy``: nobody waits for it."""
        self._queue.append(Write(function=function, arguments=arguments, after=after))
        self._idle.clear()
        self._any.set()
        if not lazy:
            self._urgent.set()

    def after_commit(self, function: Callable[[], None]) -> None:
        """Call ``function`` when everything queued so far is durable; at once if it is."""
        if self._queue or not self._idle.is_set():
            self.add(_nothing, after=function)
        else:
            function()

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await self._any.wait()
            if not self._urgent.is_set():
                try:
                    async with asyncio.timeout(LAZY_S):
                        await self._urgent.wait()
                except TimeoutError:
                    pass
            self._any.clear()
            self._urgent.clear()
            batch, self._queue = self._queue, []
            await self._write(batch)
            for write in batch:
                if write.after is not None:
                    write.after()
            if not self._queue:
                self._idle.set()

    async def drain(self) -> None:
        """Wait until everything queued so far is written."""
        written = asyncio.Event()
        self.after_commit(written.set)
        await written.wait()

    async def _write(self, batch: list[Write]) -> None:
        pause = 0.1
        while True:
            try:
                await self._store.run(_all, batch)
            except DatabaseUnavailable as problem:
                self.trouble = str(problem)
                say(log, "database_unavailable", reason=problem, waiting_writes=len(batch))
                await asyncio.sleep(pause)
                pause = min(5.0, pause * 2)
            else:
                self.trouble = ""
                return
