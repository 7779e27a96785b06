"""Makes checksums of images in host memory while nothing moves, and believes no image of an earlier
agent whose checksums it does not match.

An image that has none yet is taken as it is: whatever ended its agent did not end the machine, and
its header says that it is whole.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.logs import say
from plexrl_slurm.memory import sums
from plexrl_slurm.memory.images import Held, ImageStore

log = logging.getLogger(__name__)


class Summer:
    """One for each agent."""

    def __init__(self, stores: Mapping[str, ImageStore]) -> None:
        self._stores = stores
        self._busy, self._checking = False, asyncio.Lock()
        #: Checksums of a slab that are not all, and the image that they are of.
        self._begun: tuple[Held, Path, list[int]] | None = None
        #: Images that do not match theirs, and that nobody has wanted since.
        self._damaged: list[Held] = []

    async def idle(self, *, quiet: Callable[[], bool]) -> None:
        """While ``quiet``: check what an earlier agent left, then sum up what has no sums."""
        if self._busy:
            return
        self._busy = True
        stores = list(self._stores.values())
        self._damaged = [bad for bad in self._damaged if any(s.holds(bad) for s in stores)]
        try:
            for store in stores:
                for held in list(store.every()):
                    if quiet() and store.is_doubted(held.slot) and not self._is_damaged(held):
                        await self._look(store, held)
            for store in stores:
                for held in list(store.every()):
                    if quiet() and not store.is_summed(held.slot):
                        await self._sum(store, held, quiet=quiet)
        finally:
            self._busy = False

    async def believe(self, store: ImageStore, held: Held) -> None:
        """Check an image that an earlier agent left, once. Raises ``BadImage``."""
        if not store.is_doubted(held.slot):
            return
        # Of two who want it the second looks when the first has given it up.
        async with self._checking:
            if not store.is_doubted(held.slot) or not store.holds(held):
                return
            store.pin(held.slot)
            try:
                for slab in store.paths(held.slot):
                    await asyncio.to_thread(sums.check, slab)
            finally:
                store.unpin(held.slot)
            store.believe(held.slot)

    async def _look(self, store: ImageStore, held: Held) -> None:
        try:
            await self.believe(store, held)
        except BadImage as problem:  # whoever wants it is told, and gets an older one
            self._damaged.append(held)
            say(log, "slab_damaged", deployment=held.deployment, reason=str(problem))

    def _is_damaged(self, held: Held) -> bool:
        return any(each is held for each in self._damaged)

    async def _sum(self, store: ImageStore, held: Held, *, quiet: Callable[[], bool]) -> None:
        """Not pinned: whoever wants the slab gets it, and what was summed up is worth nothing."""
        for slab in store.paths(held.slot):
            if sums.path_of(slab).exists():
                continue
            begun: list[int] = []
            if self._begun is not None and self._begun[0] is held and self._begun[1] == slab:
                begun = self._begun[2]
            self._begun = held, slab, begun
            try:
                found = await asyncio.to_thread(sums.compute, slab, begun, wanted=quiet)
            except BadImage:  # it is being written, or gone
                self._begun = None
                return
            if found is None or not store.holds(held):
                return
            sums.write(slab, found)
            self._begun = None
