"""Equal weights are one file: every name of them is a link to it.

In a folder of snapshots, ``.content`` has one more link to each file, by what its weights are.
"""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from plexrl_slurm.core import content
from plexrl_slurm.memory.files import part_name

FOLDER: Final = ".content"


def link(path: Path, weights: int) -> bool:
    """Make ``path`` a name of these weights if they are there; answers whether they were."""
    part = part_name(path)
    part.unlink(missing_ok=True)
    try:
        os.link(_file(path.parent, weights), part)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EMLINK, errno.EPERM, errno.ENOTSUP):
            raise
        return False
    part.rename(path)
    part.unlink(missing_ok=True)  # it stays if the two were one file already
    return True


def remember(path: Path, weights: int) -> None:
    """Let others find the complete file at ``path``; it does no harm if they cannot."""
    place = _file(path.parent, weights)
    try:
        place.parent.mkdir(exist_ok=True, mode=0o700)
        os.link(path, place)
    except OSError:
        return


def forget(folder: Path) -> None:
    """Delete what has no other name any more."""
    for path in folder.glob(f"{FOLDER}/*"):
        try:
            if path.stat().st_nlink == 1:
                path.unlink()
        except FileNotFoundError:
            continue


def bytes_of(files: Iterable[Path]) -> int:
    """What files take, each once whatever names it has."""
    sizes = {}
    for path in files:
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def _file(folder: Path, weights: int) -> Path:
    return folder / FOLDER / f"{content.text(weights).replace(' ', '-')}.safetensors"
