"""An agent's host tier: images of its training WPGs, snapshots, and the way to the durable tier."""

import asyncio
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from plexrl_slurm.core.errors import BadImage, Denied, StorageFull
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.files import part_name
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.transport import messages as tm

_LOCK = "agent.lock"


class HostTier:
    """Folders of one agent; made at its start, with what an earlier agent left in them."""

    def __init__(self, host: Path, *, snapshots: Path | None, writer: str) -> None:
        """``snapshots``: a folder that all agents share, or ``None`` for one of its own;
        ``writer`` names the agent in what it writes to the durable tier."""
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

    async def own(self) -> None:
        """Wait until no other agent uses these folders; then tidy up.

        Raises ``Denied`` if others can change what is in them.
        """
        self._refuse_foreign()
        while self._lock is None:
            self._make()
            descriptor = os.open(self._host / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, self._host / _LOCK):
                    self._lock = descriptor
            except BlockingIOError:
                await asyncio.sleep(0.2)
            finally:
                if self._lock is None:
                    os.close(descriptor)
        if not self._shared:
            for torn in self.snapshots.glob(".*.part"):
                torn.unlink(missing_ok=True)

    def _make(self) -> None:
        """Again, if need be: another hold's agent may have taken them for left over."""
        self.snapshots.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._host.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _refuse_foreign(self) -> None:
        """The folder, and those above it that agents make: on a tmpfs anybody may be first."""
        above = 3 if self._shared else 1
        for folder in (self._host, *self._host.parents[:above]):
            found = folder.stat()
            sticky = found.st_mode & stat.S_ISVTX
            if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o002 and not sticky):
                raise Denied(
                    f"{folder} can be changed by other users (owner {found.st_uid}, mode "
                    f"{found.st_mode & 0o7777:o}): remove it, or name another host_dir"
                )

    def clear(self) -> None:
        """The hold is given back."""
        shutil.rmtree(self._host, ignore_errors=True)

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
        """All complete images."""
        return [
            tm.ImageHeld(
                wpg=name, deployment=held.deployment, progress=held.progress, bytes=held.bytes
            )
            for name, store in self.all_stores().items()
            for held in store.held()
        ]

    async def fetch(self, order: tm.SwitchOrder) -> Held | None:
        """The image that a switch brings in, from the durable tier if there is no newer here.

        Raises ``BadImage`` and ``StorageFull``.
        """
        store = self._stores[order.wpg]
        held = store.find(order.incoming)
        if not order.durable_path:
            return held
        if held is not None and held.progress >= order.durable_progress:
            return held
        slot = store.begin()
        try:
            try:
                manifest = await asyncio.to_thread(
                    durable.read_image, Path(order.durable_path), store.paths(slot)
                )
            except StorageFull:
                raise
            except OSError as error:
                why = f"cannot be read ({error.strerror})"
                raise BadImage(order.durable_path, why) from error
            if manifest.deployment != order.incoming:
                raise BadImage(order.durable_path, f"is of deployment {manifest.deployment}")
        except BaseException:
            store.abandon(slot)
            raise
        store.commit(slot, deployment=order.incoming, progress=manifest.progress)
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
        held = store.find(order.deployment)
        if held is None:
            raise BadImage(order.deployment, "has no complete image on this node")
        root = Path(order.folder)
        folder = durable.folder_of(root, order.deployment, held.progress)
        store.pin(held.slot)
        try:
            await asyncio.to_thread(
                durable.write_image, folder, store.paths(held.slot), writer=self.writer
            )
            if order.known is not None:
                await asyncio.to_thread(durable.keep_newest, root, order.deployment, order.known)
        finally:
            store.unpin(held.slot)
        return held

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
        if self._shared:
            return
        wanted = set(snapshots)
        for path in self.snapshots.glob("*.safetensors"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)

    def drop(self, order: tm.DropOrder) -> None:
        """Delete images and snapshots."""
        self._dropped.update(order.deployments, order.snapshots)
        for deployment in order.deployments:
            for store in self._stores.values():
                store.drop(deployment)
        for snapshot in order.snapshots:
            self._delete_snapshot(snapshot)

    def drop_again(self, *, quiet: bool) -> None:
        """What was under way when it was dropped may have been written since; ``quiet``: nothing
        is under way now."""
        for store in self._stores.values():
            for held in [held for held in store.held() if held.deployment in self._dropped]:
                store.drop(held.deployment)
        if quiet and not self._publishing:
            self._dropped.clear()

    def returns(self, deployment: str) -> None:
        """A deployment that was dropped here lives here again."""
        self._dropped.discard(deployment)

    def _delete_snapshot(self, snapshot: str) -> None:
        path = self.snapshot(snapshot)
        path.unlink(missing_ok=True)
        part_name(path, self.writer).unlink(missing_ok=True)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file has not been deleted since it was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def tidy_siblings(host: Path, *, say: Callable[[str], None]) -> None:
    """Delete the folders of other holds' agents beside ``host`` that no agent uses any more."""
    for folder in host.parent.iterdir() if host.parent.is_dir() else ():
        if folder == host or not (folder / _LOCK).is_file():
            continue
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            say(str(folder))
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
