"""Images on a disk of the node: as fast as the disk, checked block by block when they come back.

A folder has a file for each rank, the slab as it is, and a manifest, which is written last; it
is complete or it is not there. Blocks go to the disk (O_DIRECT) and come back several at a time,
and by way of a buffer in large pages: to map the slab's own small ones, and to give them to the
disk one by one, costs more than the copy. Where O_DIRECT is refused they go through the page
cache. An image belongs to one owner, a token that lives as long as the host tier above it.
"""

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage, PlexError, StorageFailed
from plexrl_slurm.memory import disk, manifests, sums
from plexrl_slurm.memory.files import publish_folder, storage_errors, write_all, write_bytes
from plexrl_slurm.memory.slab import PRELUDE_BYTES, put_prelude, read_header, unmarked, used_bytes

T = TypeVar("T")

#: What one thread moves at once; a multiple of the page.
BLOCK: Final = sums.BLOCK
#: Blocks that are under way at once.
DEPTH: Final = 4
#: Threads beside those: they copy and checksum while the disk works for the others.
SPARE: Final = 2
FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"


class Abandoned(Exception):
    """Nobody wants the image any more."""


class Gate:
    """The way in which another thread slows a read down, or ends it."""

    def __init__(self, *, slow: bool = False, share: float = 1.0) -> None:
        """``slow``: others' reads and writes come first; ``share`` of the time, then."""
        self._slow, self._share, self._closed = slow, share, threading.Event()
        self._turn, self._turns = threading.Semaphore(1), threading.Semaphore(DEPTH)

    def hurry(self) -> None:
        """Somebody waits for it."""
        self._slow, self._share = False, 1.0

    def close(self) -> None:
        """End it at the next block."""
        self._closed.set()

    @contextmanager
    def block(self) -> Iterator[None]:
        """Around what the disk does of a block; one at a time while it is slow. Raises
        ``Abandoned``."""
        with self._turn if self._slow else self._turns:
            if self._closed.is_set():
                raise Abandoned
            start = time.monotonic()
            yield
            if self._share < 1:
                self._closed.wait((time.monotonic() - start) * (1 / self._share - 1))


