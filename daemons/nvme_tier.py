"""What an agent keeps on a disk of its node: copies of images of its training WPGs."""

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadImage, Denied, PlexError, StorageFailed
from plexrl_slurm.daemons.folders import is_there, locked, refuse_foreign
from plexrl_slurm.filesystems import network_kind
from plexrl_slurm.logs import say
from plexrl_slurm.memory import disk, nvme, swap, swap_manifest
from plexrl_slurm.memory.durable import folder_of
from plexrl_slurm.memory.files import saving_errors
from plexrl_slurm.memory.images import Held

log = logging.getLogger(__name__)

#: A disk that does not give a manifest is asked so often.
_READS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A complete image on the disk."""

    wpg: str
    deployment: str
    progress: tuple[int, int]
    bytes: int
    #: Ranks that it is of.
    world: int
    folder: Path


class NvmeTier:
    """The folder of one agent; it is of use only with the host tier that it was written from."""

    def __init__(self, home: Path, *, limit: int, shared: bool) -> None:
        """``shared``: it lies beside the folders of other holds' agents."""
        self._home, self.limit, self._shared = home, limit, shared
        self._owner = ""
        self._lock: int | None = None
        self._copies: dict[tuple[str, str], Copy] = {}
        #: Copies that the disk did not let go: they take their bytes until it does.
        self._stuck: dict[Path, int] = {}
        #: Bytes that are being written.
        self._coming = 0
        self._number = 0
        #: Swap folders of deployments that are gone; a rank may use one still.
        self._doomed: set[Path] = set()
        #: Versions of swap folders that need not be read again.
        self.trust = swap_manifest.Trust()
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="nvme-sweep")

    async def own(self, owner: str) -> None:
        """Wait until no other agent uses the folder; then take over what is ``owner``'s, and
        delete everything else in it. Raises ``Denied`` where it must not lie."""
        kind = network_kind(self._home)
        if kind:
            raise Denied(
                f"nvme_dir {self._home} is on {kind}, which is not a disk of this node: name a "
                f"folder on a local file system, or leave nvme_dir out"
            )
        self._make()
        refuse_foreign(self._home, above=3 if self._shared else 1, setting="nvme_dir")
        self._lock = await locked(self._home, self._make)
        self._owner = owner
        os.environ[swap.SWAP_DIR] = str(self._swap)  # its ranks inherit it
        os.environ[swap_manifest.SWAP_WRITER] = self.trust.writer
        await asyncio.to_thread(self._adopt)

    def _make(self) -> None:
        with saving_errors(self._home):
            self._home.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def _images(self) -> Path:
        return self._home / "images"

    @property
    def _swap(self) -> Path:
        return self._home / "swap"

    def _adopt(self) -> None:
        for torn in [*self._images.glob("*/*/*/.*"), *self._home.glob(".gone-*")]:
            disk.disk.remove_tree(torn)
        for folder in sorted(self._images.glob("*/world-*/*/[0-9]*")):
            try:
                manifest = self._manifest(folder)
            except BadImage as problem:
                if nvme.unreadable(problem):  # another agent may have luck
                    say(log, "image_unreadable", reason=str(problem))
                else:
                    disk.disk.remove_tree(folder)
                continue
            found = Copy(
                wpg=folder.parents[2].name,
                deployment=manifest.deployment,
                progress=manifest.progress,
                bytes=manifest.bytes,
                world=len(manifest.files),
                folder=folder,
            )
            older = self._copies.get((found.wpg, found.deployment))
            if older is not None:  # they are sorted by progress, and of one world in the end
                self.drop(found.wpg, found.deployment)
            self._copies[found.wpg, found.deployment] = found

    def _manifest(self, folder: Path) -> nvme.Manifest:
        for left in reversed(range(_READS)):
            try:
                return nvme.read_manifest(folder, owner=self._owner)
            except BadImage as problem:
                if not left or not nvme.unreadable(problem):
                    raise
        raise AssertionError("the last one returns or raises")

    # -- copies ------------------------------------------------------------------------------
    @property
    def used(self) -> int:
        """Bytes of complete copies, of those that are being written, and of swap folders."""
        swapped = swap.used_bytes(self._swap)
        stuck = sum(self._stuck.values())
        return self._coming + swapped + stuck + sum(copy.bytes for copy in self._copies.values())

    def copies(self) -> Iterable[Copy]:
        """All complete ones."""
        return self._copies.values()

    def find(self, wpg: str, deployment: str) -> Copy | None:
        """The copy of a deployment's image."""
        return self._copies.get((wpg, deployment))

    async def write(self, wpg: str, held: Held, slabs: Sequence[Path]) -> None:
        """Copy an image, which nobody may write meanwhile; it replaces an older copy.

        Raises ``BadImage``, ``StorageFull`` and ``StorageFailed``.
        """
        if self._lock is not None and not is_there(self._lock, self._home):
            raise StorageFailed(str(self._home), "the folder was deleted or unmounted")
        world = f"world-{len(slabs)}"
        folder = folder_of(self._images / wpg / world, held.deployment, held.progress)
        self._coming += held.bytes
        try:
            manifest = await asyncio.to_thread(nvme.write_image, folder, slabs, owner=self._owner)
        except PlexError:
            old = self.find(wpg, held.deployment)
            if (old is None or old.folder != folder) and folder.exists():
                self._delete(folder, held.bytes)  # all of it is there, and may not last
            raise
        finally:
            self._coming -= held.bytes
        self._stuck.pop(folder, None)  # it has taken the place of that
        other = self.find(wpg, held.deployment)
        if other is not None and other.progress > held.progress:
            self._delete(folder, manifest.bytes)
            return
        if other is not None and other.folder != folder:
            self.drop(wpg, held.deployment)
        self._copies[wpg, held.deployment] = Copy(
            wpg=wpg,
            deployment=held.deployment,
            progress=held.progress,
            bytes=manifest.bytes,
            world=len(slabs),
            folder=folder,
        )

    async def read(
        self, copy: Copy, slabs: Sequence[Path], *, gate: nvme.Gate | None = None
    ) -> None:
        """Copy an image into slabs. Raises ``BadImage``, ``StorageFull`` and ``Abandoned``."""
        await asyncio.to_thread(nvme.read_image, copy.folder, slabs, owner=self._owner, gate=gate)

    async def check(self, copy: Copy, *, gate: nvme.Gate) -> None:
        """Read all of it. Raises ``BadImage`` and ``Abandoned``."""
        await asyncio.to_thread(nvme.check_image, copy.folder, owner=self._owner, gate=gate)

    def drop(self, wpg: str, deployment: str) -> None:
        """Forget a copy, at once; its blocks are given back soon."""
        copy = self._copies.pop((wpg, deployment), None)
        if copy is not None:
            self._delete(copy.folder, copy.bytes)

    def _delete(self, folder: Path, size: int) -> None:
        for each in (*self._stuck, folder):
            gone = self._gone()
            try:
                disk.disk.rename(each, gone)
            except FileNotFoundError:
                self._stuck.pop(each, None)
            except OSError as error:
                if each is folder:
                    # Else the next agent finds that it is not the newest, or that nobody wants it.
                    self._stuck[folder] = size
                    say(log, "copy_not_deleted", folder=folder, reason=error.strerror)
            else:
                self._stuck.pop(each, None)
                self._sweeper.submit(disk.disk.remove_tree, gone)

    def _gone(self) -> Path:
        self._number += 1
        return self._home / f".gone-{os.getpid()}-{self._number}"

    def keep_only(self, deployments: Iterable[str]) -> None:
        """Drop every copy of a deployment that is not named."""
        wanted = set(deployments)
        names = {swap.home_of(self._swap, "", deployment).name for deployment in wanted}
        self._doomed |= {home for home in self._swap.glob("*/[!.]*") if home.name not in names}
        self.sweep_swap()
        for wpg, deployment in [each for each in self._copies if each[1] not in wanted]:
            self.drop(wpg, deployment)

    # -- swap folders ------------------------------------------------------------------------
    def swap_folder(self, wpg: str, deployment: str) -> Path:
        """Where ranks keep the part of a deployment's state that is in no image."""
        return swap.home_of(self._swap, wpg, deployment)

    def came_back(self, copy: Copy) -> None:
        """It is in memory again, and its swap folder lay as long as it did."""
        self.trust.doubt(self.swap_folder(copy.wpg, copy.deployment))

    def drop_swap(self, wpg: str, deployment: str) -> None:
        """Delete a deployment's swap folder as soon as no rank uses it."""
        self._doomed.add(self.swap_folder(wpg, deployment))
        self.sweep_swap()

    def returns(self, deployment: str) -> None:
        """A deployment that was dropped lives here again."""
        name = self.swap_folder("", deployment).name
        self._doomed = {home for home in self._doomed if home.name != name}

    def sweep_swap(self) -> None:
        """Try again what ranks had in use."""
        for home in sorted(self._doomed):
            gone = self._gone()
            if swap.set_aside(home, gone):
                self._doomed.discard(home)
                self._sweeper.submit(disk.disk.remove_tree, gone)

    def clear(self) -> None:
        """The hold is given back."""
        self._sweeper.shutdown(wait=True)
        disk.disk.remove_tree(self._home)
