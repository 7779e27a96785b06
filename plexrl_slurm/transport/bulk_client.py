"""The fetching end of a bulk transfer. Blocks: made for a thread."""

import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage, Denied, StorageFull
from plexrl_slurm.memory.kept_maps import KeptMaps
from plexrl_slurm.memory.partial import PartialFile, forget_partial
from plexrl_slurm.transport import bulk

#: Times in a row that nothing good comes before a source is given up.
_TRIES: Final = 4
#: More bytes than this come through two connections.
_TWO_STREAMS: Final = 64 << 20
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
        maps: KeptMaps | None = None,
    ) -> None:
        """``size`` as it has to be, if that is known; ``spare``, ``maps``: see ``PartialFile``."""
        self._maps = maps
        self._address, self._key, self._name = address, key, name
        self._target, self._size, self._spare = target, size, spare
        self._links: list[socket.socket] = []
        self._cancelled = threading.Event()
        self._counting = threading.Lock()
        self._received = 0

    def cancel(self) -> None:
        """Have :meth:`run` end soon with ``ConnectionAbortedError``; from any thread."""
        self._cancelled.set()
        for link in list(self._links):
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
            self._links.clear()
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
        with self._connect() as link:
            offer = self._ask(link)
            if self._size is not None and offer.size != self._size:
                why = f"has {offer.size} bytes at {self._address[0]}, and {self._size} were written"
                raise BadImage(self._name, why)
            return offer.size, self._receive(link, offer)

    def _connect(self) -> socket.socket:
        link = socket.create_connection(self._address, timeout=bulk.PATIENCE_S)
        self._links.append(link)
        if self._cancelled.is_set():
            link.close()
            raise ConnectionAbortedError("cancelled")
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bulk.be_patient(link)
        return link

    def _ask(self, link: socket.socket) -> bulk.Offer:
        self._prove(link)
        bulk.send_frame(link, bulk.Ask(name=self._name))
        offer = bulk.receive_frame(link, bulk.Offer)
        if offer is None:
            raise ConnectionError("the peer hung up")
        if offer.refusal:
            raise FileNotFoundError(offer.refusal)
        return offer

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
            maps=self._maps,
        )
        try:
            missing = part.missing()
            half = len(missing) // 2 if len(missing) * offer.chunk >= _TWO_STREAMS else 0
            beside = threading.Thread(
                target=self._receive_beside, args=(offer, part, missing[:half]), daemon=True
            )
            if half:
                beside.start()
            try:
                self._receive_chunks(link, part, missing[half:])
            finally:
                if half:
                    beside.join()
            bad = len(part.missing())
            if not bad:
                part.complete()
            return bad
        except StorageFull:  # others need the room more than what has come
            forget_partial(self._target)
            raise
        finally:
            part.close()

    def _receive_beside(self, offer: bulk.Offer, part: PartialFile, chunks: list[int]) -> None:
        """Some of the chunks through a second connection: one thread would be the limit. What
        fails here is missing, and is asked for again."""
        try:
            with self._connect() as link:
                if self._ask(link) == offer:
                    self._receive_chunks(link, part, chunks)
        except (OSError, StorageFull):
            return

    def _receive_chunks(self, link: socket.socket, part: PartialFile, chunks: list[int]) -> None:
        if chunks:
            bulk.send_frame(link, bulk.Want(ranges=bulk.ranges_of(chunks)))
        room = memoryview(bytearray(bulk.TAKEN))
        for index in chunks:
            self._receive_chunk(link, part, index, room)

    def _receive_chunk(
        self, link: socket.socket, part: PartialFile, index: int, room: memoryview
    ) -> None:
        crc = 0
        start, end = part.bounds(index)
        space = part.space(index)
        try:
            for at in range(start, end, len(room)):
                size = min(len(room), end - at)
                whole, first = (room, 0) if space is None else (space, at - start)
                with whole[first : first + size] as piece:
                    bulk.fill(link, piece)
                    crc = crc32c(piece, crc)
                    if space is None:
                        part.write(at, piece)
        finally:
            if space is not None:
                space.release()
        number, said = bulk.TRAILER.unpack(bulk.receive(link, bulk.TRAILER.size))
        if number != index:
            raise ConnectionError(f"chunk {number} came instead of chunk {index}")
        if said == crc:
            part.done(index, crc)
            with self._counting:
                self._received += end - start
