"""Keeps an agent's images within the bytes of its host tier; the coldest go to NVMe."""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage, BadInput, PlexError
from plexrl_slurm.core.tiers import Eviction, How, Tier, TieredImage, choose, next_use_us
from plexrl_slurm.daemons.nvme_tier import Copy, NvmeTier
from plexrl_slurm.daemons.prefetch import Prefetcher
from plexrl_slurm.logs import say
from plexrl_slurm.memory import contents
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.memory.nvme import Gate

log = logging.getLogger(__name__)

_Key = tuple[str, str]
#: After a disk was full or broken, copies to it are tried again after this.
REST_US: Final = 30_000_000


class HostRoom:
    """Where images of all WPGs of an agent lie: in slabs, on NVMe, or both."""

    def __init__(
        self,
        stores: Mapping[str, ImageStore],
        nvme: NvmeTier,
        *,
        host: Path,
        snapshots: Sequence[Path],
        limit: int,
    ) -> None:
        """``snapshots``: folders whose bytes count as well."""
        self._stores, self.nvme = stores, nvme
        self._host, self._snapshots, self._limit = host, snapshots, limit
        #: Bytes promised to slots that are being written.
        self._promised: dict[tuple[str, int], int] = {}
        #: When a deployment was last wanted, and how long after the time before.
        self._uses: dict[_Key, tuple[int, int | None]] = {}
        #: What was switched in last on each WPG.
        self._latest: dict[str, str] = {}
        self.prefetcher = Prefetcher(self)
        self._deciding = asyncio.Lock()
        #: A disk that failed is not asked for so long.
        self._resting_us = 0
        #: When it was said last that nothing can leave memory.
        self._full_us = -REST_US
        #: Why the last copy was not made, and why nothing could leave memory; "" if all is well.
        self._disk_trouble = self._full_trouble = ""
        #: Of the copy that is made in the background.
        self._copied = asyncio.Event()
        self._copied.set()

    @property
    def trouble(self) -> str:
        """What an admin has to mend, in a sentence; "" if nothing."""
        return "; ".join(filter(None, (self._disk_trouble, self._full_trouble)))

    # -- slots -------------------------------------------------------------------------------
    async def begin(self, wpg: str, deployment: str, *, size: int = 0, over: str = "") -> int:
        """:meth:`ImageStore.begin`, with room for the image, as far as that can be made."""
        store = self._stores[wpg]
        async with self._deciding:
            size = size or self._expected(wpg, deployment)
            if self._excess(store, size, over) > 0:
                await self.prefetcher.give_way()
            await self._make_room(store, size, over)
            slot = store.begin(over)
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
        self._latest[wpg] = deployment
        now, before = now_us(), self._uses.get((wpg, deployment))
        self._uses[wpg, deployment] = now, None if before is None else now - before[0]

    async def bring(self, wpg: str, deployment: str) -> Held | None:
        """The newest image, read back if it is on NVMe only.

        Raises ``BadImage`` and ``StorageFull``.
        """
        store = self._stores[wpg]
        await self.prefetcher.give_way((wpg, deployment))
        while (copy := self.only_below(wpg, deployment)) is not None:
            slot = await self.begin(wpg, deployment, size=copy.bytes)
            try:
                await self._read(copy, slot)
                say(log, "image_came_back", wpg=wpg, deployment=deployment, bytes=copy.bytes)
            except (PlexError, OSError) as error:
                if self.nvme.find(wpg, deployment) is not copy:  # overtaken while it was read
                    continue
                if isinstance(error, PlexError):
                    raise
                raise BadImage(str(copy.folder), f"cannot be read ({error.strerror})") from error
        return store.find(deployment)

    async def make_room(self, size: int) -> None:
        """For what is no image, as far as that can be made."""
        async with self._deciding:
            await self._make_room(None, size)

    def only_below(self, wpg: str, deployment: str) -> Copy | None:
        """The copy that is newer than what is in memory."""
        copy, store = self.nvme.find(wpg, deployment), self._stores.get(wpg)
        if copy is None or store is None or store.world != copy.world:
            return None
        held = store.find(deployment)
        return copy if held is None or held.progress < copy.progress else None

    async def read_below(self, copy: Copy, *, gate: Gate, kept: Collection[_Key]) -> bool:
        """Read it into a slab that costs nobody anything; whether there was one.

        ``kept``: images that must not leave memory for it; nor does what is resident.
        """
        store = self._stores[copy.wpg]
        # Whoever decides now is not waited for: it may be waiting for this read to give way.
        if self._deciding.locked():
            return False
        if not self._make_spare_room(store, copy.bytes, {*kept, *self._latest.items()}):
            return False
        slot = store.begin()
        self._promised[copy.wpg, slot] = copy.bytes
        await self._read(copy, slot, gate=gate)
        return store.find(copy.deployment) is not None

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

    async def _read(self, copy: Copy, slot: int, *, gate: Gate | None = None) -> None:
        """Into a slot that was begun."""
        store = self._stores[copy.wpg]
        try:
            try:
                await self.nvme.read(copy, store.paths(slot), gate=gate)
            except BadImage:  # it is not the disk that errs every time
                await self.nvme.read(copy, store.paths(slot), gate=gate)
            if self.nvme.find(copy.wpg, copy.deployment) is copy:  # not dropped meanwhile
                store.commit(slot, deployment=copy.deployment, progress=copy.progress)
                self.nvme.came_back(copy)
        finally:
            self.ended(copy.wpg, slot)
            store.abandon(slot)

    # -- background --------------------------------------------------------------------------
    async def copy_below(self, *, quiet: Callable[[], bool]) -> None:
        """While nothing else moves: copy what would leave next, so that it need only be dropped."""
        refused: set[_Key] = set()
        #: Their copies let them leave: none of those makes room for another's.
        kept: set[_Key] = set()
        while quiet() and self._copied.is_set():
            images = self._images(refused)
            largest = max((image.bytes for image in images.values()), default=0)
            spare = sum(store.free_bytes() for store in self._stores.values())
            found = choose(
                images.values(),
                tier=Tier.HOST,
                needed_bytes=self._used() - spare + largest - self._limit,
                below_bytes=self._below(),
                now_us=now_us(),
            )
            key = next((_key(each) for each in found if each.how is How.SPILL), None)
            if key is None:
                return
            kept |= {_key(each) for each in found if each.how is How.DROP}
            self._copied.clear()
            try:
                (kept if await self._copy(*key, kept=kept) else refused).add(key)
            finally:
                self._copied.set()

    # -- room --------------------------------------------------------------------------------
    async def _make_room(self, store: ImageStore | None, size: int, over: str = "") -> None:
        refused: set[_Key] = set()
        while (excess := self._excess(store, size, over)) > 0:
            if self._delete_a_free_slab(store, over):
                continue
            found = choose(
                self._images(refused).values(),
                tier=Tier.HOST,
                needed_bytes=excess,
                below_bytes=self._below(),
                now_us=now_us(),
            )
            if found:
                if not await self._evict(found[0]):
                    refused.add(_key(found[0]))
            elif not self._copied.is_set():
                await self._copied.wait()
            else:
                self._say_full(excess)
                return
        self._full_trouble = ""

    def _say_full(self, missing: int) -> None:
        """Every switch meets it again until there is room: it is said once in a while."""
        if now_us() < self._full_us + REST_US:
            return
        self._full_us = now_us()
        self._full_trouble = (
            f"images take {missing} bytes more than host_bytes, because none can leave for "
            f"nvme_dir: look at image_not_copied and the disk, or raise nvme_bytes"
        )
        used = self.nvme.used
        say(
            log, "host_tier_full", missing_bytes=missing, nvme_bytes=used, reason=self._full_trouble
        )

    def _make_spare_room(self, store: ImageStore, size: int, kept: Collection[_Key]) -> bool:
        """The same, if that takes no more than dropping what is on NVMe as well."""
        while (excess := self._excess(store, size)) > 0:
            if self._delete_a_free_slab(store):
                continue
            found = choose(
                self._images(kept).values(), tier=Tier.HOST, needed_bytes=excess, now_us=now_us()
            )
            if sum(each.bytes for each in found) < excess:
                return False
            for each in found:
                self._release(*_key(each), how=each.how)
        return True

    def _excess(self, store: ImageStore | None, size: int, over: str = "") -> int:
        there_already = store.slot_bytes(store.next_slot(over)) if store is not None else 0
        more = max(0, size - there_already)
        there = os.statvfs(self._host)
        pending = self._used() - self._on_disk()
        return max(
            self._used() + more - self._limit, more + pending - there.f_bavail * there.f_frsize
        )

    def _on_disk(self) -> int:
        slabs = sum(store.all_bytes() for store in self._stores.values())
        files = (path for each in self._snapshots for path in each.glob("*") if path.is_file())
        return slabs + contents.bytes_of(files)

    def _used(self) -> int:
        grows = (
            max(0, size - self._stores[wpg].slot_bytes(slot))
            for (wpg, slot), size in self._promised.items()
        )
        return self._on_disk() + sum(grows)

    def _delete_a_free_slab(self, store: ImageStore | None, over: str = "") -> bool:
        """Of the target's, the one that is written next stays."""
        for each in self._stores.values():
            for slot in each.free_slots():
                if store is None or each is not store or slot != store.next_slot(over):
                    each.delete(slot)
                    return True
        return False

    async def _evict(self, eviction: Eviction) -> bool:
        wpg, deployment = _key(eviction)
        store = self._stores[wpg]
        held = store.find(deployment)
        if eviction.how is How.SPILL:
            await self.prefetcher.give_way()
            if not await self._copy(wpg, deployment):
                return False
        if store.find(deployment) is held:
            self._release(wpg, deployment, how=eviction.how)
        return True

    def _release(self, wpg: str, deployment: str, *, how: How) -> None:
        store = self._stores[wpg]
        held = store.find(deployment)
        if held is not None and not store.is_pinned(held.slot):
            store.release(deployment)
            say(log, "image_left_memory", wpg=wpg, deployment=deployment, how=str(how))

    async def _copy(self, wpg: str, deployment: str, *, kept: Collection[_Key] = ()) -> bool:
        """To NVMe, if that has room or gets it; what is in memory stays there, and the copies of
        ``kept`` below."""
        store = self._stores[wpg]
        held = store.find(deployment)
        if held is None or now_us() < self._resting_us:
            return False
        if not self._make_room_below(held.bytes, kept):
            return False
        store.pin(held.slot)
        try:
            await self.nvme.write(wpg, held, store.paths(held.slot))
        except (PlexError, OSError) as problem:
            say(log, "image_not_copied", wpg=wpg, deployment=deployment, reason=str(problem))
            if isinstance(problem, BadImage):
                store.doubt(held.slot)
            else:  # the disk: say it once in a while
                self._resting_us = now_us() + REST_US
                self._disk_trouble = f"no image can be copied to nvme_dir: {problem}"
            return False
        finally:
            store.unpin(held.slot)
        self._disk_trouble = ""
        copy = self.nvme.find(wpg, deployment)
        overtaken = copy is None or copy.progress > held.progress
        if store.find(deployment) is not held and not overtaken:  # dropped or replaced meanwhile
            self.nvme.drop(wpg, deployment)
        return True

    def _below(self) -> int:
        """Bytes that NVMe has, or gets by dropping copies of what is in memory."""
        twice = sum(copy.bytes for copy in self.nvme.copies() if self.in_memory(copy))
        return self.nvme.limit - self.nvme.used + twice

    def _make_room_below(self, size: int, kept: Collection[_Key]) -> bool:
        # Those that somebody reads in memory stay there, so their copies are needed least.
        images = [replace(image, pinned=key in kept) for key, image in self._images(()).items()]
        missing = self.nvme.used + size - self.nvme.limit
        found = choose(images, tier=Tier.NVME, needed_bytes=missing, now_us=now_us())
        if sum(each.bytes for each in found) < missing:
            return False
        for each in found:
            self.nvme.drop(*_key(each))
        return self.nvme.used + size <= self.nvme.limit

    # -- what there is -----------------------------------------------------------------------
    def in_memory(self, copy: Copy) -> bool:
        """Whether memory has the same image."""
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
            next_use_us=self._next_us(key, last, gap, now),
            pinned=pinned,
        )

    def _next_us(self, key: _Key, last: int, gap: int | None, now: int) -> int | None:
        if key in self.prefetcher.kept:
            return now
        return next_use_us(last_us=last, gap_us=gap, now_us=now) if last else None


def _key(eviction: Eviction) -> _Key:
    wpg, _, deployment = eviction.id.partition("\n")
    return wpg, deployment
