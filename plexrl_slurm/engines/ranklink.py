"""What an agent and its ranks say to each other (ZeroMQ over a private unix socket, msgpack).

The agent sends every order of a training WPG to every rank of the gang; each answers. A
sampling WPG has one rank process, which works on many orders at once.
"""

from typing import TypeAlias

import msgspec


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Save ``outgoing`` into the slab ``save_path`` (if given), then bring ``incoming`` in.

    ``load_path`` is this rank's slab of a training deployment; for a sampling rank it is a
    snapshot file or model folder and ``model`` the catalogue name.
    """

    incoming: str
    load_path: str
    model: str = ""
    outgoing: str = ""
    save_path: str = ""
    progress: tuple[int, int] = (0, 0)


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Save the resident ``deployment`` into the slab ``path``."""

    deployment: str
    path: str
    progress: tuple[int, int]


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Say how large the slab of a save of the resident ``deployment`` would be."""

    deployment: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Run one part of a call; ``body`` is an encoded :data:`plexrl_slurm.wire.Body`."""

    call: str
    deployment: str
    body: bytes
    #: Host-tier file of a publish.
    publish_path: str = ""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give the device's memory back; what is resident is lost. Not ok if more is left."""

    limit: int
    #: Of others on the same GPUs, which sleep: allowed besides where theirs is measured too.
    beside: int = 0


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Take the device's memory, unless less than ``needed`` is free: then it is not ok."""

    needed: int


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody waits for ``order`` any more; sampling ranks only."""

    order: str


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Stop the sample of ``order`` at a token boundary, if it can be: its answer is then a
    :class:`plexrl_slurm.wire.Paused`. Sampling ranks only; has no answer of its own."""

    order: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process."""


Operation: TypeAlias = Load | Save | Measure | Call | Sleep | Wake | Abort | Pause | Stop


class Order(msgspec.Struct, frozen=True):
    """An operation with the name its answer will carry."""

    id: str
    operation: Operation


class Up(msgspec.Struct, frozen=True, tag="up"):
    """The engine is ready."""

    pid: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """An order ended on this rank."""

    id: str
    #: False: the function failed by itself and the state is as before.
    ok: bool
    #: Encoded :data:`plexrl_slurm.wire.Result` of a call; empty otherwise.
    result: bytes = b""
    #: Why it failed.
    error: str = ""
    #: It failed because a tier had no room.
    full: bool = False
    moved_bytes: int = 0
    #: Device memory in use after a sleep or wake; see ``device_memory.DeviceMemory``.
    used_bytes: int = 0
    #: Of the file, after a :class:`Measure`.
    slab_bytes: int = 0
    started_us: int = 0
    ended_us: int = 0


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The rank cannot go on, and exits; the gang has to be restarted."""

    reason: str


Report: TypeAlias = Up | Answer | Fatal

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)


def encode(value: Order | Report) -> bytes:
    """Bytes of an order or a report."""
    return _encoder.encode(value)


def decode_order(data: bytes) -> Order:
    """Raises ``msgspec.DecodeError`` on foreign bytes."""
    return _orders.decode(data)


def decode_report(data: bytes) -> Report:
    """Raises ``msgspec.DecodeError`` on foreign bytes."""
    return _reports.decode(data)
