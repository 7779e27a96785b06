"""The file that says what a folder of an image has in it: JSON behind its own checksum.

Nobody believes half of one, one with a byte that flipped, or one of another release.
"""

from pathlib import Path
from typing import TypeVar

import msgspec
from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import disk

_Manifest = TypeVar("_Manifest", bound=msgspec.Struct)


class _Format(msgspec.Struct):
    format: int = 0


def encoded(manifest: msgspec.Struct) -> bytes:
    """What its file contains."""
    text = msgspec.json.encode(manifest)
    return b"%08x\n%s\n" % (crc32c(text), text)


def read(path: Path, kind: type[_Manifest], *, format_: int) -> _Manifest:
    """One of this ``kind``, whose field ``format`` is ``format_``; the file may be longer than it
    is, by zeros. Raises ``BadImage``."""
    try:
        data = disk.disk.read_file(path)
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror})") from error
    said, _, text = data.rstrip(b"\0").removesuffix(b"\n").partition(b"\n")
    if said != b"%08x" % crc32c(text):
        raise BadImage(str(path), "is damaged: it does not match its own checksum")
    try:
        found = msgspec.json.decode(text, type=_Format).format
        if found != format_:
            raise BadImage(str(path), f"has format {found}; this release reads format {format_}")
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise BadImage(str(path), f"is no manifest of PlexRL's ({error})") from error
