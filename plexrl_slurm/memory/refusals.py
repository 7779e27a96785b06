"""What a file system says when it refuses, as one sentence: what, where, and what to do."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadImage, PlexError, StorageFull, StorageRefused

READ: Final = "read"
WRITTEN: Final = "written"

_RIGHTS: Final = (
    "the service user must be able to use it and the folders above it (see ls -ld and lsattr): "
    "correct that, then try again"
)
_GONE: Final = "a folder was removed or is not mounted: put it back, then try again"
_REMEDIES: Final = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ESTALE: _GONE,
    errno.EROFS: "mount its file system for writing, then try again",
    errno.ENOSPC: "free space there, then try again",
    errno.EDQUOT: "free space there or raise the quota, then try again",
}
_DISK: Final = "see what dmesg says of its disk, then try again"


@contextmanager
def refusals(where: Path, doing: str) -> Iterator[None]:
    """Turn every ``OSError`` of a block into a ``PlexError``; ``doing``: ``READ`` or ``WRITTEN``.

    ``where`` is what people know; another file that the error names takes its place.
    """
    try:
        yield
    except PlexError:
        raise
    except OSError as error:
        raise refused(error, where, doing) from error


def refused(error: OSError, where: Path, doing: str) -> StorageFull | StorageRefused:
    """What to raise instead of ``error``."""
    if isinstance(error, (StorageFull, StorageRefused)):
        return error
    name = error.filename if isinstance(error.filename, str) else ""
    elsewhere = name and not Path(name).is_relative_to(where.parent)
    reason = os.strerror(error.errno) if error.errno else str(error)
    remedy = _REMEDIES.get(error.errno or 0, _DISK)
    return StorageRefused(
        name if elsewhere else str(where), f"cannot be {doing} ({reason})", remedy
    )


@contextmanager
def image_refusals(path: Path) -> Iterator[None]:
    """Turn every ``OSError`` of a block that looks at an image or snapshot into ``BadImage``."""
    try:
        yield
    except PlexError:
        raise
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror or error})") from error
