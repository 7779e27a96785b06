"""An agent's host tier: images of its training WPGs, snapshots, and the way to the durable tier."""

import asyncio
import logging
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage, BadInput, StorageFull
from plexrl_slurm.daemons import fallback, spares, stock
from plexrl_slurm.daemons.fallback import Found, Kept
from plexrl_slurm.daemons.folders import locked, refuse_foreign, refuse_full, too_small
from plexrl_slurm.daemons.host_room import HostRoom
from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.daemons.persisting import Persisting
from plexrl_slurm.daemons.scrubber import Scrubber
from plexrl_slurm.daemons.snapshot_store import SnapshotStore
from plexrl_slurm.daemons.summer import Summer
from plexrl_slurm.logs import say
from plexrl_slurm.memory import disk, durable
from plexrl_slurm.memory.files import part_name, saving_errors, write_bytes
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.memory.swap_manifest import Trust
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

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
    #: Of a switch: what there is of the incoming.
    left: tm.ImagesLeft | None = None


class HostTier(Persisting):
    """Folders of one agent; made at its start, with what an earlier agent left in them."""

    def __init__(
        self,
        host: Path,
        *,
        snapshots: Path | None,
        writer: str,
        nvme: NvmeTier | None = None,
        host_bytes: int = 0,
        scrub_days: int = 0,
    ) -> None:
        """``snapshots``: a folder that all agents share, for copies that outlive the node, or
        ``None`` where there is one node; ``writer`` names the agent in what it writes to the
        durable tier; with ``nvme``, images that do not fit into ``host_bytes`` lie there."""
        self._host, self.writer = host, writer
        self._shared = snapshots is not None
        self.snapshots = SnapshotStore(host, shared=snapshots, writer=writer)
        self._make()
        self._stores: dict[str, ImageStore] = {}
        #: Dropped while something was under way that may yet write them.
        self._dropped: set[str] = set()
        #: Copies to the durable tier, by deployment.
        self._copying: dict[str, asyncio.Lock] = {}
        #: A slot was written, or not.
        self._ended = asyncio.Event()
        #: Deployments with a durable image.
        self._replaceable: set[str] = set()
        self._lock: int | None = None
        self._host_bytes, self._trouble = host_bytes, ""
        #: When images were last switched in or written.
        self._used_us: dict[tuple[str, str], int] = {}
        self._nvme, self._summer = nvme, Summer(self._stores)
        folders = self.snapshots.folders
        self._room = (
            HostRoom(self._stores, nvme, host=host, snapshots=folders, limit=host_bytes)
            if nvme is not None
            else None
        )
        #: Progress of durable images that were made here.
        self._persisted: dict[str, tuple[int, int]] = {}
        self._scrubber: Scrubber | None = None
        if self._room is not None:
            self._scrubber = Scrubber(self._room, days=scrub_days, durable=self._persisted.get)
        self._scrubbing: asyncio.Task[None] | None = None

    async def own(self) -> None:
        """Wait until no other agent uses these folders; then tidy up.

        Raises ``Denied`` if others can change what is in them.
        """
        refuse_foreign(self._host, above=3 if self._shared else 1, setting="host_dir")
        self._lock = await locked(self._host, self._make)
        self._trouble = too_small(self._host, self._host_bytes, setting="host_bytes")
        if self._trouble:
            say(log, "host_tier_small", reason=self._trouble)
        self.snapshots.own()
        if self._nvme is not None and self._room is not None:
            await self._nvme.own(self._owner())
            for wpg, store in self.all_stores().items():
                for held in list(store.held()):
                    copy = self._nvme.find(wpg, held.deployment)
                    if copy is None or copy.world != store.world or not store.whole_here:
                        continue
                    if copy.progress < held.progress:
                        self._room.written(wpg, held.deployment, held.progress)
                    elif copy.progress > held.progress:  # a slab that was free
                        store.release(held.deployment)
        if self._scrubber is not None:
            self._scrubbing = asyncio.create_task(self._scrubber.loop())

    def _owner(self) -> str:
        path = self._host / _OWNER
        if not path.exists():
            part = part_name(path, self.writer)
            write_bytes(part, uuid.uuid4().hex.encode())
            disk.disk.rename(part, path)
        return path.read_text()

    def _make(self) -> None:
        """Again, if need be: another hold's agent may have taken them for left over."""
        with saving_errors(self._host):
            self._host.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.snapshots.make()

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
    async def begin_switch(self, order: tm.SwitchOrder, *, out: int = 0) -> Passage:
        """Slots of both images, without any if there is none of the incoming deployment.

        ``out``: bytes of what leaves; 0: as many as it had last, as far as is known.
        Raises ``BadImage`` and ``StorageFull``.
        """
        store = self._stores[order.wpg]
        found = await self.fetch(order)
        held = found.held
        # Of an image that lies on several nodes none can say what there is of it.
        left = found.left if order.image is None else None
        if held is None:
            return Passage(wpg=order.wpg, held=None, slot=None, loads=[], saves=[], left=left)
        store.pin(held.slot)
        self._used_us[order.wpg, order.incoming] = now_us()
        if self._room is not None:
            self._room.wanted(order.wpg, order.incoming)
        try:
            slot = None
            if order.outgoing:
                over = order.replaceable
                slot = await self._begin(order.wpg, order.outgoing, size=out, over=over)
        except BaseException:
            store.unpin(held.slot)
            raise
        return Passage(
            wpg=order.wpg,
            held=held,
            slot=slot,
            loads=store.paths(held.slot),
            saves=store.paths(slot) if slot is not None else [],
            left=left,
        )

    async def begin_save(self, order: tm.SaveOrder, *, out: int = 0) -> Passage:
        """A slot for an image of the resident."""
        over = order.replaceable
        slot = await self._begin(order.wpg, order.deployment, size=out, over=over)
        paths = self._stores[order.wpg].paths(slot)
        return Passage(wpg=order.wpg, held=None, slot=slot, loads=[], saves=paths)

    def end(
        self, passage: Passage, deployment: str, progress: tuple[int, int], *, ok: bool
    ) -> None:
        """The ranks have done it, or not: then the image of ``deployment`` is the older one."""
        store = self._stores[passage.wpg]
        if passage.held is not None:
            store.unpin(passage.held.slot)
        if passage.slot is not None:
            self._finish(passage.wpg, passage.slot, deployment, progress, ok=ok)

    async def _begin(self, wpg: str, deployment: str, *, size: int = 0, over: bool = False) -> int:
        """``over``: something else can replace the image that is there."""
        store, under = self._stores[wpg], deployment if over else ""
        if over:
            self._replaceable.add(deployment)
        if self._room is not None:
            slot = await self._room.begin(wpg, deployment, size=size, over=under)
        else:
            slot = store.begin(under)
        try:
            refuse_full(self._host, size - store.slot_bytes(slot))
        except StorageFull:
            self._finish(wpg, slot, deployment, (0, 0), ok=False)
            raise
        return slot

    def _finish(
        self, wpg: str, slot: int, deployment: str, progress: tuple[int, int], *, ok: bool
    ) -> None:
        store = self._stores[wpg]
        if ok:
            self._used_us[wpg, deployment] = now_us()
            store.commit(slot, deployment=deployment, progress=progress)
        else:
            store.abandon(slot)
        self._ended.set()
        if self._room is not None:
            self._room.ended(wpg, slot)
            if ok:
                self._room.written(wpg, deployment, progress)

    async def expect(self, order: tm.ExpectOrder, *, quiet: Callable[[], bool]) -> None:
        """Prepare for the switch that is likely to come next."""
        if self._room is not None:
            self._room.prefetcher.expect(order.wpg, order.deployment)
            await self.idle(quiet=quiet)

    async def idle(self, *, quiet: Callable[[], bool]) -> None:
        """Prepare for the next switches, for as long as ``quiet`` says so."""
        spares.trim(self._stores, durable=self._replaceable)
        if self._room is not None:
            await self._room.copy_below(quiet=quiet)
            if await self._room.prefetcher.run(quiet=quiet):
                await self._room.copy_below(quiet=quiet)
        await self._summer.idle(quiet=quiet)

    async def _bring(self, wpg: str, deployment: str) -> Held | None:
        """In memory; from NVMe if it is there only. Raises ``BadImage`` and ``StorageFull``."""
        store = self._stores[wpg]
        while True:
            if self._room is None:
                held = store.find(deployment)
            else:
                held = await self._room.bring(wpg, deployment)
            if held is None or not store.is_doubted(held.slot):
                break
            await self._summer.believe(store, held)  # and look again: that took a while
        if held is not None:
            swap, trust = self._swap(wpg, deployment), self._trust
            await fallback.check_bringing(store, held, swap=swap, trust=trust)
        return held

    def _here(self, wpg: str, deployment: str) -> tuple[int, int] | None:
        mine = (i.progress for i in self.images() if (i.wpg, i.deployment) == (wpg, deployment))
        return max(mine, default=None)

    def _discard(self, wpg: str, deployment: str) -> None:
        """The copy that :meth:`_bring` takes is no good."""
        store = self._stores[wpg]
        held, copy = store.find(deployment), None
        if self._nvme is not None:
            copy = self._nvme.find(wpg, deployment)
        if held is not None and (copy is None or held.progress >= copy.progress):
            both = copy and copy.progress == held.progress and fallback.is_swapped(store, held)
            store.forget(deployment)
            if not both:
                return
        if self._nvme is not None:
            self._nvme.drop(wpg, deployment)

    async def fetch(self, order: tm.SwitchOrder) -> Found:
        """The image that a switch brings in, from the durable tier if there is no newer here;
        an older one if the newest is damaged.

        Raises ``BadImage`` and ``StorageFull``.
        """
        kept = None
        if order.durable_path:
            kept = Kept(progress=order.durable_progress, folder=Path(order.durable_path))
        return await fallback.search(
            here=lambda: self._here(order.wpg, order.incoming),
            bring=lambda: self._bring(order.wpg, order.incoming),
            discard=lambda: self._discard(order.wpg, order.incoming),
            kept=kept,
            load=lambda image: self._load(order.wpg, order.incoming, image),
        )

    async def _load(self, wpg: str, deployment: str, image: Kept) -> Held:
        """Out of the durable tier. Raises ``BadImage`` and ``StorageFull``."""
        await self._read_durable(wpg, deployment, image.folder)
        held = self._stores[wpg].find(deployment)
        assert held is not None  # just committed
        return held

    async def _read_durable(
        self, wpg: str, deployment: str, folder: Path, *, first: int = 0, world: int | None = None
    ) -> None:
        """``first``, ``world``: as ``durable.read_image`` takes them."""
        count = len(self._stores[wpg].paths(0))
        size = await asyncio.to_thread(durable.slab_bytes, folder, first=first, count=count)
        slot = await self._begin(wpg, deployment, size=size)
        try:
            try:
                manifest = await asyncio.to_thread(
                    durable.read_image,
                    folder,
                    self._stores[wpg].paths(slot),
                    swap=self._swap(wpg, deployment),
                    first=first,
                    world=world,
                )
            except StorageFull:
                raise
            except OSError as error:
                why = f"cannot be read ({error.strerror})"
                raise BadImage(str(folder), why) from error
            if manifest.deployment != deployment:
                raise BadImage(str(folder), f"is of deployment {manifest.deployment}")
        except BaseException:
            self._finish(wpg, slot, deployment, (0, 0), ok=False)
            raise
        self._finish(wpg, slot, deployment, manifest.progress, ok=True)

    async def evict(self, order: tm.EvictOrder) -> int:
        """Give back the memory of an image; how many bytes. Raises ``BadInput``."""
        store = self._stores.get(order.wpg)
        if store is None:
            raise BadInput(f"WPG {order.wpg} has no images on this node")
        if order.to == "nvme":
            if self._room is None:
                raise BadInput("its node has no nvme_dir: evict it to the durable tier")
            return await self._room.push(order.wpg, order.deployment)
        held, freed = store.find(order.deployment), 0
        copy = self._nvme.find(order.wpg, order.deployment) if self._nvme is not None else None
        newest = max((each.progress for each in (held, copy) if each is not None), default=None)
        if newest is None or order.durable is None or newest > order.durable:
            raise BadInput("no durable image is as new as what the node has: try again")
        if held is not None:
            if store.is_pinned(held.slot):
                raise BadInput("it is being read just now: try again")
            store.release(order.deployment)
            freed = held.bytes
        if copy is not None and self._nvme is not None:
            self._nvme.drop(order.wpg, order.deployment)
            freed += copy.bytes
        return freed

    def stock(self) -> tm.Stock:
        """What lies where."""
        below = self._room.trouble if self._room is not None else ""
        return stock.of(
            self.all_stores(),
            self._nvme,
            used_us=self._used_us,
            trouble="; ".join(filter(None, (self._trouble, below))),
            faults=self._scrubber.faults() if self._scrubber is not None else [],
        )

    async def make_room(self, size: int) -> None:
        """For a snapshot of another node, if that can be made."""
        if self._room is not None:
            await self._room.make_room(size)

    def doubt(self, wpg: str, deployment: str) -> None:
        """A rank died with it, perhaps of what is on the disk: that is read before its next use."""
        if self._nvme is not None:
            self._nvme.trust.doubt(self._nvme.swap_folder(wpg, deployment))

    def _swap(self, wpg: str, deployment: str) -> Path | None:
        return self._nvme.swap_folder(wpg, deployment) if self._nvme is not None else None

    @property
    def _trust(self) -> Trust | None:
        return self._nvme.trust if self._nvme is not None else None

    # -- garbage -----------------------------------------------------------------------------
    def keep_only(self, *, deployments: Iterable[str], snapshots: Iterable[str]) -> None:
        """Everything else is garbage."""
        for store in self.all_stores().values():
            store.keep_only(deployments)
        if self._nvme is not None:
            self._nvme.keep_only(deployments)
        self.snapshots.keep_only(snapshots)

    def forget_idle(self, running: Collection[str]) -> None:
        """Give back the memory of WPGs that an earlier agent ran and this one does not, unless it
        has an image."""
        for wpg, store in self.all_stores().items():
            if wpg not in running and not list(store.held()):
                freed = store.free_bytes()
                for slot in store.free_slots():
                    store.delete(slot)
                if freed:
                    say(log, "left_over", wpg=wpg, bytes=freed)

    def drop(self, order: tm.DropOrder) -> None:
        """Delete images and snapshots."""
        self._dropped.update(order.deployments)
        for deployment in order.deployments:
            self._drop_image(deployment)
            self._replaceable.discard(deployment)
        spares.trim(self._stores, durable=self._replaceable)
        for snapshot in order.snapshots:
            self.snapshots.drop(snapshot)

    def drop_again(self, *, quiet: bool) -> None:
        """What was under way when it was dropped may have been written since; ``quiet``: nothing
        is under way now."""
        if self._nvme is not None:
            self._nvme.sweep_swap()
        if not self._dropped:
            return
        for deployment in {image.deployment for image in self.images()} & self._dropped:
            self._drop_image(deployment)
        if quiet:
            self._dropped.clear()

    def returns(self, deployment: str) -> None:
        """A deployment that was dropped here lives here again."""
        self._dropped.discard(deployment)
        if self._nvme is not None:
            self._nvme.returns(deployment)

    def _drop_image(self, deployment: str) -> None:
        for wpg, store in self._stores.items():
            self._used_us.pop((wpg, deployment), None)
            store.drop(deployment)
            if self._nvme is not None:
                self._nvme.drop(wpg, deployment)
                self._nvme.drop_swap(wpg, deployment)
