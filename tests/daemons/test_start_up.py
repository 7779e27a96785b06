"""A process that cannot start says so with one sentence, and ends with a documented code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plexrl_slurm.transport.keys import agent_keys, server_keys
from tests.model_folders import make_model_folder

ROOT = Path(__file__).parents[2]


def start(module: str, *words: str, folder: Path) -> tuple[int, list[str]]:
    """The exit code and what is said besides lines of the log."""
    done = subprocess.run(
        [sys.executable, "-m", f"plexrl_slurm.daemons.{module}", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, [line for line in done.stderr.splitlines() if " INFO " not in line]


def in_the_way(path: Path) -> str:
    """A folder in a file: root too is refused it."""
    path.touch()
    return str(path / "folder")


@pytest.mark.parametrize("refused", ["host_dir", "nvme_dir", "state_dir", ""])
def test_an_agent_that_is_refused_a_folder(tmp_path: Path, refused: str) -> None:
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    state.mkdir()
    temporary.mkdir()
    agent_keys(state)
    server_keys(state)
    facts: dict[str, object] = {
        "agent": "h1.0.localhost", "hold": "h1", "node": "localhost",
        "endpoint": "tcp://127.0.0.1:9", "state_dir": str(state),
        "host_dir": str(tmp_path / "host"), "nvme_dir": str(tmp_path / "nvme"), "nvme_bytes": 1,
    }  # fmt: skip
    path = tmp_path / "agent.json"
    where = str(path)
    if refused:
        where = str(tmp_path / f"bad-{refused}")
        facts[refused] = in_the_way(Path(where))
        path.write_text(json.dumps(facts))
    code, (said,) = start("agentd", str(path), folder=temporary)
    assert code == 74
    assert said.startswith(f"plexrl-agentd: error: {where}")
    assert "cannot be " in said
    assert list(temporary.iterdir()) == []


FOLDERS = ["checkpoints", "holds", "ranks", "durable", "snapshots", "spool", "journal", "local"]


@pytest.mark.parametrize("refused", ["", *FOLDERS, "partitiond.pid"])
def test_a_daemon_that_is_refused_a_folder(tmp_path: Path, refused: str) -> None:
    state = tmp_path / "state"
    if refused:
        state.mkdir()
    if refused == "partitiond.pid":
        (state / refused).mkdir()
    else:
        (state / refused).touch()
    path = tmp_path / "p.toml"
    model = make_model_folder(tmp_path / "model")
    path.write_text(f"""
[partition]
name = "rlvr"
state_dir = "{state}"
database_url = "sqlite:///{tmp_path}/db.sqlite"
host_dir = "{tmp_path}/host"
host_bytes = "64MiB"
listen = "127.0.0.1:0"

[[wpg]]
pool = "train"
engine = "fake_train"

[[wpg]]
pool = "rollout"
engine = "fake_sample"

[[model]]
name = "tiny"
path = "{model}"
""")
    code, said = start("partitiond", str(path), folder=tmp_path)
    assert code in (74, 78), "the file's check sees some of it"
    assert all(line.startswith("plexrl-partitiond: error: ") for line in said), said
    assert str(state) in said[0]
