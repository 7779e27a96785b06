"""Brings the image that is expected next from NVMe into memory, before anybody needs it.

In the background: it takes a slab that is free or that can be had for nothing, reads slowly,
and gives way at once when a switch wants the disk or the slab, or when another is expected.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Protocol

from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.daemons.nvme_tier import Copy, NvmeTier
from plexrl_slurm.logs import say
from plexrl_slurm.memory.nvme import Abandoned, Gate

log = logging.getLogger(__name__)

Key = tuple[str, str]
#: What reads is not for any WPG.
_ASIDE: Final = ("", "")


class Room(Protocol):
    """What it needs of the host tier; implemented by ``host_room.HostRoom``."""

    nvme: NvmeTier

    def only_below(self, wpg: str, deployment: str) -> Copy | None:
        """The copy that is newer than what is in memory."""

    async def read_below(self, copy: Copy, *, gate: Gate, kept: Collection[Key]) -> bool:
        """Read it into a slab that costs nobody anything; whether there was one."""


class Prefetcher:
    """One for each agent: its disk reads one image ahead at a time."""

    def __init__(self, room: Room) -> None:
        self._room = room
        #: Who is expected on each WPG.
        self._expected: dict[str, str] = {}
        self._gate = Gate()
        self._key: Key | None = None
        self._ended = asyncio.Event()
        self._ended.set()

    @property
    def kept(self) -> set[Key]:
        """Images that leave memory last."""
        return set(self._expected.items())

    def expect(self, wpg: str, deployment: str) -> None:
        """The scheduler's hint; "": nobody."""
        if self._key is not None and self._key[0] in (wpg, "") and self._key[1] != deployment:
            self._gate.close()
        if deployment:
            self._expected[wpg] = deployment
        else:
            self._expected.pop(wpg, None)

    async def give_way(self, key: Key | None = None) -> None:
        """Somebody needs the disk or a slab now, or the image of ``key``: if that is what comes,
        it may end, at full speed."""
        if self._key is None:
            return
        if self._key == key:
            self._gate.hurry()
        else:
            self._gate.close()
        await self._ended.wait()

    async def run(self, *, quiet: Callable[[], bool]) -> bool:
        """While ``quiet``, read what is expected; whether anything was read."""
        read = False
        if self._key == _ASIDE:
            await self.give_way()
        for wpg, deployment in list(self._expected.items()):
            if self._key is not None or not quiet():
                break
            copy = self._room.only_below(wpg, deployment)
            if copy is not None and self._expected.get(wpg) == deployment:
                read |= await self._read((wpg, deployment), copy)
        return read

    async def aside(self, gate: Gate, work: Callable[[], Awaitable[None]]) -> bool:
        """Other work that gives way as well; whether it was done, as nothing else is."""
        if self._key is not None:
            return False
        self._key, self._gate = _ASIDE, gate
        self._ended.clear()
        try:
            await work()
        finally:
            self._key = None
            self._ended.set()
        return True

    async def _read(self, key: Key, copy: Copy) -> bool:
        self._key, self._gate = key, Gate(slow=True)
        self._ended.clear()
        try:
            done = await self._room.read_below(copy, gate=self._gate, kept=self.kept)
        except Abandoned:
            return False
        except (PlexError, OSError) as problem:
            say(log, "image_not_prefetched", wpg=key[0], deployment=key[1], reason=str(problem))
            return False
        finally:
            self._key = None
            self._ended.set()
        if done:
            say(log, "image_prefetched", wpg=key[0], deployment=key[1], bytes=copy.bytes)
        return done
