"""The CLI's ways to the daemon: socket, HTTP and HTTPS with MUNGE; and what may be in the way."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl_slurm.api.munge import Munge
from plexrl_slurm.api.server import Tls
from plexrl_slurm.api.service import JobSubmission
from plexrl_slurm.cli.client import Client, Refused
from plexrl_slurm.core.errors import (
    BadConfig,
    BadInput,
    CredentialsUnavailable,
    DaemonUnavailable,
    NotAdmitted,
    PlexError,
)
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.settings import Site
from plexrl_slurm.slurm_settings import SlurmSettings
from tests.api.conftest import Api, make_service, run_api
from tests.certificates import make_certificate
from tests.munge import PrivateMunge, private_munge

pytestmark = pytest.mark.munge


@pytest.fixture(scope="module")
def key_keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateMunge]:
    with private_munge(tmp_path_factory.mktemp("m")) as munge:
        yield munge


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served(
    key_keeper: PrivateMunge, tls: Tls, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("a")
    with run_api(folder, munge=Munge(key_keeper.socket), tls=tls) as api:
        yield api


@pytest.fixture
def api(served: Api, tmp_path: Path) -> Api:
    served.service = served.app.state.service = make_service(tmp_path)
    return served


@pytest.fixture
def site(api: Api, tls: Tls, key_keeper: PrivateMunge, tmp_path: Path) -> Site:
    """As a login node sees the partition: no socket, a URL, and a munged."""
    return Site(
        partition="rlvr",
        state_dir=tmp_path,
        database_url="",
        backend="slurm",
        path=tmp_path / "plexrl.toml",
        url=f"https://127.0.0.1:{api.serving.port}",
        tls_ca=tls.cert,
        slurm=SlurmSettings(munge_socket=key_keeper.socket),
    )


@pytest.fixture(autouse=True)
def no_way_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLEXRL_CONTACT", raising=False)


def with_socket(site: Site, api: Api) -> Site:
    return replace(site, state_dir=api.serving.socket_path.parent)


def test_without_a_socket_a_login_node_asks_over_https(site: Site, api: Api) -> None:
    client = Client(site)
    assert client.health() == {"status": "ok"}
    assert client.nodes()["uid"] == os.getuid()
    body = {"partition": "rlvr", "name": "count", "script": "job.sh", "models": ["tiny"]}
    assert client.submit(body)["job_id"] == 7
    assert client.jobs(user="ann b&c", ended=True)[0]["user"] == "ann b&c"
    client.cancel(7, reason="enough")
    client.cancel(7, reason="enough", keep_slurm_job=True)
    (_, *ends) = api.service.asked
    assert ends == [("cancel_job", False), ("cancel_job", True)]


def test_a_name_of_any_bytes_is_sent_without_what_is_no_letter(site: Site, api: Api) -> None:
    name = os.fsdecode("n\u00e4me ".encode() + b"\xff")
    Client(site).submit({"partition": "rlvr", "name": name, "script": "s", "models": ["tiny"]})
    ((_, job),) = api.service.asked
    assert isinstance(job, JobSubmission) and job.name == "n\u00e4me ?"


def test_a_refusal_is_told_as_over_the_socket(site: Site) -> None:
    with pytest.raises(Refused, match="offers: tiny") as refused:
        Client(site).submit({"partition": "p", "name": "n", "script": "s", "models": ["huge"]})
    assert (refused.value.exit_code, refused.value.status) == (65, 404)


def test_the_socket_is_preferred_and_can_be_forbidden(
    site: Site, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = replace(with_socket(site, api), url="https://127.0.0.1:1")
    assert Client(near).nodes()["uid"] == os.getuid()
    monkeypatch.setenv("PLEXRL_CONTACT", "http")
    with pytest.raises(DaemonUnavailable, match=r"https://127\.0\.0\.1:1"):
        Client(near).nodes()
    monkeypatch.setenv("PLEXRL_CONTACT", "socket")
    with pytest.raises(DaemonUnavailable, match=r"api\.sock"):
        Client(site).nodes()
    monkeypatch.setenv("PLEXRL_CONTACT", "pigeon")
    with pytest.raises(BadInput, match="PLEXRL_CONTACT='pigeon': write socket or http"):
        Client(site).nodes()


def test_a_partition_without_slurm_is_reached_by_its_socket_only(site: Site) -> None:
    with pytest.raises(DaemonUnavailable, match=r"api\.sock"):
        Client(replace(site, backend="local")).nodes()


def test_a_daemon_that_chose_its_port_has_no_url(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DaemonUnavailable, match=r"api\.sock"):
        Client(replace(site, url="")).nodes()
    monkeypatch.setenv("PLEXRL_CONTACT", "http")
    with pytest.raises(BadConfig, match=r"give partition\.url") as problem:
        Client(replace(site, url="")).nodes()
    assert problem.value.exit_code == 78


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({"tls_ca": None}, "self-signed certificate.: set partition.tls_ca", id="CA"),
        pytest.param({"tls_ca": Path("/none")}, "tls_ca: /none cannot be used", id="no CA file"),
        pytest.param({"url": "https://localhost:{port}"}, "not valid for 'localhost'", id="name"),
    ],
)
def test_a_certificate_that_cannot_be_trusted_is_no_reason_to_go_on(
    site: Site, api: Api, change: dict[str, object], sentence: str
) -> None:
    if "url" in change:
        change = {"url": str(change["url"]).format(port=api.serving.port)}
    with pytest.raises(BadConfig, match=sentence) as problem:
        Client(replace(site, **change)).nodes()  # type: ignore[arg-type]
    assert problem.value.exit_code == 78
    assert str(problem.value).startswith(f"{site.path}: partition.")


def _answering(words: bytes) -> Callable[[socket.socket], None]:
    def answer(end: socket.socket) -> None:
        end.recv(1 << 16)
        end.sendall(words)

    return answer


@pytest.mark.parametrize(
    ("words", "scheme", "kind", "sentence"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "http", DaemonUnavailable, "answer"),
        (b"SSH-2.0-OpenSSH\r\n", "http", DaemonUnavailable, "does not answer at http:"),
        (b"", "http", DaemonUnavailable, "does not answer at http:"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "http", Refused, "answered 502 without"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "https", BadConfig, "speaks no TLS"),
    ],
    ids=["cut short", "another service", "silence", "a proxy", "no TLS"],
)
def test_what_is_no_answer_of_ours_is_told(
    site: Site, words: bytes, scheme: str, kind: type[PlexError], sentence: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            end, _ = listener.accept()
            with end:
                _answering(words)(end)

        thread = threading.Thread(target=serve)
        thread.start()
        strange = replace(site, url=f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(kind, match=sentence):
            Client(strange).nodes()
        thread.join()


def test_a_daemon_that_hangs_is_left_after_the_time_limit(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        strange = replace(site, url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(DaemonUnavailable):
            Client(strange, timeout_s=0.2).nodes()


def test_a_login_node_without_munge_says_so(site: Site, tmp_path: Path) -> None:
    lost = replace(site, slurm=SlurmSettings(munge_socket=tmp_path / "none"))
    with pytest.raises(CredentialsUnavailable, match=r"Did you start munged.*start munge there"):
        Client(lost).nodes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(CredentialsUnavailable, match="munge cannot be run on") as problem:
            Client(site).nodes()
    assert problem.value.exit_code == 75


def test_a_munged_that_hangs_is_left_after_the_time_limit(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from plexrl_slurm.cli.contact import credential

    with private_munge(tmp_path_factory.mktemp("m")) as stuck:
        stuck.freeze()
        with pytest.raises(CredentialsUnavailable, match=r"does not answer within 0\.2 s"):
            credential("x", socket_path=stuck.socket, timeout_s=0.2)


def test_the_services_munge_with_another_key_refuses(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with private_munge(tmp_path_factory.mktemp("m")) as foreign:
        other = replace(site, slurm=SlurmSettings(munge_socket=foreign.socket))
        with pytest.raises(Refused, match=r"same munge\.key on both nodes") as refused:
            Client(other).nodes()
    assert refused.value.exit_code == 77


def test_credentials_of_a_job_by_slurms_number(site: Site, api: Api) -> None:
    client = Client(site)
    assert client.credentials("42") is None
    api.service.owners = {SlurmId("42"): os.getuid(), SlurmId("43_1"): os.getuid()}
    api.service.waiting = {SlurmId("43_1"): "both train WPGs are full"}
    answer = client.credentials("42")
    assert answer is not None
    assert answer["token"] == "tml-seven"
    with pytest.raises(NotAdmitted) as waits:
        client.credentials("43_1")
    assert str(waits.value) == "job 43_1 is not admitted yet: both train WPGs are full"
