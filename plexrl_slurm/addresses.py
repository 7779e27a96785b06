"""Addresses in a partition's settings: the database's URL, where the API listens, TLS."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plexrl_slurm.tomlcheck import Report, absolute, as_text


def database_url(value: object, folder: Path) -> str:
    """An SQLAlchemy URL; a relative SQLite path is relative to the settings file."""
    given = as_text(value)
    example = '"sqlite:///plexrl.sqlite" or "postgresql+psycopg://user@host/database"'
    # What was written is not repeated: it may hold a password.
    try:
        parts = urlsplit(given)
        _ = parts.port
    except ValueError:
        raise ValueError(f"it is not a URL (bad host or port): write {example}") from None
    kind = parts.scheme.partition("+")[0]
    if kind == "sqlite":
        place = given.partition("://")[2]
        if not place.startswith("/") or place in ("/", "/:memory:"):
            raise ValueError(f"a database in memory is lost with the daemon: write {example}")
        return f"{parts.scheme}:///{absolute(folder, place[1:])}"
    if kind != "postgresql":
        raise ValueError(f"it does not begin with sqlite: or postgresql: write {example}")
    if not parts.path.strip("/"):
        raise ValueError(f"it names no database: write {example}")
    return given


def listen_address(value: object) -> tuple[str, int]:
    """``host:port``."""
    given = as_text(value)
    host, _, port = given.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(
            f'{given!r} is not host:port: write "127.0.0.1:8421" (port 0: any free one)'
        )
    try:
        is_loopback(host)
    except ValueError:
        raise ValueError(
            f'{host!r} is not an IP address: write "127.0.0.1:{port}" or "[::1]:{port}"'
        ) from None
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; ``ValueError`` if it is no address."""
    if host in ("127.0.0.1", "localhost", "::1"):
        return True
    import ipaddress  # takes longer than to read the whole file

    return ipaddress.ip_address(host).is_loopback


def public_url(value: object) -> str:
    """``https://host:port``, without a path."""
    given = as_text(value).rstrip("/")
    try:
        parts = urlsplit(given)
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.path
        _ = parts.port
    except ValueError:
        good = False
    if not good:
        raise ValueError(f'{given!r} is not a URL: write "https://HOST:PORT"')
    return given


def url_of(values: Mapping[str, Any]) -> str:
    """Where clients find the API; "" if the daemon chooses the port."""
    host, port = values.get("listen_host", "127.0.0.1"), values.get("listen_port", 8421)
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if 'tls_cert' in values else 'http'}://{shown}:{port}" if port else ""


def check_tls(report: Report, values: Mapping[str, Any]) -> None:
    """Tokens do not leave this machine in the clear."""
    if ("tls_cert" in values) != ("tls_key" in values):
        report.bad("partition.tls_cert", "tls_cert and tls_key belong together: give both")
    host, port = values.get("listen", ("127.0.0.1", 0))
    if not is_loopback(host) and "tls_cert" not in values:
        report.bad(
            "partition.listen",
            f"{host} can be reached from outside, and the API sends tokens without TLS: give "
            f'tls_cert and tls_key, or write "127.0.0.1:{port}"',
        )
