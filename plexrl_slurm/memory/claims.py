"""Who may give a folder its name: the one that began to write it last.

A writer that hangs, or that was declared lost, may go on long after another took its place. So
whoever begins says so in a file beside the folder, and nobody publishes without still being named
there, under a lock.
"""

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

#: A holder of the lock only renames; one that takes longer hangs, and its lock is no longer asked.
PATIENCE_S: Final = 10.0


def claim(path: Path) -> str:
    """Be the one that publishes ``path``; the token to publish with."""
    token = uuid.uuid4().hex
    with locked(_owner(path)) as descriptor:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, token.encode(), 0)
        os.fsync(descriptor)
    return token


@contextmanager
def publishing(path: Path, token: str) -> Iterator[bool]:
    """Whether ``path`` is still ours to publish, which holds for as long as the block runs; the
    claim ends with it."""
    owner = _owner(path)
    if not owner.exists():
        yield False
        return
    with locked(owner) as descriptor:
        mine = os.pread(descriptor, 64, 0).decode() == token
        yield mine
        if mine or os.fstat(descriptor).st_size == 0:
            owner.unlink(missing_ok=True)


def give_up(path: Path, token: str) -> None:
    """It will not be published by us."""
    with suppress(OSError), publishing(path, token):
        pass


def _owner(path: Path) -> Path:
    return path.with_name(f".{path.name}.owner")


@contextmanager
def locked(owner: Path) -> Iterator[int]:
    """The file's descriptor, while nobody else has it; but see ``PATIENCE_S``."""
    until = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(owner, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > until:
                owner.unlink(missing_ok=True)
                until = time.monotonic() + PATIENCE_S
            time.sleep(0.05)
            continue
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), owner.stat()):
                break
        os.close(descriptor)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
