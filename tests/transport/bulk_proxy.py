"""A wire between two agents that cuts, damages, holds or slows what passes."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

#: Given the bytes from the server that have passed on this connection; returns what passes of
#: the next ones, or ``None`` to cut the connection.
Meddle = Callable[[int, bytes], bytes | None]


class Proxy:
    """Listens at ``address``; forwards each connection to where ``target`` points then."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        #: One for each connection in turn; later ones pass unharmed.
        self.meddles: list[Meddle] = []
        #: Bytes from the server, over all connections.
        self.passed = 0
        self.connections = 0
        #: Once so many bytes have passed, no more do until :meth:`release`.
        self.hold_at: int | None = None
        self.held, self._go = threading.Event(), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._links: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def release(self) -> None:
        """What was held passes."""
        self.hold_at = None
        self._go.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for link in list(self._links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            meddle = self.meddles.pop(0) if self.meddles else lambda _, data: data
            try:
                far = socket.create_connection(self.target, timeout=10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._links |= {near, far}
            for work in (
                lambda n=near, f=far: self._pass(n, f, None),
                lambda n=near, f=far, m=meddle: self._pass(f, n, m),
            ):
                self._threads.append(threading.Thread(target=work))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, meddle: Meddle | None) -> None:
        here = 0
        with suppress(OSError):
            while data := source.recv(64 << 10):
                size = len(data)
                if meddle is not None:
                    out = meddle(here, data)
                    if out is None:
                        break
                    data = out
                    if self.hold_at is not None and self.passed >= self.hold_at:
                        self.held.set()
                        self._go.wait(60)
                    self.passed += size
                here += size
                sink.sendall(data)
        for link in (source, sink):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


def cut_after(limit: int) -> Meddle:
    """The connection breaks after so many bytes."""
    return lambda here, data: None if here >= limit else data[: max(0, limit - here)] or None


def flip_at(place: int) -> Meddle:
    """The byte at this place of the connection arrives as another."""

    def meddle(here: int, data: bytes) -> bytes:
        if not here <= place < here + len(data):
            return data
        changed = bytearray(data)
        changed[place - here] ^= 1
        return bytes(changed)

    return meddle
