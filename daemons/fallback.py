"""Which image comes in when the newest one is damaged, gone or unreadable: the next older one.

A copy in a tier of the node that turns out bad is dropped; a durable one is set aside, under
another name, for whoever wants to look at it. So nothing good is touched, and what is believed
next time is what is there.
"""

import asyncio
import errno
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.fence import Token
from plexrl_slurm.memory.images import Held, ImageStore
from plexrl_slurm.memory.slab import read_header
from plexrl_slurm.memory.swap import VERSION, check_version
from plexrl_slurm.memory.swap_manifest import Trust
from plexrl_slurm.transport import messages as tm

Progress: TypeAlias = tuple[int, int]
_T = TypeVar("_T")

#: What a disk says of a file that it will not give again; anything else may pass.
_FINAL: Final = frozenset(
    {errno.ENOENT, errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.ENOTDIR}
)
#: Before a bad image is read once more.
_AGAIN_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A durable image."""

    progress: Progress
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest image that is whole."""

    #: ``None``: there is none.
    held: Held | None
    #: The newest durable image that was not found to be bad.
    durable: Progress | None
    #: What is wrong with newer ones, a sentence each.
    damaged: Sequence[str]

    @property
    def left(self) -> tm.ImagesLeft:
        """What the daemon is told: it may believe in another one."""
        progress = self.held.progress if self.held is not None else None
        return tm.ImagesLeft(image=progress, durable=self.durable, damaged=list(self.damaged))


async def search(
    *,
    here: Callable[[], Progress | None],
    bring: Callable[[], Awaitable[Held | None]],
    discard: Callable[[], None],
    kept: Kept | None,
    load: Callable[[Kept], Awaitable[Held]],
) -> Found:
    """The newest image of a deployment, of those on the node and the durable ones.

    ``here``: progress of the newest on the node, ``bring`` has it in memory, ``discard`` forgets
    the copy that ``bring`` failed with. Raises ``BadImage`` if it cannot be read now, and
    ``StorageFull``.
    """
    damaged: list[str] = []
    while True:
        newest = here()
        try:
            if kept is None or (newest is not None and newest >= kept.progress):
                held = await bring()
            else:
                held = await twice(functools.partial(load, kept))
        except BadImage as problem:
            if kept is None or (newest is not None and newest >= kept.progress):
                discard()
            else:
                kept = await asyncio.to_thread(_next, kept, problem)
            damaged.append(str(problem))
        else:
            return Found(
                held=held, durable=kept.progress if kept is not None else None, damaged=damaged
            )


async def twice(load: Callable[[], Awaitable[_T]]) -> _T:
    """A durable image that cannot be read is read once more."""
    try:
        return await load()
    except BadImage:
        await asyncio.sleep(_AGAIN_S)
        return await load()


def may_pass(problem: BadImage, folder: Path) -> bool:
    """Whether a durable image that could not be read may be whole all the same."""
    cause = problem.__cause__
    passes = isinstance(cause, OSError) and cause.errno not in _FINAL
    return passes or not folder.parent.parent.is_dir()  # the file system itself is not there


def _next(bad: Kept, problem: BadImage) -> Kept | None:
    """Set the bad one aside; the next older durable image."""
    if may_pass(problem, bad.folder):
        raise problem
    try:
        durable.set_aside(bad.folder)
    except OSError:
        raise problem from None
    return newest_below(bad.folder.parent, bad.progress)


def newest_below(home: Path, progress: Progress) -> Kept | None:
    """The newest durable image of a deployment that is older than ``progress``."""
    for folder in durable.folders_of(home):
        at = durable.progress_of(folder)
        if at < progress:
            try:
                durable.read_manifest(folder)
            except BadImage:
                continue
            return Kept(progress=at, folder=folder)
    return None


async def check_bringing(
    store: ImageStore, held: Held, *, swap: Path | None, trust: Trust | None
) -> None:
    """:func:`check_held`, which may have a disk to read."""
    slabs = store.paths(held.slot)
    if not any(VERSION in read_header(slab).state for slab in slabs):
        check_held(held, slabs)
        return
    store.pin(held.slot)
    try:
        await asyncio.to_thread(check_held, held, slabs, swap=swap, trust=trust)
    finally:
        store.unpin(held.slot)


async def copy_held(
    store: ImageStore,
    held: Held,
    folder: Path,
    *,
    writer: str,
    order: Token,
    swap: Path | None,
    trust: Trust | None,
) -> None:
    """Into the durable tier. ``BadImage``: the next use finds it too."""
    store.pin(held.slot)
    try:
        slabs = store.paths(held.slot)
        await asyncio.to_thread(
            durable.write_image, folder, slabs, writer=writer, order=order, swap=swap
        )
    except BadImage:
        if swap is not None and trust is not None:
            trust.doubt(swap)
        raise
    finally:
        store.unpin(held.slot)


def is_swapped(store: ImageStore, held: Held) -> bool:
    """Whether what is wrong with an image may be in its swap folder, and so in all its copies."""
    try:
        return any(VERSION in read_header(slab).state for slab in store.paths(held.slot))
    except BadImage:
        return False


def check_held(
    held: Held, slabs: Sequence[Path], *, swap: Path | None = None, trust: Trust | None = None
) -> None:
    """Raises ``BadImage`` if what is in memory is not the image that it was, or the part of it in
    the deployment's swap folder, ``swap``, is gone or, as far as ``trust`` does not reach, was
    changed."""
    for rank, slab in enumerate(slabs):
        header = read_header(slab)
        if (header.deployment, tuple(header.progress)) != (held.deployment, held.progress):
            raise BadImage(str(slab), f"is no longer the image of {held.deployment}")
        if swap is not None:
            check_version(swap, rank=rank, world=len(slabs), state=header.state, trust=trust)
    if swap is not None and trust is not None:
        trust.settle(swap)
