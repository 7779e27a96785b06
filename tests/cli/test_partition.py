"""plexrl partition up, down, check; and where the settings file is found."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import Result

from plexrl_slurm.cli import app, daemon
from tests.cli.conftest import CONFIG, FakeDaemon
from tests.model_folders import make_model_folder

Plexrl = Callable[..., Result]

#: Plays partitiond: WPGs that start for a while; a release or TERM ends it.
PARTITIOND = """
import json, os, pathlib, socketserver, sys
from http.server import BaseHTTPRequestHandler

state = pathlib.Path("state")
asked = 0

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        body = {"status": "ok"}
        if self.path.endswith("/nodes"):
            asked += 1
            state = "starting" if asked < 3 else "idle"
            body = {"holds": [], "wpgs": [{"id": "train-0", "state": state}]}
        self.say(body)
    def do_POST(self):
        self.say({})
        if self.path.endswith("/release"):
            (state / "released").touch()
            os._exit(0)
    def say(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
    def log_message(self, *_):
        pass
    def address_string(self):
        return "unix"

(state / "partitiond.pid").write_text(f"{os.getpid()}\\n")
(state / "api.port").write_text("4321\\n")
socket = state / "api.sock"
socket.unlink(missing_ok=True)
socketserver.UnixStreamServer(str(socket), Handler).serve_forever()
"""


@pytest.fixture
def partitiond(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What ``up`` starts instead of the real daemon; ended with the test."""
    script = home / "partitiond.py"
    script.write_text(PARTITIOND)
    real = daemon._popen
    started: list[Any] = []

    def popen(argv: list[str], log: IO[bytes]) -> Any:
        assert argv[1:] == ["-m", "plexrl_slurm.daemons.partitiond", str(home / "plexrl.toml")]
        process = real([sys.executable, str(script)], log)
        started.append(process)
        return process

    monkeypatch.setattr(daemon, "_popen", popen)
    monkeypatch.setattr(daemon, "_STEP_S", 0.01)
    monkeypatch.setattr(app, "PATIENCE_S", 0.0)
    yield script
    for process in started:
        process.kill()
        process.wait()


def test_up_waits_for_the_wpgs_and_down_releases_the_hold(
    plexrl: Plexrl, partitiond: Path, home: Path
) -> None:
    up = plexrl("partition", "up")
    assert up.exit_code == 0, up.stderr
    assert up.stdout.startswith("Partition rlvr is up at http://127.0.0.1:4321 (log: ")
    assert "starting WPG train-0" in up.stderr
    again = json.loads(plexrl("partition", "up", "--json").stdout)
    assert (again["started"], again["address"]) == (False, "http://127.0.0.1:4321")
    down = plexrl("partition", "down")
    assert down.stdout == "Partition rlvr is down; its hold is released\n"
    assert (home / "state" / "released").exists()
    assert plexrl("partition", "down").stdout == "Partition rlvr was down already\n"


def test_up_and_down_leave_another_partitions_daemon_alone(
    plexrl: Plexrl, partitiond: Path, home: Path
) -> None:
    assert plexrl("partition", "up").exit_code == 0
    (home / "state" / "partition").write_text("other\n")
    for verb in ("up", "down"):
        result = plexrl("partition", verb)
        assert result.exit_code == 77, result.output
        assert "is the state_dir of partition 'other': give 'rlvr' one of its own" in result.stderr
    (home / "state" / "partition").write_text("rlvr\n")
    assert plexrl("partition", "down").exit_code == 0
    assert (home / "state" / "released").exists()


def test_down_can_keep_the_hold(plexrl: Plexrl, partitiond: Path, home: Path) -> None:
    plexrl("partition", "up", "--no-wait")
    assert "its hold is kept" in plexrl("partition", "down", "--no-release").stdout
    assert not (home / "state" / "released").exists()


def test_a_daemon_that_ends_at_once_is_explained_with_its_log(
    plexrl: Plexrl, partitiond: Path
) -> None:
    partitiond.write_text("raise SystemExit('no port left')")
    done = plexrl("partition", "up")
    assert done.exit_code == 70
    assert "ended with code 1 instead of starting" in done.stderr
    assert "partitiond.log" in done.stderr
    assert "no port left" in done.stderr


def test_a_daemons_own_sentence_and_exit_code_come_through(
    plexrl: Plexrl, partitiond: Path, home: Path
) -> None:
    (home / "state").mkdir(exist_ok=True)
    (home / "state" / "partitiond.log").write_text("plexrl-partitiond: error: of an older start\n")
    partitiond.write_text(
        "import sys; sys.stderr.write('plexrl-partitiond: error: database x: it is newer'); "
        "sys.exit(75)"
    )
    done = plexrl("partition", "up")
    assert done.exit_code == 75
    assert "did not start: database x: it is newer (see" in done.stderr
    assert "older" not in done.stderr


def test_up_refuses_a_file_with_mistakes(plexrl: Plexrl, partitiond: Path, home: Path) -> None:
    (home / "plexrl.toml").write_text(CONFIG.replace('"fake_train"', '"fake"'))
    done = plexrl("partition", "up")
    assert done.exit_code == 78
    assert "wpg[0].engine" in done.stderr
    assert not (home / "state" / "partitiond.pid").exists()


def test_check_names_every_mistake_on_a_line_of_its_own(plexrl: Plexrl, home: Path) -> None:
    (home / "plexrl.toml").write_text(
        CONFIG.replace('"fake_train"', '"fake"').replace("host_bytes", "host_byte")
    )
    done = plexrl("partition", "check")
    assert done.exit_code == 78
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("plexrl: error: plexrl.toml: line ") for line in lines)
    assert "did you mean host_bytes?" in done.stderr
    found = plexrl("partition", "check", "--json")
    assert (found.exit_code, len(json.loads(found.stdout)["problems"])) == (78, 3)


