"""HTTPS on the API's port, and files that cannot be used for it."""

import os
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from plexrl_slurm.api.server import Tls
from plexrl_slurm.core.errors import BadInput
from tests.api.conftest import run_api
from tests.api.fake_service import TOKEN_A
from tests.certificates import make_certificate


def test_the_port_speaks_https_only_and_the_socket_stays_as_it_is(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path / "tls")
    with run_api(tmp_path, tls=tls) as api:
        url = f"https://127.0.0.1:{api.serving.port}"
        headers = {"X-API-Key": TOKEN_A}
        trusted = ssl.create_default_context(cafile=tls.cert)
        with httpx.Client(verify=trusted, trust_env=False, headers=headers) as http:
            assert http.get(f"{url}/plexrl/v1/nodes").json()["job"] == 1
        with httpx.Client(trust_env=False) as http:
            with pytest.raises(httpx.ConnectError, match="self-signed certificate"):
                http.get(f"{url}/plexrl/v1/healthz")
            with pytest.raises(httpx.RemoteProtocolError):
                http.get(f"{api.url}/plexrl/v1/healthz")
        with api.unix() as http:
            assert http.get("/plexrl/v1/nodes").json()["uid"] == os.getuid()


def _missing(tls: Tls, folder: Path) -> Tls:
    return Tls(cert=folder / "none.pem", key=tls.key)


def _folder(tls: Tls, folder: Path) -> Tls:
    return Tls(cert=tls.cert, key=folder)


def _foreign(tls: Tls, folder: Path) -> Tls:
    return Tls(cert=tls.cert, key=make_certificate(folder / "other").key)


def _swapped(tls: Tls, _: Path) -> Tls:
    tls.cert.chmod(0o600)
    return Tls(cert=tls.key, key=tls.cert)


def _open(tls: Tls, _: Path) -> Tls:
    tls.key.chmod(0o644)
    return tls


def _garbage(tls: Tls, _: Path) -> Tls:
    tls.key.write_text("no key")
    return tls


def _locked(tls: Tls, _: Path) -> Tls:
    lock = ["openssl", "pkey", "-in", str(tls.key), "-aes256", "-passout", "pass:secret"]
    locked = subprocess.run(lock, check=True, capture_output=True, timeout=60).stdout
    tls.key.write_bytes(locked)
    return tls


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_missing, "tls_cert .*none.pem cannot be read .No such file"),
        (_folder, "tls_key .* cannot be read .Is a directory"),
        (_foreign, "is not the key of tls_cert .*name the pair"),
        (_swapped, "are no certificate and key in PEM form"),
        (_garbage, "are no certificate and key in PEM form"),
        (_locked, "has a passphrase, "),
        (_open, "can be read by everybody: chmod 600 it"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_anything_listens(
    spoil: Callable[[Tls, Path], Tls], sentence: str, tmp_path: Path
) -> None:
    tls = spoil(make_certificate(tmp_path / "tls"), tmp_path)
    with pytest.raises(BadInput, match=sentence), run_api(tmp_path, tls=tls):
        pass
    assert not (tmp_path / "api.sock").exists()
