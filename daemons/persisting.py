"""The way of images from host memory to the durable tier."""

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.daemons import fallback
from plexrl_slurm.daemons.fallback import Found
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.fence import token_of
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.memory.swap_manifest import Trust
from plexrl_slurm.transport import messages as tm


class Persisting(ABC):
    """A part of :class:`HostTier`, which makes what it uses."""

    #: Of the agent, in what it writes.
    writer: str
    _stores: dict[str, ImageStore]
    #: Copies that are under way, by deployment.
    _copying: dict[str, asyncio.Lock]
    #: A slot was written, or not.
    _ended: asyncio.Event
    #: Progress of durable images that were made here.
    _persisted: dict[str, tuple[int, int]]
    #: Deployments with a durable image.
    _replaceable: set[str]

    @abstractmethod
    async def _bring(self, wpg: str, deployment: str) -> Held | None: ...

    @abstractmethod
    def _discard(self, wpg: str, deployment: str) -> None: ...

    @abstractmethod
    def _swap(self, wpg: str, deployment: str) -> Path | None: ...

    @property
    @abstractmethod
    def _trust(self) -> Trust | None: ...

    async def persist(self, order: tm.PersistOrder) -> Found:
        """Copy the newest image to the durable tier; older ones than the daemon knows of go.

        Without an image that is whole there is none. Raises ``BadImage`` and ``StorageFull``.
        """
        # An earlier daemon's order may still be under way.
        async with self._copying.setdefault(order.deployment, asyncio.Lock()):
            return await self._persist(order)

    async def _persist(self, order: tm.PersistOrder) -> Found:
        store = self._stores[order.wpg]
        found = await self._whole(order)
        try:
            return await self._copy_to_durable(order, store, found)
        except BadImage:
            if found.held is None or not store.holds(found.held):
                raise
            store.doubt(found.held.slot)
        # If it is damaged indeed there is another one, or none.
        return await self._copy_to_durable(order, store, await self._whole(order))

    async def _copy_to_durable(
        self, order: tm.PersistOrder, store: ImageStore, found: Found
    ) -> Found:
        held = found.held
        if held is None:
            return found
        root = Path(order.folder)
        folder = durable.folder_of(root, order.deployment, held.progress)
        await fallback.copy_held(
            store,
            held,
            folder,
            writer=self.writer,
            order=token_of(order.epoch, order.id),
            swap=self._swap(order.wpg, order.deployment),
            trust=self._trust,
        )
        self._persisted[order.deployment] = held.progress
        self._replaceable.add(order.deployment)
        if order.known is not None:
            await asyncio.to_thread(durable.keep_newest, root, order.deployment, order.known)
        return found

    async def _whole(self, order: tm.PersistOrder) -> Found:
        """The newest image on the node that is whole."""
        damaged: list[str] = []
        store = self._stores[order.wpg]
        while True:
            try:
                held = await self._bring(order.wpg, order.deployment)
            except BadImage as problem:
                self._discard(order.wpg, order.deployment)
                damaged.append(str(problem))
            else:
                if held is None and store.is_under(order.deployment):
                    self._ended.clear()
                    await self._ended.wait()
                    continue
                return Found(held=held, durable=order.known, damaged=damaged)
