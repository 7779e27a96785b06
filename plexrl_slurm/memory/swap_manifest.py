"""Checksums of a version of a swap folder: written with it, compared when somebody may doubt it.

Versions that ranks of this agent have written are believed, because a process that dies tears
nothing that it has finished. After a restart, and when an image comes back from the disk, the
files are read once.
"""

import os
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage, PlexError
from plexrl_slurm.memory import disk, manifests
from plexrl_slurm.memory.files import write_all

#: Variable that tells a rank which agent's it is.
SWAP_WRITER: Final = "PLEXRL_SWAP_WRITER"
MANIFEST: Final = "manifest"
FORMAT: Final = 1
_CHUNK: Final = 8 << 20
#: Files that are read at once.
_DEPTH: Final = 4


class SwapFile(msgspec.Struct, frozen=True):
    """One file of a version."""

    bytes: int
    crc32c: int


class SwapManifest(msgspec.Struct, frozen=True):
    """What a version has in it."""

    format: int
    #: The agent whose rank wrote it.
    writer: str
    files: dict[str, SwapFile]


def room_for(files: int) -> int:
    """Bytes that a manifest of so many files takes at most."""
    return -(-(256 + 96 * files) // 4096) * 4096


def reserve(place: Path, files: int) -> None:
    """An empty manifest, as large as it will be: writing it cannot fail for want of room."""
    _put(place, bytes(room_for(files)))


def write(place: Path, sizes: Mapping[str, int], crcs: Mapping[str, int]) -> None:
    """Of these files; those without a checksum are read."""
    files = {
        name: SwapFile(bytes=size, crc32c=crcs[name] if name in crcs else crc_of(place / name))
        for name, size in sizes.items()
    }
    writer = os.environ.get(SWAP_WRITER, "")
    _put(place, manifests.encoded(SwapManifest(format=FORMAT, writer=writer, files=files)))


def read(place: Path) -> SwapManifest:
    """Raises ``BadImage``."""
    return manifests.read(place / MANIFEST, SwapManifest, format_=FORMAT)


def crc_of(path: Path) -> int:
    """Of all that a file has in it."""
    descriptor, crc, at = disk.disk.open(path, os.O_RDONLY), 0, 0
    try:
        space = memoryview(bytearray(_CHUNK))
        while got := disk.disk.read(descriptor, [space], at):
            crc, at = crc32c(space[:got], crc), at + got
    finally:
        disk.disk.close(descriptor)
    return crc


def check(place: Path, manifest: SwapManifest) -> None:
    """Read all files; raises ``BadImage`` for the first that is not what was written."""
    with ThreadPoolExecutor(_DEPTH, thread_name_prefix="swap-check") as pool:
        found = pool.map(lambda item: _check_file(place / item[0], item[1]), manifest.files.items())
        list(found)


def _check_file(path: Path, file: SwapFile) -> None:
    try:
        there = path.stat().st_size
        crc = crc_of(path) if there == file.bytes else 0
    except PlexError:
        raise
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror})") from error
    if there != file.bytes:
        raise BadImage(str(path), f"is cut off: {there} of {file.bytes} bytes are there")
    if crc != file.crc32c:
        raise BadImage(str(path), "is damaged: it does not match its checksum")


def _put(place: Path, data: bytes) -> None:
    descriptor = disk.disk.open(place / MANIFEST, os.O_WRONLY | os.O_CREAT)
    try:
        write_all(descriptor, data, 0)
    finally:
        disk.disk.close(descriptor)


class Trust:
    """Which versions an agent need not read again."""

    def __init__(self) -> None:
        #: What its ranks sign with.
        self.writer = uuid.uuid4().hex
        self._checked: set[Path] = set()
        #: Swap folders of images that lay on the disk meanwhile.
        self._doubted: set[Path] = set()

    def doubt(self, home: Path) -> None:
        """A deployment's image was read back: next time its version is, too."""
        self._doubted.add(home)

    def check(self, home: Path, version: Path) -> None:
        """Raises ``BadImage``."""
        doubted = home in self._doubted
        if version in self._checked and not doubted:
            return
        manifest = read(version)
        if doubted or manifest.writer != self.writer:
            check(version, manifest)
        self._checked.add(version)

    def settle(self, home: Path) -> None:
        """All of an image was good."""
        self._doubted.discard(home)
        gone = [version for version in list(self._checked) if not version.is_dir()]
        self._checked.difference_update(gone)
