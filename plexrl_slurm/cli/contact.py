"""One HTTP exchange with a partition's daemon: by its unix socket, or by TCP with MUNGE.

Written out: importing an HTTP client takes longer than everything that ``plexrl sbatch`` does.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from plexrl_slurm.core.errors import (
    BadConfig,
    BadInput,
    CredentialsUnavailable,
    DaemonUnavailable,
    Denied,
)
from plexrl_slurm.whereabouts import Site

if TYPE_CHECKING:
    import ssl

#: ``socket`` or ``http``: take no other way; unset: the socket if somebody listens there.
CONTACT_VARIABLE: Final = "PLEXRL_CONTACT"
_CONNECT_S: Final = 5.0
_PIECE: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    #: Socket or URL, for messages.
    where: str


class Contact:
    """The ways to one partition's daemon."""

    def __init__(self, site: Site, *, timeout_s: float) -> None:
        self._site = site
        self._timeout_s = timeout_s

    def ask(self, method: str, target: str, body: bytes) -> Answer:
        """Send one request; raises ``DaemonUnavailable`` and what else may be in the way."""
        until = time.monotonic() + self._timeout_s
        forced = os.environ.get(CONTACT_VARIABLE, "")
        if forced not in ("", "socket", "http"):
            raise BadInput(f"{CONTACT_VARIABLE}={forced!r}: write socket or http, or unset it")
        site = self._site
        if forced != "http":
            try:
                end = self._by_socket()
            except (DaemonUnavailable, Denied):
                if forced == "socket" or site.backend != "slurm" or not site.url:
                    raise
            else:
                with end:
                    return self._exchange(
                        end, _request(method, target, body, host="plexrl"), until, str(site.socket)
                    )
        return self._by_url(method, target, body, until)

    # -- by the socket -----------------------------------------------------------------------

    def _by_socket(self) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.settimeout(_CONNECT_S)
            end.connect(str(self._site.socket))
        except OSError as error:
            end.close()
            if isinstance(error, PermissionError):
                raise Denied(
                    f"you may not open {self._site.socket}: ask the admin of partition "
                    f"{self._site.partition!r} to admit you"
                ) from error
            raise self._unavailable(str(self._site.socket)) from error
        return end

    # -- by the URL --------------------------------------------------------------------------

    def _by_url(self, method: str, target: str, body: bytes, until: float) -> Answer:
        site = self._site
        if not site.url:
            raise BadConfig(
                str(site.path),
                (
                    "the daemon chooses its port, so that it is found by its socket only: give "
                    'partition.url, or a port in partition.listen, such as "127.0.0.1:8421"',
                ),
            )
        parts = urlsplit(site.url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        trust = self._trust() if parts.scheme == "https" else None
        try:
            end = socket.create_connection((host, port), timeout=_CONNECT_S)
        except OSError as error:
            raise self._unavailable(site.url) from error
        with end:
            secured = end if trust is None else self._secured(end, trust, host)
            with secured:
                # Only now: a daemon that is down is the first thing to know.
                request = _request(
                    method,
                    target,
                    body,
                    host=parts.netloc,
                    credential=self._credential(method, target, body),
                )
                return self._exchange(secured, request, until, site.url)

    def _trust(self) -> "ssl.SSLContext":
        import ssl

        authority = self._site.tls_ca
        try:
            return ssl.create_default_context(cafile=authority)
        except OSError as error:
            problem = f"partition.tls_ca: {authority} cannot be used ({error.strerror or error})"
            raise BadConfig(
                str(self._site.path), (f"{problem}: name a PEM file with the authority",)
            ) from error

    def _secured(self, end: socket.socket, trust: "ssl.SSLContext", host: str) -> socket.socket:
        import ssl

        try:
            return trust.wrap_socket(end, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise BadConfig(
                str(self._site.path),
                (
                    f"partition.url: the certificate of {self._site.url} is not to be trusted "
                    f"({error.verify_message}): set partition.tls_ca, or ask your admin",
                ),
            ) from error
        except ssl.SSLError as error:
            raise BadConfig(
                str(self._site.path),
                (
                    f"partition.url: {self._site.url} speaks no TLS ({error.reason}): "
                    f"correct the URL, or ask your admin",
                ),
            ) from error
        except OSError as error:
            raise self._unavailable(self._site.url) from error

    def _credential(self, method: str, target: str, body: bytes) -> str:
        from plexrl_slurm.api.signing import statement

        slurm = self._site.slurm
        return credential(
            statement(method, target, body), socket_path=slurm.munge_socket if slurm else None
        )

    # -- both --------------------------------------------------------------------------------

    def _exchange(self, end: socket.socket, request: bytes, until: float, where: str) -> Answer:
        data = bytearray()
        try:
            _set_patience(end, until)
            end.sendall(request)
            while piece := end.recv(_PIECE):
                data += piece
                _set_patience(end, until)
        except OSError as error:
            raise self._unavailable(where) from error
        head, found, body = bytes(data).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        status = lines[0].split(b" ")[1:2]
        lengths = [
            line.partition(b":")[2].strip()
            for line in lines
            if line.lower().startswith(b"content-length:")
        ]
        whole = found and all(length == str(len(body)).encode() for length in lengths)
        if not (whole and lines[0].startswith(b"HTTP/1.") and status and status[0].isdigit()):
            raise self._unavailable(where)
        return Answer(status=int(status[0]), body=body, where=where)

    def _unavailable(self, where: str) -> DaemonUnavailable:
        return DaemonUnavailable(self._site.partition, where)


def credential(payload: str, *, socket_path: Path | None, timeout_s: float = _CONNECT_S) -> str:
    """What ``munge`` makes of ``payload`` for this user; raises ``CredentialsUnavailable``."""
    import subprocess

    argv = ["munge", *([] if socket_path is None else [f"--socket={socket_path}"])]
    here = os.uname().nodename
    try:
        made = subprocess.run(
            argv,
            input=payload.encode("latin-1"),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CredentialsUnavailable(
            f"munge on {here} does not answer within {timeout_s:g} s: "
            f"ask your admin to restart munge there"
        ) from error
    except OSError as error:
        raise CredentialsUnavailable(
            f"munge cannot be run on {here} ({error.strerror}), and from here the service knows "
            f"users by MUNGE only: ask your admin to install it"
        ) from error
    if made.returncode != 0:
        words = made.stderr.decode(errors="replace").strip().removeprefix("munge: Error: ")
        raise CredentialsUnavailable(
            f"munge on {here} makes no credential ({words or made.returncode}): "
            f"ask your admin to start munge there"
        )
    return made.stdout.decode().strip()


def _request(
    method: str, target: str, body: bytes, *, host: str, credential: str | None = None
) -> bytes:
    """As HTTP/1.0, so that the answer comes in one piece and ends with the connection."""
    lines = [f"{method} {target} HTTP/1.0", f"Host: {host}", "Accept: application/json"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if credential is not None:
        lines.append(f"Authorization: Munge {credential}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def _set_patience(end: socket.socket, until: float) -> None:
    end.settimeout(max(until - time.monotonic(), 0.001))
