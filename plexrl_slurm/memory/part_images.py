"""One node's share of the images of a WPG that lies on several nodes.

What this node has written whole need not be whole elsewhere. So an image that was written is only
*prepared*, beside the older one; it becomes the image of its deployment, and the older one's
slot is free again, when the daemon says that every node has it (:meth:`PartImages.settle`).
Whatever dies between, at least one image stays that every node has.
"""

from collections.abc import Iterable
from pathlib import Path

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.memory.slab import SlabHeader, read_header


class PartImages(ImageStore):
    """Slots of one WPG on one of its nodes."""

    whole_here = False

    def __init__(self, folder: Path, *, world: int, ranks: range) -> None:
        """``world``: of all nodes; ``ranks``: those of this one."""
        #: Of this node.
        self.ranks = ranks
        #: Ranks on all nodes.
        self.whole = world
        #: Written here, by deployment and progress.
        self._prepared: dict[tuple[str, tuple[int, int]], Held] = {}
        super().__init__(folder, world=len(ranks))

    def paths(self, slot: int) -> list[Path]:
        return [self._folder / f"slot-{slot}.rank-{rank}" for rank in self.ranks]

    def every(self) -> Iterable[Held]:
        """All images that are complete on this node, whatever the others have."""
        return [*self._held.values(), *self._prepared.values()]

    def find_at(self, deployment: str, progress: tuple[int, int]) -> Held | None:
        """The image of a deployment with just this progress."""
        held = self._held.get(deployment)
        if held is not None and held.progress == progress:
            return held
        return self._prepared.get((deployment, progress))

    def forget_at(self, deployment: str, progress: tuple[int, int]) -> None:
        """The slab of just this image turned out to be damaged, and is free."""
        held = self._held.get(deployment)
        if held is not None and held.progress == progress:
            self.forget(deployment)
        prepared = self._prepared.pop((deployment, progress), None)
        if prepared is not None:
            self._wipe(prepared.slot)

    def prepare(self, slot: int, *, deployment: str, progress: tuple[int, int]) -> None:
        """Every rank of this node has finished writing ``slot``."""
        self._writing.discard(slot)
        size = sum(path.stat().st_size for path in self.paths(slot))
        self._prepared[deployment, progress] = Held(
            deployment=deployment, progress=progress, slot=slot, bytes=size
        )

    def settle(self, deployment: str, progress: tuple[int, int] | None) -> bool:
        """Every node has the image with ``progress``; whether it is in memory here."""
        mine = [key for key in self._prepared if key[0] == deployment]
        found = {key[1]: self._prepared.pop(key) for key in mine}
        held = self._held.get(deployment)
        if held is not None and held.progress != progress:
            del self._held[deployment]
        if progress is not None and progress in found:
            self._held[deployment] = found[progress]
        return deployment in self._held

    def drop(self, deployment: str) -> None:
        for key in [key for key in self._prepared if key[0] == deployment]:
            del self._prepared[key]
        super().drop(deployment)

    def keep_only(self, deployments: Iterable[str]) -> None:
        super().keep_only(deployments)
        for gone in {key[0] for key in self._prepared} - set(deployments):
            self.drop(gone)

    def _taken(self) -> set[int]:
        return super()._taken() | {held.slot for held in self._prepared.values()}

    def _slots_on_disk(self) -> list[int]:
        names = (path.name for path in self._folder.glob(f"slot-*.rank-{self.ranks.start}"))
        return sorted(int(name.split(".")[0].removeprefix("slot-")) for name in names)

    def _adopt(self, slot: int) -> None:
        """What an earlier agent left: only the daemon knows which of it every node has."""
        try:
            headers = [read_header(path) for path in self.paths(slot)]
        except (BadImage, OSError):
            return
        first = headers[0]
        if any(
            (each.deployment, each.progress, each.rank, each.world)
            != (first.deployment, first.progress, rank, self.whole)
            for each, rank in zip(headers, self.ranks, strict=True)
        ):
            return
        self.prepare(slot, deployment=first.deployment, progress=_position(first))
        self._doubted.add(slot)


def _position(header: SlabHeader) -> tuple[int, int]:
    seq, part = header.progress
    return seq, part
