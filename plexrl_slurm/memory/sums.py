"""Checksums of slabs in host memory, in a file beside each.

They are made by the agent while nothing moves: CRC-32C reads memory at twice the speed at which a
switch copies it, so that a switch with checksums would be slower by half. Whoever gives a slab away
to be written removes them first; so a slab that has some is what it was when they were made.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage, StorageFull
from plexrl_slurm.memory import disk
from plexrl_slurm.memory.files import CHUNK, chunks, part_name, write_bytes
from plexrl_slurm.memory.slab import used_bytes

#: Bytes of a block; as on NVMe, whose checksums are of the same bytes.
BLOCK: Final = CHUNK


class Sums(msgspec.Struct, frozen=True):
    """Of one slab."""

    bytes: int
    #: CRC-32C of every block in turn.
    blocks: tuple[int, ...]


def path_of(slab: Path) -> Path:
    """Where the checksums of a slab are."""
    return slab.with_name(f"sums-{slab.name.removeprefix('slot-')}")


def read(slab: Path) -> Sums | None:
    """Those of a slab; ``None``: it has none, or they are damaged themselves."""
    try:
        data = disk.disk.read_file(path_of(slab))
        said, _, text = data.partition(b"\n")
        if said == b"%08x" % crc32c(text):
            return msgspec.json.decode(text, type=Sums)
    except (OSError, msgspec.DecodeError):
        pass
    return None


def write(slab: Path, found: Sums) -> None:
    """Nobody may have been given the slab since. If they cannot be written there are none."""
    path, text = path_of(slab), msgspec.json.encode(found)
    part = part_name(path)
    try:
        write_bytes(part, b"%08x\n%s" % (crc32c(text), text))
        disk.disk.rename(part, path)
    except (OSError, StorageFull):
        with suppress(OSError):
            disk.disk.remove(part)


def drop(slab: Path) -> None:
    """It is about to be written, or to go."""
    disk.disk.remove(path_of(slab))


def compute(slab: Path, begun: list[int], *, wanted: Callable[[], bool]) -> Sums | None:
    """Checksums of a slab, of which ``begun`` has the first ones; ``None``: no longer ``wanted``,
    ``begun`` has some more. Raises ``BadImage``."""
    size = used_bytes(slab)
    for chunk in chunks(slab, size, first=len(begun) * BLOCK):
        begun.append(crc32c(chunk))
        if not wanted():
            return None
    return Sums(bytes=size, blocks=tuple(begun))


def check(slab: Path) -> bool:
    """Whether a slab has checksums, which it matches then; raises ``BadImage`` if it does not."""
    known = read(slab)
    if known is None:
        return False
    for _ in compared(slab, known, chunks(slab, used_bytes(slab))):
        pass
    return True


def compared(slab: Path, known: Sums | None, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same blocks, all of the slab in turn. Raises ``BadImage``."""
    for number, block in enumerate(blocks):
        if known is not None:
            compare(slab, known, number, crc32c(block))
        yield block


def compare(slab: Path, known: Sums | None, number: int, crc: int) -> None:
    """A block of a slab has this checksum; raises ``BadImage`` if it had another."""
    if known is not None and (number >= len(known.blocks) or known.blocks[number] != crc):
        raise BadImage(
            str(slab), f"is damaged in memory: block {number} does not match its checksum"
        )


def compare_all(slabs: Sequence[Path], found: Sequence[Sequence[int]]) -> None:
    """These are the checksums that blocks of the slabs have now. Raises ``BadImage``."""
    for slab, crcs in zip(slabs, found, strict=True):
        known = read(slab)
        for number, crc in enumerate(crcs):
            compare(slab, known, number, crc)
