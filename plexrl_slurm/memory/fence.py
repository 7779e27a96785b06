"""Which orders may still add durable images of a deployment.

An agent that was declared lost may go on, and begin or end a copy long after the deployment lives
elsewhere. So a file beside a deployment's images has the number of the newest order that began one,
and of the newest move; under its lock an older order publishes nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from plexrl_slurm.core.errors import Denied
from plexrl_slurm.memory.claims import locked

#: Epoch of the daemon that gave an order, and the order's number.
Token: TypeAlias = tuple[int, int]
NONE: Final[Token] = (0, 0)
_NAME: Final = ".fence"


class _Fence(msgspec.Struct, frozen=True):
    #: Of the newest order, or move.
    newest: Token = NONE
    #: Of the newest move: what was written by orders before it is another home's.
    moved: Token = NONE


def token_of(epoch: int, order: str) -> Token:
    """Of an order's id, ``EPOCH.NUMBER``."""
    number = order.rpartition(".")[2]
    return epoch, int(number) if number.isdigit() else 0


@contextmanager
def passing(home: Path, token: Token) -> Iterator[Token]:
    """Whoever has ``token`` may publish images of ``home`` while the block runs; the number of the
    newest move. Raises ``Denied`` if a newer order has begun."""
    if token == NONE and not (home / _NAME).exists():  # nobody's order, and nobody's fence
        yield NONE
        return
    with locked(home / _NAME) as descriptor:
        fence = _read(descriptor)
        if token < fence.newest:
            raise Denied(
                f"{home}: an older order may add no image, because the deployment lives elsewhere "
                f"now or a newer order has begun; nothing is to be done"
            )
        _write(descriptor, msgspec.structs.replace(fence, newest=token))
        yield fence.moved


@contextmanager
def moving(home: Path, token: Token) -> Iterator[None]:
    """From now on only orders that are newer than ``token`` add images."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(home / _NAME) as descriptor:
        fence = _read(descriptor)
        newest, moved = max(fence.newest, token), max(fence.moved, token)
        _write(descriptor, _Fence(newest=newest, moved=moved))
        yield


def _read(descriptor: int) -> _Fence:
    try:
        return msgspec.json.decode(os.pread(descriptor, 1024, 0), type=_Fence)
    except msgspec.DecodeError:  # it is new
        return _Fence()


def _write(descriptor: int, fence: _Fence) -> None:
    text = msgspec.json.encode(fence).ljust(128)
    os.pwrite(descriptor, text, 0)
    os.fsync(descriptor)
