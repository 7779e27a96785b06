"""Large files from agent to agent over TCP: what both ends agree on.

Both ends prove that they hold the partition's agent key, each with a nonce of the other's in its
proof, before either says what it wants or has. Then the fetching end asks for a file by name, is
offered a size and an identity, and wants chunks; each comes as its bytes, then number and CRC-32C.
What follows the proofs is neither encrypted nor signed (decision 0028).
"""

import hashlib
import hmac
import socket
import struct
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from plexrl_slurm.transport.keys import agent_keys

T = TypeVar("T", bound=msgspec.Struct)

#: First bytes of a connection; another version is another greeting.
GREETING: Final = b"plexrl-bulk/1\n"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
#: What is checked, asked for again and remembered as one.
CHUNK: Final = 4 << 20
#: What is summed and sent at once: it stays in the processor's cache in between.
PIECE: Final = 256 << 10
#: What is received and summed at once.
TAKEN: Final = 1 << 20
#: A peer that does nothing for so long is gone.
PATIENCE_S: Final = 10.0
#: After a chunk: its number, its checksum.
TRAILER: Final = struct.Struct("<II")
_TIMEVAL: Final = struct.Struct("@ll")
_LENGTH: Final = struct.Struct("<I")
_LONGEST_FRAME: Final = 1 << 20


class Ask(msgspec.Struct, frozen=True):
    """First frame of whoever fetches."""

    name: str


class Offer(msgspec.Struct, frozen=True):
    """What is there. The same identity is the same bytes."""

    size: int = 0
    chunk: int = 1
    identity: str = ""
    #: Why there is nothing; "" if there is.
    refusal: str = ""


class Want(msgspec.Struct, frozen=True):
    """Chunks, as ``(first, after the last)``, in the order in which they are to come."""

    ranges: list[tuple[int, int]]


def bulk_key(state_dir: Path) -> bytes:
    """What both ends know: derived from the key that all agents of the partition have."""
    return hmac.digest(agent_keys(state_dir).secret, b"plexrl bulk transfers", hashlib.sha256)


def proof(key: bytes, who: bytes, asked: bytes, own: bytes) -> bytes:
    """Of ``who`` (``server`` or ``client``), for the nonce ``asked`` of the other."""
    return hmac.digest(key, who + asked + own, hashlib.sha256)


def same(one: bytes, other: bytes) -> bool:
    """Whether two proofs are equal; takes as long either way."""
    return hmac.compare_digest(one, other)


def ranges_of(chunks: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as ranges."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and found[-1][1] == chunk:
            found[-1] = (found[-1][0], chunk + 1)
        else:
            found.append((chunk, chunk + 1))
    return found


def be_patient(link: socket.socket) -> None:
    """Have the kernel watch over ``PATIENCE_S``: a timeout of Python's polls before every read, and
    makes of one read many."""
    link.setblocking(True)
    patience = _TIMEVAL.pack(*divmod(int(PATIENCE_S * 1e6), 1_000_000))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)


def send_frame(link: socket.socket, value: msgspec.Struct) -> None:
    """Blocks."""
    data = msgspec.msgpack.encode(value)
    link.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(link: socket.socket, kind: type[T]) -> T | None:
    """Blocks; ``None`` if the peer has hung up before it. Raises ``ConnectionError`` for what is
    no frame of this kind."""
    length = receive(link, _LENGTH.size, or_end=True)
    if not length:
        return None
    (size,) = _LENGTH.unpack(length)
    if size > _LONGEST_FRAME:
        raise ConnectionError("what came is no frame")
    try:
        return msgspec.msgpack.decode(receive(link, size), type=kind)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"what came is no {kind.__name__} ({error})") from error


def receive(link: socket.socket, size: int, *, or_end: bool = False) -> bytes:
    """Exactly so many bytes; with ``or_end`` none if the peer hangs up before the first."""
    data = bytearray(size)
    if not fill(link, memoryview(data), or_end=or_end):
        return b""
    return bytes(data)


def fill(link: socket.socket, space: memoryview, *, or_end: bool = False) -> bool:
    """Fill ``space``; false if the peer has hung up before the first byte and that is allowed."""
    at = 0
    while at < len(space):
        try:
            with space[at:] as rest:
                got = link.recv_into(rest, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(f"the peer said nothing for {PATIENCE_S:g} seconds") from error
        if not got:
            if or_end and not at:
                return False
            raise ConnectionError("the peer hung up")
        at += got
    return True


def address_towards(endpoint: str) -> str:
    """This node's own address on the way to ``tcp://host:port``; no packet is sent."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
