"""What a file system says when it refuses, as one sentence: what, where, and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadImage, PlexError, StorageFull, StorageRefused

READ: Final = "read"
WRITTEN: Final = "written"
#: Folders that a process needs for its start.
USED: Final = "used"

_RIGHTS: Final = (
    "the service user must be able to use it and the folders above it (see ls -ld and lsattr): "
    "correct that, then try again"
)
_GONE: Final = "a folder was removed or is not mounted: put it back, then try again"
_IN_THE_WAY: Final = "something else has its name: move that away, then try again"
_REMEDIES: Final = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.ESTALE: _GONE,
    errno.EEXIST: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
    errno.EROFS: "mount its file system for writing, then try again",
    errno.ENOSPC: "free space there, then try again",
    errno.EDQUOT: "free space there or raise the quota, then try again",
}
_DISK: Final = "see what dmesg says of its disk, then try again"


@contextmanager
def refusals(where: Path, doing: str) -> Iterator[None]:
    """Turn every ``OSError`` of a block into a ``PlexError``; ``doing`` is ``READ`` or so.

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
    name = str(error.filename or "")
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, _DISK)
    return StorageRefused(
        name if name and (doing == USED or not _is_of(Path(name), where)) else str(where),
        f"cannot be {doing} ({reason})",
        remedy,
    )


def _is_of(name: Path, where: Path) -> bool:
    """Whether it is a folder above ``where``, or in it, or what ``where`` is written as first."""
    if where.is_relative_to(name) or name.is_relative_to(where):
        return True
    hidden = where.with_name(f".{where.name}")
    return any(str(each).startswith(f"{hidden}.") for each in (name, *name.parents))


@contextmanager
def image_refusals(path: Path) -> Iterator[None]:
    """Turn every ``OSError`` of a block that looks at an image or snapshot into ``BadImage``."""
    try:
        yield
    except PlexError:
        raise
    except OSError as error:
        raise BadImage(str(path), f"cannot be read ({error.strerror or error})") from error
