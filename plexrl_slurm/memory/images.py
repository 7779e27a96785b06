"""Which slab holds which image: the agent's half of the host tier of one training WPG.

An image is written into a slot that holds nothing valuable, and becomes *the* image of its
deployment only when every rank has finished; then the older one's slot is free again. So k
deployments need k + 1 slots (one more while an image is copied to the durable tier), and at
every instant each has a complete image or none yet.

Where a durable image, and the calls since, could take the older one's place, the newer may be
written *over* it, and k slots do.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import disk, sums
from plexrl_slurm.memory.slab import PRELUDE_BYTES, put_prelude, read_header, unmarked


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A complete image."""

    deployment: str
    progress: tuple[int, int]
    slot: int
    bytes: int


class ImageStore:
    """Slots of one WPG. Not thread-safe; one agent owns it."""

    #: Whether an image of which all is here is complete.
    whole_here: ClassVar[bool] = True

    def __init__(self, folder: Path, *, world: int) -> None:
        self._folder, self._world = folder, world
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._held: dict[str, Held] = {}
        self._writing: set[int] = set()
        #: Slots whose image an earlier agent left, or somebody found to be damaged.
        self._doubted: set[int] = set()
        #: Images that are being written over, by slot.
        self._under: dict[int, Held] = {}
        #: Slots that somebody reads, and how many do.
        self._pinned: dict[int, int] = {}
        for slot in self._slots_on_disk():
            self._adopt(slot)

    @property
    def world(self) -> int:
        """Ranks that each image is of."""
        return self._world

    def held(self) -> Iterable[Held]:
        """All complete images."""
        return self._held.values()

    def find(self, deployment: str) -> Held | None:
        """The complete image of ``deployment``."""
        return self._held.get(deployment)

    def paths(self, slot: int) -> list[Path]:
        """One slab for each rank."""
        return [self._folder / f"slot-{slot}.rank-{rank}" for rank in range(self._world)]

    def under(self) -> Iterable[Held]:
        """Images that are being written over."""
        return self._under.values()

    def is_under(self, deployment: str) -> bool:
        """Whether its image is being written over: a newer one, or the same, will be there."""
        return any(held.deployment == deployment for held in self._under.values())

    def begin(self, over: str = "") -> int:
        """A slot to write into; ends in :meth:`commit` or :meth:`abandon`.

        ``over``: a deployment whose image something else can replace, and which is written.
        """
        slot = self.next_slot(over)
        held = self._held.get(over)
        if held is not None and held.slot == slot:
            self._under[slot] = self._held.pop(over)
        self._writing.add(slot)
        self._forget_sums(slot)
        self._doubted.discard(slot)
        return slot

    def next_slot(self, over: str = "") -> int:
        """What :meth:`begin` would give: a slab that is warm, if there is one."""
        held = self._held.get(over)
        if held is not None and held.slot not in self._pinned:
            return held.slot
        free = self.free_slots()
        if free:
            return free[0]
        taken = self._taken()
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def pin(self, slot: int) -> None:
        """Nobody may write into ``slot`` until :meth:`unpin`, whatever becomes of its image."""
        self._pinned[slot] = self._pinned.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """One reader less."""
        self._pinned[slot] -= 1
        if not self._pinned[slot]:
            del self._pinned[slot]

    def is_pinned(self, slot: int) -> bool:
        """Whether somebody reads it."""
        return slot in self._pinned

    def free_slots(self) -> list[int]:
        """Slabs that hold nothing valuable, and that nobody reads or writes."""
        taken = self._taken()
        return [slot for slot in self._slots_on_disk() if slot not in taken]

    def slot_bytes(self, slot: int) -> int:
        """Bytes that a slot takes now, valuable or not."""
        return sum(path.stat().st_size for path in self.paths(slot) if path.exists())

    def free_bytes(self) -> int:
        """Bytes of all free slabs."""
        return sum(self.slot_bytes(slot) for slot in self.free_slots())

    def all_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(self.slot_bytes(slot) for slot in self._slots_on_disk())

    def delete(self, slot: int) -> None:
        """Give back the memory of a free slot, which ranks may still have mapped."""
        self._forget_sums(slot)
        for path in self.paths(slot):
            if path.exists():
                disk.disk.truncate(path)
                disk.disk.remove(path)

    def release(self, deployment: str) -> None:
        """Forget an image that is complete elsewhere; its slab is free for the next one."""
        self._wipe(self._held.pop(deployment).slot)

    def _wipe(self, slot: int) -> None:
        """An agent that starts again must not take what is there for an image.

        Its checksums go last: without them it would be believed.
        """
        for path in self.paths(slot):
            with suppress(FileNotFoundError):
                with path.open("rb") as file:
                    prelude = file.read(PRELUDE_BYTES)
                if len(prelude) == PRELUDE_BYTES:  # else it is none already
                    put_prelude(path, unmarked(prelude))
        self._forget_sums(slot)

    def forget(self, deployment: str) -> None:
        """Its slab turned out to be damaged, and is free."""
        held = self._held.pop(deployment, None)
        if held is not None:
            self._wipe(held.slot)

    # -- checksums ---------------------------------------------------------------------------
    def every(self) -> Iterable[Held]:
        """All images of which all is here, whether they count or not."""
        return self._held.values()

    def holds(self, held: Held) -> bool:
        """Whether an image is here still."""
        return any(each is held for each in self.every())

    def is_summed(self, slot: int) -> bool:
        """Whether there are checksums of all slabs of a slot."""
        return all(sums.path_of(path).exists() for path in self.paths(slot))

    def is_doubted(self, slot: int) -> bool:
        """Whether its image is to be checked before it is used."""
        return slot in self._doubted

    def doubt(self, slot: int) -> None:
        """Somebody found its image to be damaged."""
        self._doubted.add(slot)

    def believe(self, slot: int) -> None:
        """It was checked."""
        self._doubted.discard(slot)

    def _forget_sums(self, slot: int) -> None:
        for path in self.paths(slot):
            sums.drop(path)

    def _taken(self) -> set[int]:
        return {held.slot for held in self._held.values()} | self._writing | self._pinned.keys()

    def commit(self, slot: int, *, deployment: str, progress: tuple[int, int]) -> None:
        """Every rank has finished writing ``slot``: it is the image now, unless a newer one has
        become it meanwhile."""
        self._writing.discard(slot)
        self._under.pop(slot, None)
        held = self._held.get(deployment)
        if held is not None and held.progress > progress:
            return
        size = sum(path.stat().st_size for path in self.paths(slot))
        self._held[deployment] = Held(
            deployment=deployment, progress=progress, slot=slot, bytes=size
        )

    def abandon(self, slot: int) -> None:
        """The write failed; the older image stays valid, unless it was begun to be written over."""
        self._writing.discard(slot)
        older = self._under.pop(slot, None)
        if older is not None and self._is_whole(older):
            self._held.setdefault(older.deployment, older)

    def trim(self) -> int:
        """Give back all free slabs; how many bytes they had."""
        free = self.free_slots()
        size = sum(self.slot_bytes(slot) for slot in free)
        for slot in free:
            self.delete(slot)
        return size

    def _is_whole(self, held: Held) -> bool:
        """Whether its slabs still are what they were."""
        try:
            headers = [read_header(path) for path in self.paths(held.slot)]
        except (BadImage, OSError):
            return False
        same = held.deployment, held.progress
        return all((header.deployment, tuple(header.progress)) == same for header in headers)

    def drop(self, deployment: str) -> None:
        """Forget an image; its slab stays warm for the next one unless another is free."""
        self._held.pop(deployment, None)
        self._under = {
            at: held for at, held in self._under.items() if held.deployment != deployment
        }
        for slot in self.free_slots()[1:]:
            self.delete(slot)

    def keep_only(self, deployments: Iterable[str]) -> None:
        """Drop every image of a deployment that is not named."""
        for gone in set(self._held) - set(deployments):
            self.drop(gone)

    def _slots_on_disk(self) -> list[int]:
        names = (path.name for path in self._folder.glob("slot-*.rank-*"))
        return sorted({int(name.split(".")[0].removeprefix("slot-")) for name in names})

    def _adopt(self, slot: int) -> None:
        """Take over what an earlier agent left, if all its ranks agree on what it is."""
        try:
            headers = [read_header(path) for path in self.paths(slot)]
        except (BadImage, OSError):
            return
        first = headers[0]
        if any(
            (header.deployment, tuple(header.progress), header.world)
            != (first.deployment, tuple(first.progress), self._world)
            for header in headers
        ):
            return
        seq, part = first.progress
        older = self._held.get(first.deployment)
        if older is None or older.progress < (seq, part):
            self._doubted.add(slot)
            self._held[first.deployment] = Held(
                deployment=first.deployment,
                progress=(seq, part),
                slot=slot,
                bytes=sum(path.stat().st_size for path in self.paths(slot)),
            )
