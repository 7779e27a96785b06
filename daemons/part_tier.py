"""A host tier that also has shares of images, of WPGs that lie on several nodes."""

import asyncio
from pathlib import Path

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.daemons import fallback
from plexrl_slurm.daemons.fallback import Found
from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.memory import durable, shares
from plexrl_slurm.memory.fence import token_of
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.memory.part_images import PartImages
from plexrl_slurm.transport import messages as tm


class PartTier(HostTier):
    """What every agent has."""

    def part(self, wpg: str, *, world: int, ranks: range) -> PartImages:
        """This node's share of the images of a WPG, which may be new."""
        store = self._stores.get(wpg)
        if not isinstance(store, PartImages) or (store.whole, store.ranks) != (world, ranks):
            folder = self._host / "images" / wpg / f"world-{world}.ranks-{ranks[0]}-{ranks[-1]}"
            store = PartImages(folder, world=world, ranks=ranks)
            self._stores[wpg] = store
        return store

    def all_stores(self) -> dict[str, ImageStore]:
        for folder in sorted(self._host.glob("images/*/world-*.ranks-*-*")):
            world, _, ranks = folder.name.removeprefix("world-").partition(".ranks-")
            first, last = (int(word) for word in ranks.split("-"))
            if folder.parent.name not in self._stores:
                self.part(folder.parent.name, world=int(world), ranks=range(first, last + 1))
        return super().all_stores()

    def images(self) -> list[tm.ImageHeld]:
        parts = {w for w, store in self.all_stores().items() if isinstance(store, PartImages)}
        whole = [image for image in super().images() if image.wpg not in parts]
        return [*whole, *(image for wpg in sorted(parts) for image in self.part_images(wpg))]

    def part_images(self, wpg: str) -> list[tm.ImageHeld]:
        """This node's shares of all images of a WPG, whatever the other nodes have."""
        store = self._part(wpg)
        found = {(held.deployment, held.progress): held.bytes for held in store.every()}
        for copy in self._nvme.copies() if self._nvme is not None else ():
            if copy.wpg == wpg and copy.world == store.world:
                found.setdefault((copy.deployment, copy.progress), copy.bytes)
        return [
            tm.ImageHeld(wpg=wpg, deployment=deployment, progress=progress, bytes=size)
            for (deployment, progress), size in found.items()
        ]

    def settle(self, wpg: str, deployment: str, progress: tuple[int, int] | None) -> None:
        """Every node has just this image of a deployment; ``None``: there is none."""
        store = self._part(wpg)
        store.settle(deployment, progress)
        if progress is not None:
            if self._room is not None:
                self._room.written(wpg, deployment, progress)
        else:
            store.drop(deployment)
            if self._nvme is not None:
                self._nvme.drop(wpg, deployment)

    async def fetch(self, order: tm.SwitchOrder) -> Found:
        if order.image is None:
            return await super().fetch(order)
        held = await self._at(order.wpg, order.incoming, order.image)
        return Found(held=held, durable=None, damaged=())

    async def fetch_part(self, order: tm.FetchOrder) -> Held:
        """This node's share of just this image, from the durable tier if it is not here.

        Raises ``BadImage`` and ``StorageFull``.
        """
        try:
            return await self._checked(order)
        except BadImage:
            if not order.durable_path:
                raise
        store = self._part(order.wpg)
        self._forget_share(store, order)
        await fallback.twice(
            lambda: self._read_durable(
                order.wpg,
                order.deployment,
                Path(order.durable_path),
                first=store.ranks.start,
                world=store.whole,
            )
        )
        return await self._checked(order)

    async def _checked(self, order: tm.FetchOrder) -> Held:
        held = await self._at(order.wpg, order.deployment, order.image)
        held = _there(held, order.deployment, order.image)
        fallback.check_held(held, self._part(order.wpg).paths(held.slot))
        return held

    def _forget_share(self, store: PartImages, order: tm.FetchOrder) -> None:
        """What is here of an image cannot be used."""
        store.forget_at(order.deployment, order.image)
        copy = self._nvme.find(order.wpg, order.deployment) if self._nvme is not None else None
        if copy is not None and copy.progress == order.image and self._nvme is not None:
            self._nvme.drop(order.wpg, order.deployment)

    async def share(self, order: tm.PersistOrder) -> tuple[Held, bytes]:
        """Copy this node's share of an image to the durable tier; what to tell about it.

        Raises ``BadImage`` and ``StorageFull``.
        """
        store, image = self._part(order.wpg), order.image or (0, 0)
        held = _there(await self._at(order.wpg, order.deployment, image), order.deployment, image)
        folder = durable.folder_of(Path(order.folder), order.deployment, image)
        store.pin(held.slot)
        try:
            written = await asyncio.to_thread(
                shares.write_share, folder, store.paths(held.slot), name=order.share
            )
        finally:
            store.unpin(held.slot)
        return held, written

    async def join(self, order: tm.PersistOrder) -> durable.Manifest:
        """Every node has copied its share: make the durable image whole. Raises ``BadImage``."""
        root = Path(order.folder)
        folder = durable.folder_of(root, order.deployment, order.image or (0, 0))
        manifest = await asyncio.to_thread(
            shares.finish,
            folder,
            order.shares,
            name=order.share,
            order=token_of(order.epoch, order.id),
        )
        if order.known is not None:
            await asyncio.to_thread(durable.keep_newest, root, order.deployment, order.known)
        return manifest

    def forget(self, wpg: str) -> None:
        """The WPG is no more: its images are garbage."""
        store = self._stores.pop(wpg, None)
        if store is not None:
            store.keep_only(())
            for slot in store.free_slots():
                store.delete(slot)
        if self._nvme is not None:
            for copy in [copy for copy in self._nvme.copies() if copy.wpg == wpg]:
                self._nvme.drop(wpg, copy.deployment)

    def _finish(
        self, wpg: str, slot: int, deployment: str, progress: tuple[int, int], *, ok: bool
    ) -> None:
        store = self._stores.get(wpg)
        if not ok or not isinstance(store, PartImages):
            super()._finish(wpg, slot, deployment, progress, ok=ok)
            return
        store.prepare(slot, deployment=deployment, progress=progress)
        if self._room is not None:
            self._room.ended(wpg, slot)

    def _part(self, wpg: str) -> PartImages:
        store = self._stores[wpg]
        if not isinstance(store, PartImages):
            raise TypeError(f"WPG {wpg} lies on one node")
        return store

    async def _at(self, wpg: str, deployment: str, progress: tuple[int, int]) -> Held | None:
        held = self._part(wpg).find_at(deployment, progress)
        if held is not None:
            await self._summer.believe(self._part(wpg), held)
        else:
            held = await self._bring(wpg, deployment)
        return held if held is not None and held.progress == progress else None


def _there(held: Held | None, deployment: str, progress: tuple[int, int]) -> Held:
    if held is None:
        raise BadImage(deployment, f"has no image {progress} on this node")
    return held
