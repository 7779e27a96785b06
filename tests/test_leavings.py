"""What a run of tests leaves is removed when it ends, and told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leavings
from tests.tree import ROOT

LEAVES = """
import os, pathlib, subprocess, sys, tempfile
def test_it(tmp_path):
    folder = pathlib.Path(tempfile.gettempdir())
    (folder / "plexrl-agent-abcdefgh").mkdir()
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("folder", folder, tmp_path)
"""


def test_a_run_has_a_folder_of_its_own_and_says_what_was_left_in_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != leavings.RUN}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest", "test_it.py"],
        cwd=tmp_path,
        env=environment
        | {
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_DEBUG_TEMPROOT": str(tmp_path),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("folder ")]
    folder, kept = (Path(word) for word in line.split()[1:])
    assert folder.parent == tmp_path and not folder.exists()
    assert kept.is_relative_to(tmp_path) and not kept.is_relative_to(folder)
    assert ": sleep 600" in done.stdout
    assert "1 plexrl-agent-* in the folder for temporary files" in done.stdout
    assert list(leavings.processes(folder)) == []


def test_shared_memory_of_a_run_that_is_no_more_is_removed_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leavings, "SHARED_MEMORY", tmp_path)
    with subprocess.Popen(["true"]) as process:
        pass
    (tmp_path / f"plexrl-test-{process.pid}-a").mkdir()
    (tmp_path / f"plexrl-test-{os.getpid()}-b").mkdir()
    (tmp_path / "plexrl-other").mkdir()
    (tmp_path / "run").mkdir()
    assert leavings.end(tmp_path / "run") == [str(tmp_path / f"plexrl-test-{process.pid}-a")]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"plexrl-test-{os.getpid()}-b",
        "plexrl-other",
    }


def test_what_libraries_compiled_is_no_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leavings, "SHARED_MEMORY", tmp_path)
    (tmp_path / "torchinductor_0").mkdir()
    (tmp_path / "3b2e299d-aaaa-bbbb-cccc-3179225a92d2").touch()
    (tmp_path / "vllm_dist_3b2e299d84074384b3179225a92d23da").touch()
    assert sorted(leavings.end(tmp_path)) == [
        "1 of the name of a UUID in the folder for temporary files",
        "1 vllm_dist_* in the folder for temporary files",
    ]
