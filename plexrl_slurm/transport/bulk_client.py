"""The fetching end of a bulk transfer. Blocks: made for a thread."""

import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage, Denied
from plexrl_slurm.memory.partial import PartialFile
from plexrl_slurm.transport import bulk

#: Times in a row that nothing good comes before a source is given up.
_TRIES: Final = 4
#: Before the second of them; twice as long before each further one.
_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How a transfer went."""

    bytes: int
    #: That came over the network; less than all if an earlier transfer had been cut.
    received: int
    connections: int


class BulkFetch:
    """One file from one source, resumed after every break as long as anything comes."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        name: str,
        target: Path,
        *,
        size: int | None,
        spare: Path,
    ) -> None:
        """``size`` as it has to be, if that is known; ``spare``: see ``PartialFile``."""
        self._address, self._key, self._name = address, key, name
        self._target, self._size, self._spare = target, size, spare
        self._link: socket.socket | None = None
        self._cancelled = threading.Event()
        self._received = 0

    def cancel(self) -> None:
        """Have :meth:`run` end soon with ``ConnectionAbortedError``; from any thread."""
        self._cancelled.set()
        link = self._link
        if link is not None:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def run(self) -> Fetched:
        """Until the file is there, complete.

        Raises ``ConnectionError`` or ``TimeoutError`` if the source cannot be reached, ``Denied``
        if it has another key, ``FileNotFoundError`` if it has no such file, ``BadImage`` if what
        it gives stays damaged, and ``StorageFull``.
        """
        connections, barren, damaged = 0, 0, 0
        while True:
            before = self._received
            connections += 1
            failure: OSError | None = None
            try:
                size, bad = self._attempt()
            except (ConnectionError, TimeoutError, socket.gaierror) as problem:
                bad, failure = 0, problem
            else:
                if not bad:
                    return Fetched(bytes=size, received=self._received, connections=connections)
            if self._cancelled.is_set():
                raise ConnectionAbortedError("cancelled")
            barren = 0 if self._received > before else barren + 1
            damaged = damaged + 1 if bad else 0
            if max(barren, damaged) < _TRIES:
                self._cancelled.wait(_PAUSE_S * 2 ** max(barren, damaged))
            elif failure is not None:
                raise failure
            else:
                host, port = self._address
                why = f"{bad} of its chunks arrive damaged from {host}, port {port}, every time"
                raise BadImage(self._name, why)

    def _attempt(self) -> tuple[int, int]:
        """``(size of the file, chunks that arrived damaged)``."""
        with socket.create_connection(self._address, timeout=bulk.PATIENCE_S) as link:
            self._link = link
            if self._cancelled.is_set():
                raise ConnectionAbortedError("cancelled")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._prove(link)
            bulk.send_frame(link, bulk.Ask(name=self._name))
            offer = bulk.receive_frame(link, bulk.Offer)
            if offer is None:
                raise ConnectionError("the peer hung up")
            if offer.refusal:
                raise FileNotFoundError(offer.refusal)
            if self._size is not None and offer.size != self._size:
                why = f"has {offer.size} bytes at {self._address[0]}, and {self._size} were written"
                raise BadImage(self._name, why)
            return offer.size, self._receive(link, offer)

    def _prove(self, link: socket.socket) -> None:
        own = secrets.token_bytes(bulk.NONCE_BYTES)
        greeting = bulk.receive(link, len(bulk.GREETING) + bulk.NONCE_BYTES)
        if not greeting.startswith(bulk.GREETING):
            raise ConnectionError(f"what listens at {self._address[0]} is of another version")
        asked = greeting[len(bulk.GREETING) :]
        link.sendall(own + bulk.proof(self._key, b"client", asked, own))
        said = bulk.receive(link, bulk.PROOF_BYTES, or_end=True)
        if not bulk.same(said, bulk.proof(self._key, b"server", own, asked)):
            host, port = self._address
            raise Denied(
                f"the agent at {host}, port {port}, does not have this partition's key: see that "
                f"both nodes have the same state_dir"
            )

    def _receive(self, link: socket.socket, offer: bulk.Offer) -> int:
        part = PartialFile(
            self._target,
            identity=offer.identity,
            size=offer.size,
            chunk=offer.chunk,
            spare=self._spare,
        )
        try:
            missing = part.missing()
            if missing:
                bulk.send_frame(link, bulk.Want(ranges=bulk.ranges_of(missing)))
            bad = sum(not self._receive_chunk(link, part, index) for index in missing)
            if not bad:
                part.complete()
            return bad
        finally:
            part.close()

    def _receive_chunk(self, link: socket.socket, part: PartialFile, index: int) -> bool:
        crc = 0
        with part.space(index) as space:
            for at in range(0, len(space), bulk.PIECE):
                with space[at : at + bulk.PIECE] as piece:
                    bulk.fill(link, piece)
                    crc = crc32c(piece, crc)
            size = len(space)
        number, said = bulk.TRAILER.unpack(bulk.receive(link, bulk.TRAILER.size))
        if number != index:
            raise ConnectionError(f"chunk {number} came instead of chunk {index}")
        if said != crc:
            return False
        part.done(index, crc)
        self._received += size
        return True
