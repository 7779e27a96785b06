"""A partition's folder, and a daemon that is a page of canned answers behind a real unix socket."""

import json
import os
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from plexrl_slurm.cli import wait
from plexrl_slurm.cli.main import cli
from tests.model_folders import make_model_folder

#: An instant of 2026.
T0 = 1_770_000_000_000_000
CONFIG = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "/dev/shm/plexrl-cli-test"
host_bytes = "1GiB"
listen = "127.0.0.1:0"

[[wpg]]
pool = "train"
engine = "fake_train"

[[wpg]]
pool = "rollout"
engine = "fake_sample"

[[model]]
name = "tiny"
path = "models/tiny"
"""


def make_job(number: int, **changes: Any) -> dict[str, Any]:
    """A running job as the daemon answers it."""
    return {
        "job_id": number,
        "slurm_id": str(100 + number),
        "name": f"count{number}",
        "user": "ada",
        "account": "physics",
        "partition": "rlvr",
        "state": "running",
        "reason": "",
        "submitted_us": T0,
        "started_us": T0 + 1_000_000,
        "ended_us": T0 + 3_662_000_000,
        "exit_code": None,
        "steps": 12,
        "gpu_us": {"busy": 61_000_000, "switch": 1_500_000, "kept": 500_000},
        "wpgs": ["train-0", "rollout-0"],
        "models": ["tiny"],
        "script": "count.sh",
        **changes,
    }


class FakeDaemon:
    """Answers ``METHOD path``; a test replaces answers and reads what was asked."""

    def __init__(self, socket: Path) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        #: ``"POST /jobs"`` to ``(status, body)``, or a function that makes it.
        self.answers: dict[str, Any] = {
            "GET /healthz": {"status": "ok", "address": "127.0.0.1:4321"},
            "POST /jobs": {"job_id": 7, "token": "tml-x", "env": {"TINKER_API_KEY": "tml-x"}},
            "POST /jobs/7/bind": {},
            "POST /jobs/7/cancel": {},
            "GET /jobs": lambda: {"jobs": self.jobs},
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                status, answer = outer.answer(self.command, self.path, body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _answer

            def log_message(self, *_: Any) -> None:
                """Silence."""

            def address_string(self) -> str:
                return "unix"

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            """Waits for its threads when it is closed."""

        socket.parent.mkdir(parents=True, exist_ok=True)
        self.server = Server(str(socket), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(path)
        assert parts.path.startswith("/plexrl/v1/"), path
        route = parts.path.removeprefix("/plexrl/v1")
        asked = body if body is not None else parse_qs(parts.query)
        self.asked.append((method, route, asked))
        answer = self.answers.get(f"{method} {route}")
        if answer is None:
            return 404, {"error": f"the fake has no {method} {route}", "exit_code": 66}
        if callable(answer):
            answer = answer()
        return answer if isinstance(answer, tuple) else (200, answer)

    def routes(self) -> list[str]:
        """What was asked, without bodies."""
        return [f"{method} {route}" for method, route, _ in self.asked]

    def body(self, route: str) -> Any:
        """The body of the only request to ``route``."""
        (found,) = [body for method, path, body in self.asked if f"{method} {path}" == route]
        return found

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a settings file; nothing of the caller's environment matters.

    Not under ``tmp_path``, whose length leaves too little for a unix socket's name.
    """
    folder = tmp_path_factory.mktemp("w")
    make_model_folder(folder / "models" / "tiny")
    (folder / "plexrl.toml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PLEXRL_CONFIG", "SBATCH_PARTITION", "SBATCH_JOB_NAME", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PLEXRL_CONTACT"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(wait, "STEP_S", 0.01)
    return folder


@pytest.fixture
def daemon(home: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(home / "state" / "api.sock")
    yield fake
    fake.close()


@pytest.fixture
def plexrl(home: Path) -> Callable[..., Result]:
    """Run the command line in this process."""

    def run(*words: str, **extra: Any) -> Result:
        return CliRunner().invoke(cli, words, prog_name="plexrl", **extra)

    return run
