"""MUNGE credentials over HTTP, with a real munged: who is let in, and what others are told."""

import os
import pwd
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from plexrl_slurm.api import munge as munge_module
from plexrl_slurm.api.munge import Munge
from plexrl_slurm.api.signing import statement
from plexrl_slurm.core.ids import SlurmId
from tests.api.conftest import Api, make_service, run_api
from tests.api.fake_service import TOKEN_A
from tests.munge import PrivateMunge, private_munge

pytestmark = pytest.mark.munge

NODES = "/plexrl/v1/nodes"
JOBS = "/plexrl/v1/jobs"
JOB = b'{"partition": "rlvr", "name": "count", "script": "job.sh"}'


@pytest.fixture(scope="module")
def key_keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateMunge]:
    with private_munge(tmp_path_factory.mktemp("m")) as munge:
        yield munge


@pytest.fixture(scope="module")
def served(key_keeper: PrivateMunge, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with run_api(tmp_path_factory.mktemp("api"), munge=Munge(key_keeper.socket)) as api:
        yield api


@pytest.fixture
def api(served: Api, tmp_path: Path) -> Api:
    served.service = served.app.state.service = make_service(tmp_path)
    return served


def ask(
    api: Api, credential: str, *, method: str = "GET", path: str = NODES, body: bytes = b""
) -> httpx.Response:
    with httpx.Client(base_url=api.url, trust_env=False) as http:
        headers = {"Authorization": f"Munge {credential}"}
        return http.request(method, path, content=body, headers=headers)


def refused(answer: httpx.Response, sentence: str) -> None:
    assert answer.status_code == 401
    assert answer.json()["exit_code"] == 77
    assert sentence in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_a_credential_says_who_asks(api: Api, key_keeper: PrivateMunge) -> None:
    answer = ask(api, key_keeper.credential(statement("GET", NODES, b"")))
    assert answer.json() == {"wpgs": [], "admin": True, "uid": os.getuid(), "job": None}


def test_the_body_is_still_there_for_the_handler(api: Api, key_keeper: PrivateMunge) -> None:
    credential = key_keeper.credential(statement("POST", JOBS, JOB))
    answer = ask(api, credential, method="POST", path=JOBS, body=JOB)
    assert answer.json()["user"] == pwd.getpwuid(os.getuid()).pw_name
    ((_, job),) = api.service.asked
    assert getattr(job, "name", None) == "count"


def test_the_query_and_escaped_paths_are_signed_as_they_are_sent(
    api: Api, key_keeper: PrivateMunge
) -> None:
    for path in (f"{JOBS}?user=ann%20b&ended=true", "/plexrl/v1/jobs/%37/explain"):
        credential = key_keeper.credential(statement("GET", path, b""))
        assert ask(api, credential, path=path).status_code == 200
    other = key_keeper.credential(statement("GET", f"{JOBS}?user=ann", b""))
    refused(ask(api, other, path=f"{JOBS}?user=bob"), "made for another request")


@pytest.mark.parametrize(
    ("signed", "sent"),
    [
        pytest.param(("GET", JOBS, b""), ("GET", NODES, b""), id="other path"),
        pytest.param(("GET", JOBS, JOB), ("POST", JOBS, JOB), id="other method"),
        pytest.param(("POST", JOBS, JOB), ("POST", JOBS, JOB + b" "), id="other body"),
        pytest.param(("POST", JOBS, JOB), ("POST", JOBS, b""), id="no body"),
    ],
)
def test_a_credential_is_for_one_request_only(
    api: Api,
    key_keeper: PrivateMunge,
    signed: tuple[str, str, bytes],
    sent: tuple[str, str, bytes],
) -> None:
    method, path, body = sent
    answer = ask(
        api, key_keeper.credential(statement(*signed)), method=method, path=path, body=body
    )
    refused(answer, "made for another request")
    assert api.service.asked == []


def test_a_replay_is_refused(api: Api, key_keeper: PrivateMunge) -> None:
    credential = key_keeper.credential(statement("GET", NODES, b""))
    assert ask(api, credential).status_code == 200
    refused(ask(api, credential), "it was used before")


def test_an_expired_one_is_refused(api: Api, key_keeper: PrivateMunge) -> None:
    credential = key_keeper.credential(statement("GET", NODES, b""), "--ttl=1")
    time.sleep(2.1)
    refused(ask(api, credential), "it has expired")


def test_one_of_another_key_is_refused(api: Api, tmp_path_factory: pytest.TempPathFactory) -> None:
    with private_munge(tmp_path_factory.mktemp("m")) as foreign:
        refused(ask(api, foreign.credential(statement("GET", NODES, b""))), "with another key")


def test_one_for_another_users_eyes_is_refused(api: Api, key_keeper: PrivateMunge) -> None:
    restricted = key_keeper.credential(statement("GET", NODES, b""), "--restrict-uid=54321012")
    refused(ask(api, restricted), "for another user to read")


@pytest.mark.parametrize(
    ("credential", "sentence"),
    [
        pytest.param("MUNGE:AwQDAAD=:", "it is damaged", id="cut short"),
        pytest.param("hello", "not what the program munge prints", id="no credential"),
        pytest.param("MUNGE:\\xff:", "not what the program munge prints", id="bad letters"),
        pytest.param("MUNGE:" + "A" * 9000 + ":", "not what the program munge", id="endless"),
    ],
)
def test_what_is_no_credential_is_refused(api: Api, credential: str, sentence: str) -> None:
    refused(ask(api, credential), sentence)


def test_a_uid_without_a_name_is_refused(
    api: Api, key_keeper: PrivateMunge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    credential = key_keeper.credential(statement("GET", NODES, b""))
    refused(ask(api, credential), f"uid {os.getuid()} of this MUNGE credential has no name")


def test_a_large_or_endless_body_is_refused(api: Api, key_keeper: PrivateMunge) -> None:
    body = b"x" * ((1 << 20) + 1)
    answer = ask(
        api,
        key_keeper.credential(statement("POST", JOBS, body)),
        method="POST",
        path=JOBS,
        body=body,
    )
    assert (answer.status_code, answer.json()["exit_code"]) == (400, 65)
    assert "needs a Content-Length of at most" in answer.json()["error"]
    headers = {"Authorization": "Munge " + key_keeper.credential(statement("POST", JOBS, JOB))}
    with httpx.Client(base_url=api.url, trust_env=False) as http:
        chunked = http.post(JOBS, content=iter([JOB]), headers=headers)
    assert chunked.status_code == 400


def test_the_unix_socket_takes_credentials_too(api: Api, key_keeper: PrivateMunge) -> None:
    headers = {"Authorization": "munge " + key_keeper.credential(statement("GET", NODES, b""))}
    with api.unix() as http:
        assert http.get(NODES, headers=headers).json()["uid"] == os.getuid()
        assert http.get(NODES, headers=headers).status_code == 401


def test_a_service_without_munge_says_so(tmp_path: Path) -> None:
    with run_api(tmp_path) as api:
        refused(ask(api, "MUNGE:AAAA:"), "takes no MUNGE credentials")


# ---- a munged that is away is nobody's fault -------------------------------------------------


def unavailable(answer: httpx.Response, sentence: str) -> None:
    assert answer.status_code == 503
    assert answer.json()["exit_code"] == 75
    assert "the service cannot check credentials now" in answer.json()["error"]
    assert sentence in answer.json()["error"]
    assert "ask your admin to" in answer.json()["error"]


def children() -> list[str]:
    """Names of this process's children."""
    listed = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [Path(f"/proc/{pid}/comm").read_text().strip() for each in listed for pid in each]


def test_a_munged_that_is_down_may_come_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    keeper = PrivateMunge(tmp_path_factory.mktemp("m")).start()
    folder = tmp_path_factory.mktemp("a")
    try:
        with run_api(folder, munge=Munge(keeper.socket, timeout_s=0.5)) as api:
            credentials = [keeper.credential(statement("GET", NODES, b"")) for _ in range(3)]
            keeper.stop()
            unavailable(ask(api, credentials[0]), f"munged does not answer at {keeper.socket}")
            keeper.start().freeze()
            unavailable(ask(api, credentials[1]), "no answer within 0.5 s")
            keeper.thaw()
            assert "unmunge" not in children()
            assert ask(api, credentials[2]).status_code == 200
    finally:
        keeper.stop()


def test_a_missing_program_is_named(
    api: Api, key_keeper: PrivateMunge, monkeypatch: pytest.MonkeyPatch
) -> None:
    credential = key_keeper.credential(statement("GET", NODES, b""))
    monkeypatch.setenv("PATH", "/nowhere")
    unavailable(ask(api, credential), "cannot run unmunge")


def test_a_crowd_is_served_in_turn_and_an_endless_one_put_off(
    api: Api, key_keeper: PrivateMunge, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = [key_keeper.credential(statement("GET", NODES, b"")) for _ in range(16)]
    with ThreadPoolExecutor(16) as crowd:
        assert {each.status_code for each in crowd.map(lambda c: ask(api, c), credentials)} == {200}
    monkeypatch.setattr(munge_module, "_WAITING", -munge_module._AT_ONCE)
    answer = ask(api, key_keeper.credential(statement("GET", NODES, b"")))
    assert (answer.status_code, "try again" in answer.json()["error"]) == (503, True)


# ---- a job's credentials ---------------------------------------------------------------------


def exchange(slurm_id: str) -> str:
    return f"/plexrl/v1/slurm-jobs/{slurm_id}/credentials"


@pytest.fixture
def by_munge(api: Api, key_keeper: PrivateMunge) -> Callable[[str], httpx.Response]:
    def post(path: str) -> httpx.Response:
        credential = key_keeper.credential(statement("POST", path, b""))
        return ask(api, credential, method="POST", path=path)

    return post


def test_a_users_own_job_gets_its_credentials(
    api: Api, by_munge: Callable[[str], httpx.Response]
) -> None:
    api.service.owners = {SlurmId("42"): os.getuid(), SlurmId("43_2"): os.getuid()}
    for slurm_id in ("42", "43_2"):
        assert by_munge(exchange(slurm_id)).json() == {
            "job_id": 7,
            "token": "tml-seven",
            "env": {"TINKER_API_KEY": "tml-seven"},
        }
    with api.unix() as http:
        assert http.post(exchange("42")).json()["token"] == "tml-seven"


def test_another_users_job_does_not_exist(
    api: Api, by_munge: Callable[[str], httpx.Response]
) -> None:
    api.service.owners = {SlurmId("42"): os.getuid() + 1}
    for slurm_id in ("42", "43"):
        answer = by_munge(exchange(slurm_id))
        assert (answer.status_code, answer.json()["exit_code"]) == (404, 66)
        assert answer.json()["error"] == f"no job '{slurm_id}' that you may see"


def test_a_job_that_waits_is_told_why(api: Api, by_munge: Callable[[str], httpx.Response]) -> None:
    api.service.owners = {SlurmId("42"): os.getuid()}
    api.service.waiting = {SlurmId("42"): "both train WPGs are full"}
    answer = by_munge(exchange("42"))
    assert (answer.status_code, answer.json()["exit_code"]) == (409, 75)
    assert answer.json()["error"] == "job 42 is not admitted yet: both train WPGs are full"


def test_a_jobs_key_gives_no_other_key(api: Api) -> None:
    api.service.owners = {SlurmId("42"): 1001}
    with api.unix(TOKEN_A) as http:
        assert http.post(exchange("42")).status_code == 403


@pytest.mark.parametrize("slurm_id", ["4x", "4_", "_2", "4_2_1", "4+1", "1" * 30, "%34_%"])
def test_what_is_no_job_number_is_refused(
    slurm_id: str, by_munge: Callable[[str], httpx.Response]
) -> None:
    assert by_munge(exchange(slurm_id)).status_code == 400
