"""Snapshots on a node: those published here, those fetched from other nodes, and copies that all
nodes see, made in the background, for the case that this node is lost."""

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from plexrl_slurm.logs import say
from plexrl_slurm.memory import contents
from plexrl_slurm.memory.files import part_name, storage_errors
from plexrl_slurm.memory.kept_maps import KeptMaps
from plexrl_slurm.memory.partial import forget_partial, nobody_has
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

#: Beside a folder of published snapshots; whoever can read it sees the same memory.
_TOKEN: Final = "snapshots.token"
#: Memory of a fetched snapshot that was dropped: the next one is received into its pages.
_SPARE: Final = ".spare"
_SUFFIX: Final = ".safetensors"
#: A snapshot that cannot be copied may come to another node in this time.
_ELSEWHERE_S: Final = 30.0


class SnapshotStore:
    """The files; who fetches and gives them is ``SnapshotLinks``."""

    def __init__(self, host: Path, *, shared: Path | None, writer: str) -> None:
        """``shared``: a folder that all agents see, or ``None``: this node is all there is."""
        self.published, self.fetched = host / "snapshots", host / "fetched"
        self._shared, self._writer = shared, writer
        #: Of files that were fetched.
        self.maps = KeptMaps()
        #: Secret of this folder; "" before :meth:`own`.
        self.token = ""
        self._publishing: set[str] = set()
        #: Of those: set when another node has it.
        self._elsewhere: dict[str, asyncio.Event] = {}
        #: Dropped while they were being published.
        self._dropped: set[str] = set()
        #: Being loaded by a rank: how often.
        self._read: dict[str, int] = {}
        #: Copies to the shared folder.
        self._copying: dict[str, asyncio.Task[None]] = {}

    def make(self) -> None:
        """The folders."""
        for folder in (self.published, self.fetched):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def own(self) -> None:
        """Nobody else uses the folders now: tidy up. What was half fetched stays."""
        for torn in self.published.glob(".*.part"):
            torn.unlink(missing_ok=True)
        self.spare.unlink(missing_ok=True)
        path = self.published.with_name(_TOKEN)
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(16))
        self.token = path.read_text()

    @property
    def alone(self) -> bool:
        """This node is all there is."""
        return self._shared is None

    @property
    def folders(self) -> tuple[Path, Path]:
        """Whose bytes count in the host tier."""
        return self.published, self.fetched

    # -- names -------------------------------------------------------------------------------
    def path(self, name: str) -> Path:
        """Where it is published."""
        return self.published / f"{name}{_SUFFIX}"

    def fetched_path(self, name: str) -> Path:
        """Where it comes if it was published on another node."""
        return self.fetched / f"{name}{_SUFFIX}"

    def shared_path(self, name: str) -> Path | None:
        """Its copy that all nodes see."""
        return None if self._shared is None else self._shared / f"{name}{_SUFFIX}"

    @property
    def spare(self) -> Path:
        """See :class:`plexrl_slurm.memory.partial.PartialFile`."""
        return self.fetched / _SPARE

    def names(self) -> list[str]:
        """Of all that were published here."""
        return [path.stem for path in self.published.glob(f"*{_SUFFIX}")]

    def fetched_names(self) -> list[str]:
        """Of all that were fetched."""
        return [path.stem for path in self.fetched.glob(f"*{_SUFFIX}")]

    def find_published(self, name: str) -> Path | None:
        """For whoever fetches it; a name from elsewhere is only looked up, never joined."""
        return self.path(name) if name in self.names() else None

    def find(self, name: str, sources: Iterable[tm.SnapshotSource]) -> Path | None:
        """A complete file in this node's memory: here, or with another agent of the node."""
        for path in (self.path(name), self.fetched_path(name)):
            if path.exists():
                return path
        for source in sources:
            path = Path(source.folder) / f"{name}{_SUFFIX}"
            if self._sees(source) and path.exists():
                return path
        return None

    def _sees(self, source: tm.SnapshotSource) -> bool:
        """Proved by its secret: nodes may have equal names, and folders equal paths."""
        if not source.folder or not source.token:
            return False
        try:
            return Path(source.folder).with_name(_TOKEN).read_text() == source.token
        except OSError:
            return False

    def find_shared(self, name: str) -> Path | None:
        """The copy that all nodes see, if it is complete."""
        path = self.shared_path(name)
        return path if path is not None and path.exists() else None

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """A rank reads it: its memory is not given to another."""
        self._read[name] = self._read.get(name, 0) + 1
        try:
            yield
        finally:
            self._read[name] -= 1
            if not self._read[name]:
                del self._read[name]

    # -- publishing --------------------------------------------------------------------------
    def publishing(self, name: str) -> None:
        """It is being written from now on."""
        self._publishing.add(name)
        self._dropped.discard(name)
        self._elsewhere[name] = asyncio.Event()

    def published_or_not(self, name: str) -> None:
        """It is written and safe, or will not be."""
        self._publishing.discard(name)
        self._elsewhere.pop(name, None)
        if name in self._dropped:
            self._dropped.discard(name)
            self._delete(name)

    def is_elsewhere(self, name: str) -> None:
        """Another node has it too."""
        if (event := self._elsewhere.get(name)) is not None:
            event.set()

    async def made_safe(self, name: str) -> None:
        """Until the loss of this node would not lose it: another node has it, or the shared folder.

        Raises ``StorageFull`` and ``OSError`` if that cannot be had.
        """
        if self._shared is None:
            return
        copy = self._copy_behind(name)
        elsewhere = asyncio.create_task(self._elsewhere[name].wait())
        try:
            await asyncio.wait([copy, elsewhere], return_when=asyncio.FIRST_COMPLETED)
            if not elsewhere.done() and copy.exception() is not None:
                await asyncio.wait([elsewhere], timeout=_ELSEWHERE_S)
            if not elsewhere.done():
                copy.result()
        finally:
            elsewhere.cancel()

    # -- copies that all nodes see -----------------------------------------------------------
    def _copy_behind(self, name: str) -> "asyncio.Task[None]":
        if name not in self._copying:
            task = self._copying[name] = asyncio.create_task(self._copy(name))
            task.add_done_callback(lambda ended: self._copied(name, ended))
        return self._copying[name]

    def _copied(self, name: str, task: "asyncio.Task[None]") -> None:
        self._copying.pop(name, None)
        if not task.cancelled() and (problem := task.exception()) is not None:
            say(log, "snapshot_not_copied", snapshot=name, reason=problem)

    async def _copy(self, name: str) -> None:
        target, source = self.shared_path(name), self.find(name, ())
        if target is None or source is None or await asyncio.to_thread(target.exists):
            return
        try:
            await asyncio.to_thread(_copy_file, source, target, self._writer)
        except FileNotFoundError:
            if source.exists():
                raise
        if not source.exists():  # it was dropped meanwhile, and the daemon has deleted the copy
            target.unlink(missing_ok=True)

    async def settle(self, *, seconds: float) -> None:
        """Have everything in the shared folder, as far as that can be done in this time."""
        if self._shared is None:
            return
        copies = [self._copy_behind(name) for name in {*self.names(), *self.fetched_names()}]
        if copies:
            await asyncio.wait(copies, timeout=seconds)

    # -- garbage -----------------------------------------------------------------------------
    def keep_only(self, names: Iterable[str]) -> None:
        """Everything else is garbage; in the shared folder that is the daemon's to say."""
        wanted = set(names)
        for name in self.names():
            if name not in wanted:
                self.path(name).unlink(missing_ok=True)
        for path in self.fetched.iterdir():
            name = path.name.removeprefix(".").partition(_SUFFIX)[0]
            if path != self.spare and name not in wanted:
                path.unlink(missing_ok=True)
        contents.forget(self.published)
        self.maps.prune()

    def drop(self, name: str) -> None:
        """Nobody samples from it any more."""
        if name in self._publishing:
            self._dropped.add(name)
        self._delete(name)

    def _delete(self, name: str) -> None:
        path = self.path(name)
        path.unlink(missing_ok=True)
        part_name(path, self._writer).unlink(missing_ok=True)
        for part in path.parent.glob(f".{path.name}.{self._writer}.*.part"):
            part.unlink(missing_ok=True)
        contents.forget(self.published)
        fetched = self.fetched_path(name)
        forget_partial(fetched)
        if name not in self._read and not self.spare.exists() and nobody_has(fetched, self.maps):
            fetched.rename(self.spare)
        else:
            fetched.unlink(missing_ok=True)
        self.maps.prune()


def _copy_file(source: Path, target: Path, writer: str) -> None:
    part = part_name(target, writer)
    try:
        size = source.stat().st_size
        with storage_errors(target.parent, size):
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copyfile(source, part)
            part.chmod(0o600)
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
