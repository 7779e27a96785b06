"""Keeps an agent's images within the bytes of its host tier; the coldest go to NVMe."""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage, BadInput, PlexError
from plexrl_slurm.core.tiers import Eviction, How, Tier, TieredImage, choose, next_use_us
from plexrl_slurm.daemons.nvme_tier import Copy, NvmeTier
from plexrl_slurm.logs import say
from plexrl_slurm.memory import contents
from plexrl_slurm.memory.images import Held, ImageStore

log = logging.getLogger(__name__)

_Key = tuple[str, str]


class HostRoom:
    """Where images of all WPGs of an agent lie: in slabs, on NVMe, or both."""

    def __init__(
        self,
        stores: Mapping[str, ImageStore],
        nvme: NvmeTier,
        *,
        host: Path,
        snapshots: Path | None,
        limit: int,
    ) -> None:
        """``snapshots``: a folder whose bytes count as well."""
        self._stores, self.nvme = stores, nvme
        self._host, self._snapshots, self._limit = host, snapshots, limit
        #: Bytes promised to slots that are being written.
        self._promised: dict[tuple[str, int], int] = {}
        #: When a deployment was last wanted, and how long after the time before.
        self._uses: dict[_Key, tuple[int, int | None]] = {}
        self._deciding = asyncio.Lock()
        #: Of the copy that is made in the background.
        self._copied = asyncio.Event()
        self._copied.set()

    # -- slots -------------------------------------------------------------------------------
    async def begin(self, wpg: str, deployment: str, *, size: int = 0) -> int:
        """:meth:`ImageStore.begin`, with room for the image, as far as that can be made."""
        store = self._stores[wpg]
        async with self._deciding:
            size = size or self._expected(wpg, deployment)
            await self._make_room(store, size)
            slot = store.begin()
            self._promised[wpg, slot] = size
            return slot

    def ended(self, wpg: str, slot: int) -> None:
        """The slot was committed or abandoned."""
        self._promised.pop((wpg, slot), None)

    def written(self, wpg: str, deployment: str, progress: tuple[int, int]) -> None:
        """The image in memory is of this progress now; a copy of another is worth nothing."""
        copy = self.nvme.find(wpg, deployment)
        if copy is not None and copy.progress != progress:
            self.nvme.drop(wpg, deployment)

    def wanted(self, wpg: str, deployment: str) -> None:
        """It is being switched in."""
        now, before = now_us(), self._uses.get((wpg, deployment))
        self._uses[wpg, deployment] = now, None if before is None else now - before[0]

    async def bring(self, wpg: str, deployment: str) -> Held | None:
        """The newest image, read back if it is on NVMe only.

        Raises ``BadImage`` and ``StorageFull``.
        """
        store, copy = self._stores[wpg], self.nvme.find(wpg, deployment)
        held = store.find(deployment)
        if copy is None or (held is not None and held.progress >= copy.progress):
            return held
        slot = await self.begin(wpg, deployment, size=copy.bytes)
        try:
            await self._read(copy, store.paths(slot))
        except OSError as error:
            if isinstance(error, PlexError):
                raise
            raise BadImage(str(copy.folder), f"cannot be read ({error.strerror})") from error
        else:
            store.commit(slot, deployment=deployment, progress=copy.progress)
            say(log, "image_came_back", wpg=wpg, deployment=deployment, bytes=copy.bytes)
        finally:
            self.ended(wpg, slot)
            store.abandon(slot)
        return store.find(deployment)

    async def push(self, wpg: str, deployment: str) -> int:
        """Have an image on NVMe only; the bytes that memory gets back. Raises ``BadInput``."""
        store = self._stores[wpg]
        async with self._deciding:
            held, copy = store.find(deployment), self.nvme.find(wpg, deployment)
            if held is None:
                where = "it is on NVMe already" if copy is not None else "the node has no image"
                raise BadInput(f"it is not in host memory ({where})")
            if store.is_pinned(held.slot):
                raise BadInput("it is being read just now: try again")
            copied = copy is not None and copy.progress == held.progress
            if not copied and not await self._copy(wpg, deployment):
                raise BadInput(
                    f"it could not be copied to NVMe, of whose {self.nvme.limit} bytes "
                    f"{self.nvme.used} are in use: see the agent's log, or raise nvme_bytes"
                )
            if store.find(deployment) is not held or store.is_pinned(held.slot):
                raise BadInput("it was used meanwhile: try again")
            store.release(deployment)
        return held.bytes

    async def _read(self, copy: Copy, slabs: list[Path]) -> None:
        """Once more, if it was bad: it is not the disk that errs every time."""
        try:
            await self.nvme.read(copy, slabs)
        except BadImage:
            await self.nvme.read(copy, slabs)

    # -- background --------------------------------------------------------------------------
    async def copy_below(self, *, quiet: Callable[[], bool]) -> None:
        """While nothing else moves: copy what would leave next, so that it need only be dropped."""
        refused: set[_Key] = set()
        while quiet() and self._copied.is_set():
            images = self._images(refused)
            largest = max((image.bytes for image in images.values()), default=0)
            spare = sum(store.free_bytes() for store in self._stores.values())
            found = choose(
                images.values(),
                tier=Tier.HOST,
                needed_bytes=self._used() - spare + largest - self._limit,
                below_bytes=self._below(),
            )
            key = next((_key(each) for each in found if each.how is How.SPILL), None)
            if key is None:
                return
            self._copied.clear()
            try:
                if not await self._copy(*key):
                    refused.add(key)
            finally:
                self._copied.set()

    # -- room --------------------------------------------------------------------------------
    async def _make_room(self, store: ImageStore, size: int) -> None:
        refused: set[_Key] = set()
        while (excess := self._excess(store, size)) > 0:
            if self._delete_a_free_slab(store):
                continue
            found = choose(
                self._images(refused).values(),
                tier=Tier.HOST,
                needed_bytes=excess,
                below_bytes=self._below(),
            )
            if found:
                if not await self._evict(found[0]):
                    refused.add(_key(found[0]))
            elif not self._copied.is_set():
                await self._copied.wait()
            else:
                say(log, "host_tier_full", missing_bytes=excess, nvme_bytes=self.nvme.used)
                return

    def _excess(self, store: ImageStore, size: int) -> int:
        more = max(0, size - store.slot_bytes(store.next_slot()))
        there = os.statvfs(self._host)
        pending = self._used() - self._on_disk()
        return max(
            self._used() + more - self._limit, more + pending - there.f_bavail * there.f_frsize
        )

    def _on_disk(self) -> int:
        files = self._snapshots.glob("*.safetensors") if self._snapshots is not None else ()
        slabs = sum(store.all_bytes() for store in self._stores.values())
        return slabs + contents.bytes_of(files)

    def _used(self) -> int:
        grows = (
            max(0, size - self._stores[wpg].slot_bytes(slot))
            for (wpg, slot), size in self._promised.items()
        )
        return self._on_disk() + sum(grows)

    def _delete_a_free_slab(self, store: ImageStore) -> bool:
        """Of the target's, the one that is written next stays."""
        for each in self._stores.values():
            for slot in each.free_slots():
                if each is not store or slot != store.next_slot():
                    each.delete(slot)
                    return True
        return False

    async def _evict(self, eviction: Eviction) -> bool:
        wpg, deployment = _key(eviction)
        store = self._stores[wpg]
        held = store.find(deployment)
        if eviction.how is How.SPILL and not await self._copy(wpg, deployment):
            return False
        if held is not None and store.find(deployment) is held and not store.is_pinned(held.slot):
            store.release(deployment)
            say(log, "image_left_memory", wpg=wpg, deployment=deployment, how=str(eviction.how))
        return True

    async def _copy(self, wpg: str, deployment: str) -> bool:
        """To NVMe, if that has room or gets it; what is in memory stays there."""
        store = self._stores[wpg]
        held = store.find(deployment)
        if held is None or not self._make_room_below(held.bytes):
            return False
        store.pin(held.slot)
        try:
            await self.nvme.write(wpg, held, store.paths(held.slot))
        except (PlexError, OSError) as problem:
            say(log, "image_not_copied", wpg=wpg, deployment=deployment, reason=str(problem))
            return False
        finally:
            store.unpin(held.slot)
        if store.find(deployment) is not held:  # dropped or replaced meanwhile
            self.nvme.drop(wpg, deployment)
        return True

    def _below(self) -> int:
        """Bytes that NVMe has, or gets by dropping copies of what is in memory."""
        twice = sum(copy.bytes for copy in self.nvme.copies() if self._in_memory(copy))
        return self.nvme.limit - self.nvme.used + twice

    def _make_room_below(self, size: int) -> bool:
        # Those that somebody reads in memory stay there, so their copies are needed least.
        images = [replace(image, pinned=False) for image in self._images(()).values()]
        missing = self.nvme.used + size - self.nvme.limit
        for each in choose(images, tier=Tier.NVME, needed_bytes=missing):
            self.nvme.drop(*_key(each))
        return self.nvme.used + size <= self.nvme.limit

    # -- what there is -----------------------------------------------------------------------
    def _in_memory(self, copy: Copy) -> bool:
        store = self._stores.get(copy.wpg)
        held = store.find(copy.deployment) if store is not None else None
        return held is not None and held.progress == copy.progress

    def _expected(self, wpg: str, deployment: str) -> int:
        """Bytes of the next image of a deployment: of its last one, or of the WPG's largest."""
        sizes = {image.deployment: image.bytes for image in self._stores[wpg].held()}
        sizes |= {copy.deployment: copy.bytes for copy in self.nvme.copies() if copy.wpg == wpg}
        return sizes.get(deployment, max(sizes.values(), default=0))

    def _images(self, refused: Collection[_Key]) -> dict[_Key, TieredImage]:
        now, found = now_us(), {}
        for wpg, store in self._stores.items():
            for held in store.held():
                key = wpg, held.deployment
                copy = self.nvme.find(*key)
                copied = copy is not None and copy.progress == held.progress
                found[key] = self._image(
                    key,
                    now,
                    size=held.bytes,
                    tiers=frozenset({Tier.HOST, Tier.NVME} if copied else {Tier.HOST}),
                    pinned=store.is_pinned(held.slot) or key in refused,
                )
        for copy in self.nvme.copies():
            key = copy.wpg, copy.deployment
            if key not in found:
                found[key] = self._image(
                    key, now, size=copy.bytes, tiers=frozenset({Tier.NVME}), pinned=False
                )
        return found

    def _image(
        self, key: _Key, now: int, *, size: int, tiers: frozenset[Tier], pinned: bool
    ) -> TieredImage:
        last, gap = self._uses.get(key, (0, None))
        return TieredImage(
            id="\n".join(key),
            bytes=size,
            tiers=tiers,
            last_use_us=last,
            next_use_us=next_use_us(last_us=last, gap_us=gap, now_us=now) if last else None,
            pinned=pinned,
        )


def _key(eviction: Eviction) -> _Key:
    wpg, _, deployment = eviction.id.partition("\n")
    return wpg, deployment
