"""Job control over the unix socket and by a job's token, and who is let in."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.api.auth import UnixPeer, principal_of_peer
from plexrl_slurm.api.service import JobSubmission, Principal
from tests.api.conftest import Api, run_api
from tests.api.fake_service import TOKEN_A

JOB = {"partition": "rlvr", "name": "count", "script": "job.sh", "models": ["tiny"]}


@pytest.mark.parametrize("slurm_id", ["", "42;43", "-1", "4_", "1\n2", "9" * 19])
def test_what_is_no_slurm_job_cannot_be_bound(api: Api, slurm_id: str) -> None:
    with api.unix() as http:
        answer = http.post("/plexrl/v1/jobs/7/bind", json={"slurm_id": slurm_id})
    assert answer.status_code == 400 and answer.json()["exit_code"] == 65, answer.text
    assert "is no Slurm job" in answer.json()["error"]


def test_a_user_submits_binds_explains_and_cancels(api: Api) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    with api.unix() as http:
        answer = http.post("/plexrl/v1/jobs", json=JOB | {"options": {"steps": "3"}, "seed": 5})
        assert answer.status_code == 200
        assert (answer.json()["job_id"], answer.json()["user"]) == (7, me)
        ((_, job),) = api.service.asked
        assert isinstance(job, JobSubmission)
        assert (job.models, job.seed, job.options) == (("tiny",), 5, {"steps": "3"})
        bound = http.post("/plexrl/v1/jobs/7/bind", json={"slurm_id": "42"})
        assert bound.json() == {"job_id": 7, "slurm_id": "42"}
        assert http.get("/plexrl/v1/jobs/7/explain").json() == {"job_id": 7, "obstacles": []}
        cancelled = http.post("/plexrl/v1/jobs/7/cancel", json={"reason": "enough\x1b[2J"})
        assert cancelled.json() == {"job_id": 7, "reason": "enough?[2J"}


def test_lists_take_their_filters_from_the_query(api: Api) -> None:
    with api.unix() as http:
        rows = http.get("/plexrl/v1/jobs?user=ann&state=RUNNING&state=PENDING&ended=true").json()
        assert rows == [{"user": "ann", "states": ["RUNNING", "PENDING"], "ended": True}]
        assert http.get("/plexrl/v1/jobs").json() == [{"user": None, "states": [], "ended": False}]
        span = http.get("/plexrl/v1/timeline?since_us=1&until_us=2").json()
        assert span == [{"since_us": 1, "until_us": 2}]
        assert http.get("/plexrl/v1/timeline").status_code == 400
        moves = http.get("/plexrl/v1/timeline/images?since_us=1&until_us=2").json()
        assert moves == [{"deployment": "m", "at_us": 1}]
        beyond = http.get(f"/plexrl/v1/timeline?since_us=0&until_us={2**63}")
        assert (beyond.status_code, "until_us" in beyond.json()["error"]) == (400, True)
        assert http.get(f"/plexrl/v1/jobs/{2**63}/explain").status_code == 400
        assert http.get("/plexrl/v1/nodes").json()["uid"] == os.getuid()


@pytest.mark.parametrize(
    ("change", "status", "exit_code", "sentence"),
    [
        pytest.param({"models": ["huge"]}, 404, 65, "offers: tiny", id="unknown model"),
        pytest.param({"name": "no room"}, 503, 74, "are needed", id="spool full"),
        pytest.param({"name": "no database"}, 503, 75, "it is locked", id="database down"),
        pytest.param({"nme": "typo"}, 400, 65, "nme", id="unknown field"),
        pytest.param({"seed": "x"}, 400, 65, "seed", id="wrong type"),
        pytest.param({"seed": 2**63}, 400, 65, "seed", id="seed too large for the database"),
        pytest.param({"priority": 1001}, 400, 65, "priority", id="priority above everybody's"),
        pytest.param({"priority": 0}, 400, 65, "priority", id="no priority"),
        pytest.param({"name": "a\nb"}, 400, 65, "job name 'a?b'", id="name of two lines"),
        pytest.param({"name": "\x1b[2J"}, 400, 65, "printable", id="name that clears screens"),
        pytest.param({"name": "x" * 2000}, 400, 65, "1 to 1024", id="endless name"),
        pytest.param({"name": " "}, 400, 65, "job name", id="blank name"),
        pytest.param({"account": "a\0"}, 400, 65, "account", id="NUL in the account"),
        pytest.param({"models": ["tiny"] * 65}, 400, 65, "models", id="endless models"),
        pytest.param(
            {"options": {str(n): "" for n in range(65)}}, 400, 65, "options", id="options"
        ),
    ],
)
def test_a_refused_submission_says_why_and_how_to_exit(
    api: Api,
    change: dict[str, Any],
    status: int,
    exit_code: int,
    sentence: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with api.unix() as http:
        answer = http.post("/plexrl/v1/jobs", json=JOB | change)
    assert ("refused_for_now" in caplog.text) == (status == 503)
    assert answer.status_code == status
    assert answer.json()["exit_code"] == exit_code
    assert sentence in answer.json()["error"]


def test_another_job_does_not_exist(api: Api) -> None:
    with api.unix() as http:
        answer = http.post("/plexrl/v1/jobs/8/cancel", json={})
    assert answer.status_code == 404
    assert answer.json()["exit_code"] == 66


def test_a_token_works_on_both_ends_as_key_or_bearer(api: Api) -> None:
    with api.http() as tcp, api.unix(TOKEN_A) as unix:
        for http in (tcp, unix):
            nodes = http.get("/plexrl/v1/nodes").json()
            assert (nodes["job"], nodes["uid"], nodes["admin"]) == (1, 1001, False)
            for path, body in (("drain", {"on": True}), ("release", {})):
                answer = http.post(f"/plexrl/v1/{path}", json=body)
                assert answer.status_code == 403
                assert answer.json()["exit_code"] == 77


def test_the_service_user_may_drain_and_release(api: Api) -> None:
    with api.unix() as http:
        assert http.post("/plexrl/v1/drain", json={"on": True}).json() == {"draining": True}
        assert "released" in http.post("/plexrl/v1/release", json={}).json()


def test_nobody_is_let_in_by_tcp_without_a_key(api: Api) -> None:
    with api.http(token=None) as http:
        for path in ("/plexrl/v1/nodes", "/api/v1/get_server_capabilities"):
            answer = http.get(path)
            assert answer.status_code == 401
            assert "no API key" in answer.json()["error"]
        assert http.get("/plexrl/v1/healthz").json() == {"status": "ok"}
        assert http.get("/api/v1/healthz").json() == {"status": "ok"}
    with api.unix("tml-wrong") as http:
        answer = http.get("/plexrl/v1/nodes")
        assert (answer.status_code, answer.json()["exit_code"]) == (401, 77)


def test_the_socket_knows_the_process_at_its_other_end(tmp_path: Path) -> None:
    seen: list[UnixPeer] = []

    def authenticate(peer: UnixPeer) -> Principal:
        seen.append(peer)
        return principal_of_peer(peer)

    ask = (
        "import httpx, os, sys\n"
        "transport = httpx.HTTPTransport(uds=sys.argv[1])\n"
        "with httpx.Client(transport=transport, base_url='http://plexrl') as http:\n"
        "    http.get('/plexrl/v1/nodes').raise_for_status()\n"
        "print(os.getpid())\n"
    )
    with run_api(tmp_path, authenticate_socket=authenticate) as api:
        with api.unix() as http:
            http.get("/plexrl/v1/nodes")
        path = api.serving.socket_path
        assert path.stat().st_mode & 0o777 == 0o666
        child = subprocess.run(
            [sys.executable, "-c", ask, path], capture_output=True, text=True, check=True
        )
    assert [peer.pid for peer in seen] == [os.getpid(), int(child.stdout)]
    assert {(peer.uid, peer.gid) for peer in seen} == {(os.getuid(), os.getgid())}


def test_only_root_and_the_service_user_are_admins() -> None:
    def admin(uid: int) -> bool:
        return principal_of_peer(UnixPeer(pid=1, uid=uid, gid=1)).admin

    assert admin(0)
    assert admin(os.getuid())
    assert not admin(os.getuid() + 54_321)
    assert principal_of_peer(UnixPeer(pid=1, uid=54_321_012, gid=1)).user == "54321012"


def test_state_is_asked_for_by_job_and_files_come_as_they_are(api: Api) -> None:
    with api.unix() as http:
        assert http.get("/plexrl/v1/state").json()["uid"] == os.getuid()
        assert http.get("/plexrl/v1/jobs/7/state").json() == {"job_id": 7, "images": []}
        assert http.get("/plexrl/v1/jobs/8/state").status_code == 404
        uri = {"uri": "tinker://a/weights/b"}
        base = "/plexrl/v1/jobs/7/state"
        assert http.get(f"{base}/verify", params=uri).json() == {**uri, "fine": True}
        assert http.get(f"{base}/files", params=uri).json() == {**uri, "files": []}
        piece: dict[str, Any] = {**uri, "name": "m", "version": "v", "offset": 18, "length": 3}
        answer = http.get(f"{base}/piece", params=piece)
        assert answer.content == f"{uri['uri']} m v".encode()[18:21]
        assert answer.headers["content-type"] == "application/octet-stream"
        for wrong in ({"offset": -1}, {"length": 2**63}, {"name": "n" * 2000}):
            assert http.get(f"{base}/piece", params={**piece, **wrong}).status_code == 400


def test_weights_are_imported_in_pieces_of_plain_bytes(api: Api) -> None:
    asked = {
        "name": "mine",
        "model": "tiny",
        "config": {"vocab_size": 8},
        "tensors": {"w": ["F32", [2, 4]]},
        "files": {"model.safetensors": 99},
    }
    with api.unix() as http:
        base = "/plexrl/v1/jobs/7/state/import"
        assert http.post(base, json=asked).json() == {"import_id": "mine", "model": "tiny"}
        assert http.post(base, json=asked | {"more": 1}).status_code == 400
        piece = http.put(f"{base}/mine?name=model.safetensors&offset=5", content=b"\0\xff{")
        assert piece.json() == {"bytes": 3, "name": "model.safetensors", "offset": 5}
        ended = http.post(f"{base}/mine/finish", json={"sha256": {"model.safetensors": "ab"}})
        assert ended.json() == {"uri": "mine", "sha256": {"model.safetensors": "ab"}}


def test_images_are_evicted_by_job_or_one_by_one(api: Api) -> None:
    with api.unix() as http:
        base = "/plexrl/v1/jobs/7/state/evict"
        assert http.post(base, json={}).json() == {"job_id": 7, "deployment": "", "to": "nvme"}
        asked = {"deployment": "s7-1:train:0", "to": "durable"}
        assert http.post(base, json=asked).json() == {"job_id": 7, **asked}
