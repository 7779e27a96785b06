"""Serves the application on a TCP port and on a unix socket, in the loop that runs now."""

import asyncio
import errno
import resource
import socket
import ssl
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import uvicorn
from fastapi import FastAPI

from plexrl_slurm.api.auth import UnixPeer
from plexrl_slurm.api.futures import LongPolls
from plexrl_slurm.core.errors import BadInput

#: The SDK opens over a thousand connections at once.
BACKLOG: Final = 4096
#: Longer than the SDK keeps an idle connection, so that it never writes into a closing one.
KEEP_ALIVE_S: Final = 120
#: What a stop waits for answers under way; long polls are let go at once.
GRACE_S: Final = 5
#: Open files that so many connections may need.
_FILES: Final = 65_536


def _http_protocol() -> Any:
    """The faster of the two HTTP parsers, if this machine has it."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol
    return HttpToolsProtocol


_Http = _http_protocol()


class _PeerProtocol(_Http):  # type: ignore[misc,valid-type]
    """HTTP that knows who is at the other end of a unix socket (``request.state.unix_peer``)."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        end = transport.get_extra_info("socket")
        if end is not None and end.family == socket.AF_UNIX:
            credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, uid, gid = struct.unpack("3i", credentials)
            peer = UnixPeer(pid=pid, uid=uid, gid=gid)
            # Copied into the scope of every request on this connection.
            self.app_state: dict[str, Any] = {**self.app_state, "unix_peer": peer}


class _Server(uvicorn.Server):
    """Signals belong to the daemon."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files of the API's certificate (with its chain) and key, PEM."""

    cert: Path
    key: Path

    def check(self) -> None:
        """Raise ``BadInput`` if they are not a certificate and its own key, kept secret."""
        for what, path in (("tls_cert", self.cert), ("tls_key", self.key)):
            try:
                mode = path.stat().st_mode
                path.read_bytes()
            except OSError as error:
                raise BadInput(
                    f"{what} {path} cannot be read ({error.strerror}): name a PEM file that the "
                    f"service user may read"
                ) from error
        if mode & stat.S_IROTH:
            raise BadInput(f"tls_key {self.key} can be read by everybody: chmod 600 it")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=self._no_password)
        except ssl.SSLError as error:
            raise BadInput(self._why_not(error)) from error

    def _no_password(self) -> NoReturn:
        """OpenSSL would ask on a terminal."""
        raise BadInput(
            f"tls_key {self.key} has a passphrase, and the daemon has nobody to ask for it: "
            f"write it without one (openssl pkey -in KEY -out NEWKEY)"
        )

    def _why_not(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"tls_key {self.key} is not the key of tls_cert {self.cert}: name the pair"
        return (
            f"tls_cert {self.cert} and tls_key {self.key} are no certificate and key in PEM form "
            f"({error.reason or error}): convert them, or name the right files"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A running API."""

    #: The TCP port that is bound.
    port: int
    socket_path: Path
    polls: LongPolls
    servers: tuple[uvicorn.Server, ...]
    tasks: tuple[asyncio.Task[None], ...]

    async def stop(self) -> None:
        """Accept no more, answer what can be answered, close, remove the socket."""
        self.polls.stop()
        for server in self.servers:
            server.should_exit = True
        await asyncio.gather(*self.tasks)
        self.socket_path.unlink(missing_ok=True)


async def serve(
    app: FastAPI, *, host: str, port: int, socket_path: Path, tls: Tls | None = None
) -> Serving:
    """Listen on ``host:port`` (0: any free port) and ``socket_path``; raises ``BadInput``.

    With ``tls`` the port speaks HTTPS only.
    Everybody may connect to the socket: what they may do depends on their uid.
    """
    if tls is not None:
        tls.check()
    _allow_many_files()
    tcp = _listen_tcp(host, port)
    try:
        unix = _listen_unix(socket_path)
    except BaseException:
        tcp.close()
        raise
    servers = (_Server(_config(app, tls)), _Server(_config(app, None)))
    tasks = tuple(
        asyncio.create_task(server.serve(sockets=[listener]))
        for server, listener in zip(servers, (tcp, unix), strict=True)
    )
    bound: int = tcp.getsockname()[1]
    while not all(server.started for server in servers):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.001)
    return Serving(
        port=bound, socket_path=socket_path, polls=app.state.polls, servers=servers, tasks=tasks
    )


def _config(app: FastAPI, tls: Tls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_certfile=None if tls is None else tls.cert,
        ssl_keyfile=None if tls is None else tls.key,
        http=_PeerProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadInput(
            f"cannot listen on {host}:{port} ({error.strerror or error}): stop what listens there, "
            "or set another listen_port"
        ) from error
    # asyncio does this only to sockets made with an explicit protocol number; without it every
    # answer waits 40 ms for the client's acknowledgement. Connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _listen_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadInput(
            f"cannot listen on {path} ({error.strerror or error}): choose a shorter state_dir "
            "that the service user may write"
        ) from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a daemon that died; raises ``BadInput`` if one answers."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise BadInput(f"{path} is in the way and is no socket: move it away")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        refused = probe.connect_ex(str(path))
    if refused not in (errno.ECONNREFUSED, errno.ENOENT):
        raise BadInput(f"another daemon serves {path}: stop it first, or use another state_dir")
    path.unlink(missing_ok=True)
