"""What a client will say of the API's certificate: a handshake within this process."""

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from plexrl_slurm.cli.doctor import FAIL, OK, WARN, Said

_DAY = 86_400


def look_at(cert: Path, key: Path, authority: Path | None, url: str) -> Iterator[Said]:
    """Key, chain, name and end date."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        yield (
            FAIL,
            f"{cert} and {key} cannot be used together ({error.strerror or error}): both must be "
            f"PEM, and the key that of the certificate",
        )
        return
    try:
        client = ssl.create_default_context(cafile=authority)
    except (ssl.SSLError, OSError) as error:
        yield (
            FAIL,
            f"partition.tls_ca: {authority} cannot be read ({error.strerror or error}): name a PEM "
            f"file with the authority",
        )
        return
    host = urlsplit(url).hostname
    client.check_hostname = host is not None
    if host is None:
        yield WARN, "partition.url is not set, so that the name in the certificate was not compared"
    try:
        found = _shake_hands(server, client, host)
    except ssl.SSLCertVerificationError as error:
        yield (
            FAIL,
            f"clients will not trust {cert} for {host or 'any name'} ({error.verify_message}): get "
            f"a certificate for that name, or correct partition.url and tls_ca",
        )
        return
    left = ssl.cert_time_to_seconds(str(found["notAfter"])) - time.time()
    until = f"{cert} is good until {found['notAfter']}"
    if left < 14 * _DAY:
        yield WARN, f"{until}: renew it, then restart the daemon"
    else:
        yield OK, until


def _shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str | None
) -> dict[str, object]:
    """The certificate that the client accepted."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(down, up, server_hostname=host)
    answers = server.wrap_bio(up, down, server_side=True)
    for _ in range(10):
        if all([_goes_on(asks), _goes_on(answers)]):
            break
    found: dict[str, object] = dict(asks.getpeercert() or {})
    return found


def _goes_on(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