class RankFile(msgspec.Struct, frozen=True):
    """One rank's slab."""

    name: str
    bytes: int
    #: CRC-32C of every block in turn.
    blocks: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a folder contains."""

    format: int
    owner: str
    deployment: str
    progress: tuple[int, int]
    block_bytes: int
    files: tuple[RankFile, ...]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    number: int
    offset: int
    size: int


def write_image(folder: Path, slabs: Sequence[Path], *, owner: str) -> Manifest:
    """Copy complete slabs, one for each rank, into ``folder``, whose content they replace at once.

    Nobody may write the slabs meanwhile. Raises ``BadImage`` for a slab that is not complete, or
    not what its checksums say, ``StorageFull`` and ``StorageFailed``; what was in ``folder`` is
    then still there.
    """
    header = read_header(slabs[0])
    part = _part(folder)
    disk.disk.remove_tree(part)
    sizes = [used_bytes(slab) for slab in slabs]
    try:
        with _disk_errors(folder.parent), storage_errors(_standing(folder), sum(sizes)):
            disk.disk.make_folder(part)
            with ExitStack() as opened, ThreadPoolExecutor(len(slabs), "sync") as syncing:
                files, synced = [], []
                for rank, (slab, size) in enumerate(zip(slabs, sizes, strict=True)):
                    path = part / f"rank-{rank}.slab"
                    target = opened.enter_context(_direct(path, writing=True))
                    files.append(_write_rank(slab, path, size, target))
                    synced.append(syncing.submit(_sync, target, path))
                sums.compare_all(slabs, [file.blocks for file in files])
                seq, step = header.progress
                manifest = Manifest(
                    format=FORMAT,
                    owner=owner,
                    deployment=header.deployment,
                    progress=(seq, step),
                    block_bytes=BLOCK,
                    files=tuple(files),
                )
                write_bytes(part / _MANIFEST, manifests.encoded(manifest))
                for each in synced:
                    each.result()
            publish_folder(part, folder)
        return manifest
    finally:
        disk.disk.remove_tree(part)


def read_manifest(folder: Path, *, owner: str) -> Manifest:
    """Raises ``BadImage`` if there is no complete image of this owner and format."""
    path = folder / _MANIFEST
    manifest = manifests.read(path, Manifest, format_=FORMAT)
    if manifest.owner != owner:
        raise BadImage(str(path), "is of another agent's host tier, or of one before a restart")
    return manifest


def unreadable(problem: BadImage) -> bool:
    """Whether the disk does not give an image, which may be whole."""
    return isinstance(problem.__cause__, OSError)


def read_image(
    folder: Path, slabs: Sequence[Path], *, owner: str, gate: Gate | None = None
) -> Manifest:
    """Copy the image in ``folder`` into slabs, which are valid only once all is there and checked.

    A slab that exists is overwritten in place: ranks keep their mapping of it. Raises
    ``BadImage``, ``StorageFull`` if there is no room for the slabs, and ``Abandoned``.
    """
    gate = gate or Gate()
    manifest = read_manifest(folder, owner=owner)
    if len(manifest.files) != len(slabs):
        ranks = len(manifest.files)
        raise BadImage(str(folder), f"is of {ranks} ranks, and {len(slabs)} are to load it")
    preludes = [
        _read_rank(folder / file.name, file, manifest.block_bytes, slab, gate)
        for file, slab in zip(manifest.files, slabs, strict=True)
    ]
    for prelude, slab, file in zip(preludes, slabs, manifest.files, strict=True):
        put_prelude(slab, prelude)
        if manifest.block_bytes == sums.BLOCK:
            sums.write(slab, sums.Sums(bytes=file.bytes, blocks=file.blocks))
    return manifest


def check_image(folder: Path, *, owner: str, gate: Gate) -> None:
    """Read all of it, and nothing else. Raises ``BadImage`` and ``Abandoned``."""
    manifest = read_manifest(folder, owner=owner)
    space = memoryview(mmap.mmap(-1, manifest.block_bytes))
    for file in manifest.files:
        path = folder / file.name
        try:
            with _direct(path, writing=False) as source:
                _same_size(path, source, file)
                for block in _blocks(file.bytes, manifest.block_bytes):
                    with gate.block():
                        _read_block(path, source, block, space[: block.size], file)
        except OSError as error:
            if isinstance(error, PlexError):
                raise
            raise BadImage(str(path), f"cannot be read ({error.strerror})") from error


def drop_image(folder: Path) -> None:
    """Delete an image; the manifest first, so that half of it is none."""
    with suppress(OSError):
        disk.disk.remove(folder / _MANIFEST)
    disk.disk.remove_tree(folder)
    disk.disk.remove_tree(_part(folder))


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.part")


def _standing(folder: Path) -> Path:
    return next(parent for parent in folder.parents if parent.exists())


# ---- one rank -----------------------------------------------------------------------------


def _write_rank(slab: Path, path: Path, size: int, target: int) -> RankFile:
    """All but the sync."""
    gate, room = Gate(), _Room(BLOCK)

    def write(block: _Block) -> int:
        data = room.space()[: block.size]
        _whole(source, block, lambda at: os.preadv(source, [data[at:]], block.offset + at))
        crc = crc32c(data)
        with gate.block():
            _whole(target, block, lambda at: disk.disk.write(target, data[at:], block.offset + at))
        return crc

    try:
        disk.disk.allocate(target, size)
        with slab.open("rb") as opened:
            source = opened.fileno()
            crcs = _each(write, _blocks(size, BLOCK))
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return RankFile(name=path.name, bytes=size, blocks=tuple(crcs))


def _sync(target: int, path: Path) -> None:
    try:
        disk.disk.sync(target)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _read_rank(path: Path, file: RankFile, block_bytes: int, slab: Path, gate: Gate) -> bytes:
    """Everything but the commit mark; returns the prelude, which has it."""
    blocks = list(_blocks(file.bytes, block_bytes))
    if len(blocks) != len(file.blocks):
        raise BadImage(str(path), f"has {len(blocks)} blocks and {len(file.blocks)} checksums")
    try:
        with _direct(path, writing=False) as source:
            _same_size(path, source, file)
            target = _reserve(slab, file.bytes)
            try:
                return _fill(path, source, file, blocks, slab, target, gate)
            finally:
                disk.disk.close(target)
    except PlexError:
        raise
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror})") from error


def _fill(
    path: Path,
    source: int,
    file: RankFile,
    blocks: Sequence[_Block],
    slab: Path,
    target: int,
    gate: Gate,
) -> bytes:
    room = _Room(blocks[0].size)
    # The commit mark, which nobody may see before all is checked.
    preludes = []

    def put(data: memoryview | bytes, at: int) -> None:
        with storage_errors(slab.parent, file.bytes):
            write_all(target, data, at)

    def read(block: _Block) -> None:
        data = room.space()[: block.size]
        with gate.block():
            _whole(source, block, lambda at: disk.disk.read(source, [data[at:]], block.offset + at))
        _compare(path, block, data, file)
        if block.number == 0:
            preludes.append(bytes(data[:PRELUDE_BYTES]))
            data[:PRELUDE_BYTES] = unmarked(preludes[0])
        put(data, block.offset)

    put(bytes(PRELUDE_BYTES), 0)
    _each(read, blocks)
    return preludes[0]


class _Room:
    """A block of memory for each thread; in large pages where there are some, which a disk takes
    in fewer pieces."""

    def __init__(self, size: int) -> None:
        self._size, self._own = size, threading.local()

    def space(self) -> memoryview:
        """That of this thread."""
        found: memoryview | None = getattr(self._own, "space", None)
        if found is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = mmap.mmap(-1, self._size, flags=flags)
            with suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
            found = self._own.space = memoryview(pages)
        return found


def _read_block(path: Path, source: int, block: _Block, data: memoryview, file: RankFile) -> None:
    _whole(source, block, lambda at: disk.disk.read(source, [data[at:]], block.offset + at))
    _compare(path, block, data, file)


def _compare(path: Path, block: _Block, data: memoryview, file: RankFile) -> None:
    if block.number >= len(file.blocks) or crc32c(data) != file.blocks[block.number]:
        raise BadImage(str(path), f"is damaged: block {block.number} does not match its checksum")


def _same_size(path: Path, source: int, file: RankFile) -> None:
    there = os.fstat(source).st_size
    if there != file.bytes:
        raise BadImage(str(path), f"is cut off: {there} of {file.bytes} bytes are there")


def _reserve(slab: Path, size: int) -> int:
    """A descriptor of the slab, which has room for all of it."""
    descriptor = disk.disk.open(slab, os.O_RDWR | os.O_CREAT)
    try:
        there = os.fstat(descriptor)
        if there.st_size < size or there.st_blocks * 512 < there.st_size:
            with storage_errors(slab.parent, size):
                disk.disk.allocate(descriptor, max(size, there.st_size))
    except BaseException:
        disk.disk.close(descriptor)
        raise
    return descriptor


# ---- blocks -------------------------------------------------------------------------------


def _blocks(size: int, each: int) -> Iterator[_Block]:
    for number, offset in enumerate(range(0, size, each)):
        yield _Block(number=number, offset=offset, size=min(each, size - offset))


def _each(work: Callable[[_Block], T], blocks: Iterator[_Block] | Sequence[_Block]) -> list[T]:
    with ThreadPoolExecutor(DEPTH + SPARE, thread_name_prefix="nvme") as pool:
        futures = [pool.submit(work, block) for block in blocks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _whole(descriptor: int, block: _Block, move: Callable[[int], int]) -> None:
    """Call ``move`` with how much is done until all is; the system may do less than asked."""
    done = 0
    while done < block.size:
        try:
            moved = move(done)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # Not aligned as this disk wants it.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if moved <= 0:
            raise OSError(errno.EIO, f"{block.size - done} bytes of a block are missing")
        done += moved


@contextmanager
def _direct(path: Path, *, writing: bool) -> Iterator[int]:
    """A descriptor with O_DIRECT, or without where the file system refuses it."""
    flags = (os.O_RDWR | os.O_CREAT | os.O_EXCL) if writing else os.O_RDONLY
    try:
        descriptor = disk.disk.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # It was made all the same on some file systems.
        descriptor = disk.disk.open(path, flags & ~os.O_EXCL)
    try:
        yield descriptor
    finally:
        disk.disk.close(descriptor)


@contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    """Turn what a broken disk answers into ``StorageFailed``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE):
            raise
        raise StorageFailed(str(error.filename or where), os.strerror(error.errno)) from error
