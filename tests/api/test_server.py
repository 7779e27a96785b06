"""Listening, stopping, and starting again."""

import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest

from plexrl_slurm.api.app import make_app
from plexrl_slurm.api.server import serve
from plexrl_slurm.core.errors import BadInput
from tests.api.conftest import Api, eventually, make_service, run_api


def _start(folder: Path, *, port: int = 0, name: str = "api.sock") -> None:
    async def start() -> None:
        app = make_app(make_service(folder))
        serving = await serve(app, host="127.0.0.1", port=port, socket_path=folder / name)
        await serving.stop()

    asyncio.run(start())


def _poll(api: Api, answers: list[str]) -> None:
    with api.http() as http:
        session = http.post("/api/v1/create_session", json={}).json()["session_id"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        model_id = http.post("/api/v1/create_model", json=model).json()["model_id"]
        step = {"model_id": model_id, "seq_id": 2}
        call = http.post("/api/v1/optim_step", json=step).json()
        answer = http.post("/api/v1/retrieve_future", json={"request_id": call["request_id"]})
        answers.append(answer.json()["type"])


def test_a_stop_lets_long_polls_go_and_removes_the_socket(tmp_path: Path) -> None:
    answers: list[str] = []
    with run_api(tmp_path) as api:
        poller = threading.Thread(target=_poll, args=(api, answers))
        poller.start()
        eventually(lambda: len(api.service.calls) == 2)
        time.sleep(0.05)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    poller.join(5)
    assert answers == ["try_again"]
    assert not (tmp_path / "api.sock").exists()


def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "api.sock"))
    _start(tmp_path)


def test_a_living_daemons_socket_is_left_alone(tmp_path: Path) -> None:
    with run_api(tmp_path) as api:
        with pytest.raises(BadInput, match="another daemon serves"):
            _start(tmp_path)
        with pytest.raises(BadInput, match="set another listen_port"):
            _start(tmp_path, port=api.serving.port, name="other.sock")
        with api.unix() as http:
            assert http.get("/plexrl/v1/healthz").status_code == 200


def test_a_socket_that_cannot_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious", encoding="utf-8")
    with pytest.raises(BadInput, match="is in the way and is no socket"):
        _start(tmp_path, name="file")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "precious"
    with pytest.raises(BadInput, match="choose a shorter state_dir"):
        _start(tmp_path, name="x" * 120)


def test_an_answer_does_not_wait_for_the_network_stack(api: Api) -> None:
    took = []
    with api.http() as http:
        for _ in range(20):
            began = time.monotonic()
            http.post("/api/v1/client/config", json={"sdk_version": "0.38.0"})
            took.append(time.monotonic() - began)
    # Without TCP_NODELAY every one of them takes 40 ms.
    assert min(took) < 0.03
