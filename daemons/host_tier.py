"""An agent's host tier: images of its training WPGs, snapshots, and the way to the durable tier."""

import asyncio
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadImage, StorageFull
from plexrl_slurm.daemons.folders import locked, refuse_foreign
from plexrl_slurm.daemons.host_room import HostRoom
from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.memory import contents, durable
from plexrl_slurm.memory.files import part_name
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.transport import messages as tm

#: Says which copies on NVMe were made of this tier's images.
_OWNER: Final = "nvme.owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Slots that a switch or a save uses; ends in :meth:`HostTier.end`."""

    wpg: str
    #: What comes in.
    held: Held | None
    #: Where what leaves is written.
    slot: int | None
    loads: list[Path]
    saves: list[Path]


class HostTier:
    """Folders of one agent; made at its start, with what an earlier agent left in them."""

    def __init__(
        self,
        host: Path,
        *,
        snapshots: Path | None,
        writer: str,
        nvme: NvmeTier | None = None,
        host_bytes: int = 0,
    ) -> None:
        """``snapshots``: a folder that all agents share, or ``None`` for one of its own;
        ``writer`` names the agent in what it writes to the durable tier; with ``nvme``, images
        that do not fit into ``host_bytes`` lie there."""
        self._host, self.writer = host, writer
        self._shared = snapshots is not None
        self.snapshots = host / "snapshots" if snapshots is None else snapshots
        self._make()
        self._stores: dict[str, ImageStore] = {}
        #: Dropped while something was under way that may yet write them.
        self._dropped: set[str] = set()
        #: Snapshots that are being written.
        self._publishing: set[str] = set()
        #: Copies to the durable tier, by deployment.
        self._copying: dict[str, asyncio.Lock] = {}
        self._lock: int | None = None
        self._nvme = nvme
        own_snapshots = None if self._shared else self.snapshots
        self._room = (
            HostRoom(self._stores, nvme, host=host, snapshots=own_snapshots, limit=host_bytes)
            if nvme is not None
            else None
        )

    async def own(self) -> None:
        """Wait until no other agent uses these folders; then tidy up.

        Raises ``Denied`` if others can change what is in them.
        """
        refuse_foreign(self._host, above=3 if self._shared else 1, setting="host_dir")
        self._lock = await locked(self._host, self._make)
        if not self._shared:
            for torn in self.snapshots.glob(".*.part"):
                torn.unlink(missing_ok=True)
        if self._nvme is not None and self._room is not None:
            await self._nvme.own(self._owner())
            for wpg, store in self.all_stores().items():
                for held in store.held():
                    copy = self._nvme.find(wpg, held.deployment)
                    if copy is not None and copy.progress < held.progress:
                        self._room.written(wpg, held.deployment, held.progress)

    def _owner(self) -> str:
        path = self._host / _OWNER
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text()

    def _make(self) -> None:
        """Again, if need be: another hold's agent may have taken them for left over."""
        self.snapshots.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._host.mkdir(parents=True, exist_ok=True, mode=0o700)

    def clear(self) -> None:
        """The hold is given back."""
        shutil.rmtree(self._host, ignore_errors=True)
        if self._nvme is not None:
            self._nvme.clear()

    # -- images ------------------------------------------------------------------------------
    def store(self, wpg: str, world: int | None = None) -> ImageStore:
        """The images of a WPG; ``world`` if it may be new."""
        if wpg not in self._stores and world is not None:
            folder = self._host / "images" / wpg / f"world-{world}"
            self._stores[wpg] = ImageStore(folder, world=world)
        return self._stores[wpg]

    def all_stores(self) -> dict[str, ImageStore]:
        """Stores of running WPGs, and what an earlier agent left for WPGs not started yet."""
        for folder in sorted(self._host.glob("images/*/world-*")):
            if folder.parent.name not in self._stores:
                self.store(folder.parent.name, int(folder.name.removeprefix("world-")))
        return self._stores

    def images(self) -> list[tm.ImageHeld]:
        """All complete images, in memory or below it."""
        stores = self.all_stores()
        found = {
            (name, held.deployment): (held.progress, held.bytes)
            for name, store in stores.items()
            for held in store.held()
        }
        for copy in self._nvme.copies() if self._nvme is not None else ():
            store, key = stores.get(copy.wpg), (copy.wpg, copy.deployment)
            of_gang = store is None or store.world == copy.world
            if of_gang and (key not in found or found[key][0] < copy.progress):
                found[key] = copy.progress, copy.bytes
        return [
            tm.ImageHeld(wpg=wpg, deployment=deployment, progress=progress, bytes=size)
            for (wpg, deployment), (progress, size) in found.items()
        ]

    # -- switches and saves ------------------------------------------------------------------
    async def begin_switch(self, order: tm.SwitchOrder) -> Passage | None:
        """Slots of both images; ``None`` if there is none of the incoming deployment.

        Raises ``BadImage`` and ``StorageFull``.
        """
        store = self._stores[order.wpg]
        held = await self.fetch(order)
        if held is None:
            return None
        store.pin(held.slot)
        if self._room is not None:
            self._room.wanted(order.wpg, order.incoming)
        try:
            slot = await self._begin(order.wpg, order.outgoing) if order.outgoing else None
        except BaseException:
            store.unpin(held.slot)
            raise
        saves = store.paths(slot) if slot is not None else []
        return Passage(
            wpg=order.wpg, held=held, slot=slot, loads=store.paths(held.slot), saves=saves
        )

    async def begin_save(self, order: tm.SaveOrder) -> Passage:
        """A slot for an image of the resident."""
        slot = await self._begin(order.wpg, order.deployment)
        saves = self._stores[order.wpg].paths(slot)
        return Passage(wpg=order.wpg, held=None, slot=slot, loads=[], saves=saves)

    def end(
        self, passage: Passage, deployment: str, progress: tuple[int, int], *, ok: bool
    ) -> None:
        """The ranks have done it, or not: then the image of ``deployment`` is the older one."""
        store = self._stores[passage.wpg]
        if passage.held is not None:
            store.unpin(passage.held.slot)
        if passage.slot is not None:
            self._finish(passage.wpg, passage.slot, deployment, progress, ok=ok)

    async def _begin(self, wpg: str, deployment: str) -> int:
        if self._room is None:
            return self._stores[wpg].begin()
        return await self._room.begin(wpg, deployment)

    def _finish(
        self, wpg: str, slot: int, deployment: str, progress: tuple[int, int], *, ok: bool
    ) -> None:
        store = self._stores[wpg]
        if ok:
            store.commit(slot, deployment=deployment, progress=progress)
        else:
            store.abandon(slot)
        if self._room is not None:
            self._room.ended(wpg, slot)
            if ok:
                self._room.written(wpg, deployment, progress)

    async def copy_below(self, *, quiet: Callable[[], bool]) -> None:
        """Prepare for the next switch that needs room, for as long as ``quiet`` says so."""
        if self._room is not None:
            await self._room.copy_below(quiet=quiet)

    async def _newest(self, wpg: str, deployment: str) -> Held | None:
        """In memory; from NVMe if it is there only."""
        if self._room is None:
            return self._stores[wpg].find(deployment)
        return await self._room.bring(wpg, deployment)

    async def fetch(self, order: tm.SwitchOrder) -> Held | None:
        """The image that a switch brings in, from the durable tier if there is no newer here.

        Raises ``BadImage`` and ``StorageFull``.
        """
        store = self._stores[order.wpg]
        known = max(
            (
                image.progress
                for image in self.images()
                if (image.wpg, image.deployment) == (order.wpg, order.incoming)
            ),
            default=None,
        )
        if not order.durable_path or (known is not None and known >= order.durable_progress):
            return await self._newest(order.wpg, order.incoming)
        slot = await self._begin(order.wpg, order.incoming)
        try:
            try:
                manifest = await asyncio.to_thread(
                    durable.read_image,
                    Path(order.durable_path),
                    store.paths(slot),
                    swap=self._swap(order.wpg, order.incoming),
                )
            except StorageFull:
                raise
            except OSError as error:
                why = f"cannot be read ({error.strerror})"
                raise BadImage(order.durable_path, why) from error
            if manifest.deployment != order.incoming:
                raise BadImage(order.durable_path, f"is of deployment {manifest.deployment}")
        except BaseException:
            self._finish(order.wpg, slot, order.incoming, (0, 0), ok=False)
            raise
        self._finish(order.wpg, slot, order.incoming, manifest.progress, ok=True)
        return store.find(order.incoming)

    async def persist(self, order: tm.PersistOrder) -> Held:
        """Copy the newest image to the durable tier; older ones than the daemon knows of go.

        Raises ``BadImage`` and ``StorageFull``.
        """
        # An earlier daemon's order may still be under way.
        async with self._copying.setdefault(order.deployment, asyncio.Lock()):
            return await self._persist(order)

    async def _persist(self, order: tm.PersistOrder) -> Held:
        store = self._stores[order.wpg]
        held = await self._newest(order.wpg, order.deployment)
        if held is None:
            raise BadImage(order.deployment, "has no complete image on this node")
        root = Path(order.folder)
        folder = durable.folder_of(root, order.deployment, held.progress)
        store.pin(held.slot)
        try:
            await asyncio.to_thread(
                durable.write_image,
                folder,
                store.paths(held.slot),
                writer=self.writer,
                swap=self._swap(order.wpg, order.deployment),
            )
            if order.known is not None:
                await asyncio.to_thread(durable.keep_newest, root, order.deployment, order.known)
        finally:
            store.unpin(held.slot)
        return held

    def _swap(self, wpg: str, deployment: str) -> Path | None:
        return self._nvme.swap_folder(wpg, deployment) if self._nvme is not None else None

    # -- snapshots ---------------------------------------------------------------------------
    def snapshot(self, name: str) -> Path:
        """File of a snapshot."""
        return self.snapshots / f"{name}.safetensors"

    def snapshot_names(self) -> list[str]:
        """Of all that are here."""
        return [path.stem for path in self.snapshots.glob("*.safetensors")]

    def publishing(self, snapshot: str) -> None:
        """It is being written from now on."""
        self._publishing.add(snapshot)

    def published(self, snapshot: str) -> None:
        """It is written, or will not be."""
        if snapshot in self._dropped:
            self._delete_snapshot(snapshot)
        self._publishing.discard(snapshot)

    # -- garbage -----------------------------------------------------------------------------
    def keep_only(self, *, deployments: Iterable[str], snapshots: Iterable[str]) -> None:
        """Everything else is garbage. Of snapshots that all agents share it may be another's,
        made since: they are the daemon's to delete."""
        for store in self.all_stores().values():
            store.keep_only(deployments)
        if self._nvme is not None:
            self._nvme.keep_only(deployments)
        if self._shared:
            return
        wanted = set(snapshots)
        for path in self.snapshots.glob("*.safetensors"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)
        contents.forget(self.snapshots)

    def drop(self, order: tm.DropOrder) -> None:
        """Delete images and snapshots."""
        self._dropped.update(order.deployments, order.snapshots)
        for deployment in order.deployments:
            self._drop_image(deployment)
        for snapshot in order.snapshots:
            self._delete_snapshot(snapshot)

    def drop_again(self, *, quiet: bool) -> None:
        """What was under way when it was dropped may have been written since; ``quiet``: nothing
        is under way now."""
        for deployment in {image.deployment for image in self.images()} & self._dropped:
            self._drop_image(deployment)
        if self._nvme is not None:
            self._nvme.sweep_swap()
        if quiet and not self._publishing:
            self._dropped.clear()

    def returns(self, deployment: str) -> None:
        """A deployment that was dropped here lives here again."""
        self._dropped.discard(deployment)
        if self._nvme is not None:
            self._nvme.returns(deployment)

    def _drop_image(self, deployment: str) -> None:
        for wpg, store in self._stores.items():
            store.drop(deployment)
            if self._nvme is not None:
                self._nvme.drop(wpg, deployment)
                self._nvme.drop_swap(wpg, deployment)

    def _delete_snapshot(self, snapshot: str) -> None:
        path = self.snapshot(snapshot)
        path.unlink(missing_ok=True)
        part_name(path, self.writer).unlink(missing_ok=True)
        contents.forget(self.snapshots)