def test_check_of_a_good_file_shows_what_it_offers(plexrl: Plexrl, home: Path) -> None:
    done = plexrl("partition", "check")
    assert done.exit_code == 0, done.stderr
    assert "partition rlvr has no mistakes" in done.stdout
    assert "tiny  1,032      float32 128     20.16 KiB" in done.stdout


def test_check_works_on_a_file_too_broken_to_name_its_partition(plexrl: Plexrl, home: Path) -> None:
    (home / "broken.toml").write_text("[partition")
    done = plexrl("partition", "check", "--config", "broken.toml")
    assert done.exit_code == 78
    assert "it is not TOML" in done.stderr


def test_without_any_settings_file_the_places_are_named(plexrl: Plexrl, home: Path) -> None:
    (home / "plexrl.toml").unlink()
    for words in (("squeue",), ("partition", "check"), ("sbatch", "--wrap=true")):
        done = plexrl(*words)
        assert done.exit_code == 78
        assert "~/.config/plexrl" in done.stderr


def test_a_partition_is_found_by_name_among_the_files(
    plexrl: Plexrl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "home" / ".config" / "plexrl"
    make_model_folder(folder / "models" / "tiny")
    (folder / "b.toml").write_text(CONFIG.replace('"rlvr"', '"big"'))
    (folder / "a.toml").write_text("[partition\n")
    fake = FakeDaemon(folder / "state" / "api.sock")
    try:
        assert plexrl("-p", "big", "squeue").exit_code == 0
        assert plexrl("squeue", "-p", "big").exit_code == 0
        monkeypatch.setenv("PLEXRL_PARTITION", "big")
        assert plexrl("squeue").exit_code == 0
        monkeypatch.delenv("PLEXRL_PARTITION")
        monkeypatch.setenv("PLEXRL_CONFIG", str(folder / "b.toml"))
        assert plexrl("squeue").exit_code == 0
        assert len(fake.asked) == 4
        other = plexrl("squeue", "-p", "rlvr")
        assert other.exit_code == 65
        assert "unknown partition 'rlvr'; known here: big" in other.stderr
    finally:
        fake.close()
