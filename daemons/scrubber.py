"""Reads cold copies on NVMe again, slowly, to find out while a better one is still there.

Each copy is read once in ``scrub_days``, one at a time, for at most a twentieth of the disk's
time, while nothing else wants the disk. A damaged copy is dropped if the image is complete
elsewhere, and kept, as the last one, if it is not; either way it is told.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.daemons.nvme_tier import Copy, NvmeTier
from plexrl_slurm.daemons.prefetch import Key, Prefetcher
from plexrl_slurm.logs import say
from plexrl_slurm.memory.nvme import Abandoned, Gate
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

#: How often it looks whether a copy is due.
PAUSE_S: Final = 30.0
#: Of the disk's time.
SHARE: Final = 0.05
_DAY_US: Final = 86_400_000_000


class Room(Protocol):
    """What it needs of the host tier; implemented by ``host_room.HostRoom``."""

    nvme: NvmeTier
    prefetcher: Prefetcher

    def in_memory(self, copy: Copy) -> bool:
        """Whether memory has the same image."""


class Scrubber:
    """One for each agent with a disk."""

    def __init__(
        self, room: Room, *, days: int, durable: Callable[[str], tuple[int, int] | None]
    ) -> None:
        """``durable``: progress of a deployment's durable image, if this agent made it."""
        self._room, self._every_us, self._durable = room, days * _DAY_US, durable
        #: When each copy was last found whole, or looked at in vain.
        self._seen_us: dict[Path, int] = {}
        self._faults: dict[Key, tm.ImageFault] = {}

    async def loop(self) -> None:
        """For as long as the agent lives."""
        while self._every_us:
            await asyncio.sleep(PAUSE_S)
            try:
                while await self.once(now_us()):
                    pass
            except OSError as problem:
                say(log, "scrub_failed", reason=str(problem))

    async def once(self, at_us: int) -> bool:
        """Read the copy that was not read for longest, if that is long enough ago; whether there
        was one, and it was read to its end."""
        copies = {copy.folder: copy for copy in self._room.nvme.copies()}
        self._seen_us = {each: us for each, us in self._seen_us.items() if each in copies}
        due = {each: self._since_us(each) for each in copies}
        folder = min(due, key=lambda each: due[each], default=None)
        if folder is None or due[folder] > at_us - self._every_us:
            return False
        return await self._read(copies[folder], at_us)

    def faults(self) -> list[tm.ImageFault]:
        """Damage that was found, of images that no newer one has replaced."""
        for key, fault in list(self._faults.items()):
            copy = self._room.nvme.find(*key)
            if (copy is None and not fault.dropped) or (
                copy is not None and copy.progress != fault.progress
            ):
                del self._faults[key]
        return list(self._faults.values())

    def _since_us(self, folder: Path) -> int:
        if folder not in self._seen_us:
            try:
                self._seen_us[folder] = int((folder / "manifest.json").stat().st_mtime * 1e6)
            except OSError:
                self._seen_us[folder] = 0
        return self._seen_us[folder]

    async def _read(self, copy: Copy, at_us: int) -> bool:
        gate = Gate(slow=True, share=SHARE)
        try:
            if not await self._room.prefetcher.aside(gate, lambda: self._check(copy, gate)):
                return False
        except Abandoned:
            return False
        except BadImage as problem:
            self._damaged(copy, problem)
        else:
            self._faults.pop((copy.wpg, copy.deployment), None)
            with suppress(OSError):  # the next agent need not begin again
                os.utime(copy.folder / "manifest.json")
        self._seen_us[copy.folder] = at_us
        return True

    async def _check(self, copy: Copy, gate: Gate) -> None:
        try:
            await self._room.nvme.check(copy, gate=gate)
        except BadImage:  # it is not the disk that errs every time
            await self._room.nvme.check(copy, gate=gate)

    def _damaged(self, copy: Copy, problem: BadImage) -> None:
        key = copy.wpg, copy.deployment
        if self._room.nvme.find(*key) is not copy:
            return  # overtaken while it was read
        durable = self._durable(copy.deployment)
        better = durable is not None and durable >= copy.progress
        dropped = better or self._room.in_memory(copy)
        if dropped:
            self._room.nvme.drop(*key)
        self._faults[key] = tm.ImageFault(
            wpg=copy.wpg,
            deployment=copy.deployment,
            progress=copy.progress,
            reason=problem.explain(),
            dropped=dropped,
        )
        say(log, "copy_damaged", wpg=copy.wpg, dropped=dropped, reason=str(problem))
