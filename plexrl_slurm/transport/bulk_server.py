"""The giving end of a bulk transfer: one TCP port, for those who hold the agent key."""

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

from crc32c import crc32c

from plexrl_slurm.logs import say
from plexrl_slurm.transport import bulk

log = logging.getLogger(__name__)

#: Transfers at once; more wait.
_TRANSFERS: Final = 8
#: Connections that have not proved anything yet; more are closed.
_STRANGERS: Final = 32
#: Files whose checksums are remembered.
_REMEMBERED: Final = 4
#: In which a stranger has to prove it.
_PROOF_S: Final = 5.0


class BulkServer:
    """Accepts in the event loop; what is proved and asked is served by threads."""

    def __init__(self, key: bytes, find: Callable[[str], Path | None]) -> None:
        """``find``: the file of a name, or ``None``; called by threads."""
        self._key, self._find = key, find
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        self._open: set[socket.socket] = set()
        #: By identity; the file that was asked for last is the last.
        self._sums: dict[str, dict[int, int]] = {}
        self._summing = threading.Lock()
        self._threads = ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="bulk")

    async def start(self, host: str) -> int:
        """Listen at any free port of ``host``; returns it. Raises ``OSError``."""
        self._socket = socket.create_server((host, 0), backlog=64)
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket))
        return int(self._socket.getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and hang up on everybody."""
        tasks = [*self._greeting, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for link in list(self._open):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def prepare(self, name: str) -> None:
        """Sum a file up in the background, so that who asks for it waits for its bytes only."""
        with suppress(RuntimeError):  # it is closed
            self._threads.submit(self._prepare, name)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                link, peer = await loop.sock_accept(listening)
            except OSError as problem:  # too many open files
                say(log, "bulk_not_accepted", reason=problem)
                await asyncio.sleep(1)
                continue
            if len(self._greeting) >= _STRANGERS:
                link.close()
                continue
            task = asyncio.create_task(self._greet(link, str(peer[0])))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, link: socket.socket, peer: str) -> None:
        """Let a stranger prove that it may ask, then have a thread serve it."""
        link.setblocking(False)
        try:
            async with asyncio.timeout(_PROOF_S):
                proved = await self._prove(link)
        except (OSError, TimeoutError):
            proved = False
        except asyncio.CancelledError:
            link.close()
            raise
        if not proved:
            say(log, "bulk_stranger", peer=peer)
            link.close()
            return
        self._open.add(link)
        self._threads.submit(self._serve, link, peer)

    async def _prove(self, link: socket.socket) -> bool:
        loop, own = asyncio.get_running_loop(), secrets.token_bytes(bulk.NONCE_BYTES)
        await loop.sock_sendall(link, bulk.GREETING + own)
        said = b""
        while len(said) < bulk.NONCE_BYTES + bulk.PROOF_BYTES:
            more = await loop.sock_recv(link, bulk.NONCE_BYTES + bulk.PROOF_BYTES - len(said))
            if not more:
                return False
            said += more
        other, proof = said[: bulk.NONCE_BYTES], said[bulk.NONCE_BYTES :]
        if not bulk.same(proof, bulk.proof(self._key, b"client", own, other)):
            return False
        await loop.sock_sendall(link, bulk.proof(self._key, b"server", other, own))
        return True

    # -- in a thread -------------------------------------------------------------------------
    def _serve(self, link: socket.socket, peer: str) -> None:
        try:
            link.settimeout(bulk.PATIENCE_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = bulk.receive_frame(link, bulk.Ask)
            if asked is not None:
                self._give(link, asked.name)
        except OSError as problem:  # it asks again
            say(log, "bulk_broken", peer=peer, reason=problem)
        except Exception:
            log.exception("a bulk transfer failed")
        finally:
            self._open.discard(link)
            link.close()

    def _prepare(self, name: str) -> None:
        with suppress(OSError), self._open_file(name) as file:
            identity, size = _identity(file)
            chunks = _Chunks(file, size, self._sums_of(identity))
            for index in range(chunks.count):
                chunks.checksum(index)

    def _open_file(self, name: str) -> FileIO:
        """Whatever takes its name later. Raises ``FileNotFoundError``."""
        path = self._find(name)
        if path is None:
            raise FileNotFoundError(name)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return FileIO(descriptor, "rb")

    def _give(self, link: socket.socket, name: str) -> None:
        try:
            opened = self._open_file(name)
        except FileNotFoundError:
            bulk.send_frame(link, bulk.Offer(refusal=f"there is no {name} here"))
            return
        with opened as file:
            identity, size = _identity(file)
            bulk.send_frame(link, bulk.Offer(size=size, chunk=bulk.CHUNK, identity=identity))
            chunks = _Chunks(file, size, self._sums_of(identity))
            while (want := bulk.receive_frame(link, bulk.Want)) is not None:
                for first, after in want.ranges:
                    for index in range(max(0, first), min(after, chunks.count)):
                        chunks.send(link, index)

    def _sums_of(self, identity: str) -> dict[int, int]:
        """Checksums of a file's chunks, as far as they are known: several nodes may want it."""
        with self._summing:
            sums = self._sums.pop(identity, {})
            self._sums[identity] = sums
            while len(self._sums) > _REMEMBERED:
                self._sums.pop(next(iter(self._sums)))
            return sums


def _identity(file: FileIO) -> tuple[str, int]:
    """What stands for a file's bytes, and how many they are."""
    found = os.fstat(file.fileno())
    return f"{found.st_dev}.{found.st_ino}.{found.st_mtime_ns}.{found.st_size}", found.st_size


class _Chunks:
    """One file that is being given. Never through a mapping: a file that somebody cuts short
    would end the process."""

    def __init__(self, file: FileIO, size: int, sums: dict[int, int]) -> None:
        self._file, self._size, self._sums = file, size, sums
        self.count = -(-size // bulk.CHUNK)
        self._piece = memoryview(bytearray(bulk.PIECE))

    def send(self, link: socket.socket, index: int) -> None:
        """The chunk, then its number and checksum."""
        at, end = self._bounds(index)
        crc = self.checksum(index)
        if link.sendfile(self._file, at, end - at) < end - at:
            raise ConnectionError(f"the file has fewer than {self._size} bytes by now")
        link.sendall(bulk.TRAILER.pack(index, crc))

    def checksum(self, index: int) -> int:
        """Of a chunk; remembered."""
        crc = self._sums.get(index)
        if crc is None:
            crc = self._sums[index] = self._sum(*self._bounds(index))
        return crc

    def _bounds(self, index: int) -> tuple[int, int]:
        return index * bulk.CHUNK, min((index + 1) * bulk.CHUNK, self._size)

    def _sum(self, at: int, end: int) -> int:
        crc = 0
        while at < end:
            got = os.preadv(self._file.fileno(), [self._piece[: end - at]], at)
            if not got:
                raise ConnectionError(f"the file has shrunk to {at} bytes")
            crc = crc32c(self._piece[:got], crc)
            at += got
        return crc
