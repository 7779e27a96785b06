"""Fetch named sampler weights from the daemon into a new folder: whole, or not there."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plexrl_slurm.cli import show
from plexrl_slurm.cli.client import Client
from plexrl_slurm.core.errors import BadInput, Denied, StorageFull
from plexrl_slurm.memory.files import storage_errors, sync_folder


def check_target(folder: Path) -> None:
    """Raises ``BadInput`` unless ``folder`` can be made."""
    if os.path.lexists(folder):
        raise BadInput(f"{folder} exists: name a folder that does not exist yet")
    if not folder.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {folder.absolute().parent}: make it first")


def export(
    client: Client, job_id: int, uri: str, folder: Path, *, say: Callable[[str], None]
) -> int:
    """Write the weights ``uri`` of a job to the new ``folder``; returns its bytes."""
    listed = client.state_files(job_id, uri)
    files, piece = listed["files"], int(listed["piece_bytes"])
    total = sum(int(file["bytes"]) for file in files)
    folder = folder.absolute()
    free = os.statvfs(folder.parent)
    if free.f_bavail * free.f_frsize < total:
        raise StorageFull(str(folder.parent), total, free.f_bavail * free.f_frsize)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with storage_errors(folder.parent, total):
            part.mkdir()
            done = 0
            for file in files:
                for size in _fetch(client, job_id, uri, file, part, piece):
                    done += size
                    say(f"exporting {uri}: {show.gib(done)} of {show.gib(total)}")
        sync_folder(part)
        check_target(folder)
        part.rename(folder)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise Denied(
                f"you may not write in {folder.parent} ({error.strerror}): name another folder"
            ) from error
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            check_target(folder)
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync_folder(folder.parent)
    return total


def _fetch(
    client: Client, job_id: int, uri: str, file: Mapping[str, Any], part: Path, piece: int
) -> Iterator[int]:
    """Write one file; yields the bytes of each piece."""
    name, size = str(file["name"]), int(file["bytes"])
    if Path(name).name != name or name == "..":
        raise BadInput(f"{uri}: the daemon names a file {name!r}, which is no file name")
    digest, at = hashlib.sha256(), 0
    with (part / name).open("xb") as target:
        while at < size:
            data = client.state_piece(job_id, uri, file, offset=at, length=min(piece, size - at))
            if not data:
                raise BadInput(f"{uri}: {name} is cut off: {size - at} bytes are missing")
            target.write(data)
            digest.update(data)
            at += len(data)
            yield len(data)
        target.flush()
        os.fsync(target.fileno())
    if file["sha256"] and digest.hexdigest() != file["sha256"]:
        raise BadInput(f"{uri}: {name} is damaged, it is not what was saved: export another name")
