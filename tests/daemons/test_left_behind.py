"""What a killed gang's libraries leave in /dev/shm."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from plexrl_slurm.daemons import agent_private, left_behind
from plexrl_slurm.daemons.agent_private import PrivateFolder

#: Maps a named segment and says so; a child of its own does the same.
HOLDER = """
import os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
name = sys.argv[1 + (os.fork() == 0)]
segment = SharedMemory(name)
resource_tracker.unregister(segment._name, "shared_memory")
os.write(1, b"mapped\\n")  # at once, also where Python does not buffer
time.sleep(60)
"""


@pytest.fixture
def segments() -> Generator[list[SharedMemory], None, None]:
    made = [SharedMemory(create=True, size=4096) for _ in range(3)]
    for segment in made:  # somebody else removes them
        resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    yield made
    for segment in made:
        segment.close()
        left_behind.remove([f"/dev/shm/{segment.name}"])


#: An agent that is killed; its ranks' shared memory stays.
AGENT = """
import os, sys, time
from plexrl_slurm.daemons import left_behind
from plexrl_slurm.daemons.agent_private import PrivateFolder
folder = PrivateFolder()
left_behind.note(folder.path / "rollout-0.shared", sys.argv[1:])
print(folder.path, flush=True)
time.sleep(60)
"""


def test_the_next_agent_removes_a_killed_ones_folder_and_what_its_ranks_shared_and_nothing_else(
    segments: list[SharedMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    dead, mapped, foreign = (f"/dev/shm/{segment.name}" for segment in segments)
    segments[0].close()
    segments[2].close()
    gone: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, dead, mapped], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        folder = Path(agent.stdout.readline().strip())
        assert folder.parent == tmp_path and folder.is_dir()
        living = PrivateFolder()
        agent_private.tidy(say=gone.append)
        assert gone == [] and folder.is_dir()
        agent.kill()
    agent_private.tidy(say=gone.append)  # this process has one of them mapped
    assert gone == [dead] and folder.is_dir()
    assert [Path(file).exists() for file in (dead, mapped, foreign)] == [False, True, True]
    segments[1].close()
    agent_private.tidy(say=gone.append)
    assert gone == [dead, mapped, str(folder)] and not folder.exists()
    assert Path(foreign).exists() and living.path.is_dir()
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_only_half_deleted_is_still_known_for_a_dead_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = PrivateFolder()
    for name in ("a", "z"):
        (folder.path / name).touch()
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "file").touch()
    deleted = shutil.rmtree

    def killed(path: Path, **_: object) -> None:
        if path == folder.path:
            raise KeyboardInterrupt
        deleted(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.close()
    assert [path.name for path in folder.path.iterdir()] == ["agent.lock"]
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_ranks_libraries_leave_goes_with_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/short")
    folder = Path("/short/plexrl-agent-12345678")
    assert agent_private.scratch(folder, {}) == {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": f"/short/torchinductor_{os.geteuid()}",
    }
    mine = {"TORCHINDUCTOR_CACHE_DIR": "/cache"}
    assert agent_private.scratch(folder, mine) == {"TMPDIR": str(folder), **mine}
    assert agent_private.scratch(folder / ("x" * 80), {}) == {}


def test_shared_memory_of_the_same_name_that_somebody_made_since_is_not_taken_for_a_dead_ones(
    segments: list[SharedMemory], tmp_path: Path
) -> None:
    file = f"/dev/shm/{segments[0].name}"
    notes = tmp_path / "rollout-0.shared"
    left_behind.note(notes, [file, "/dev/shm/psm_gone"])
    assert left_behind.noted(notes) == [file]
    with Path(file).open("rb"):  # so that nobody gets its inode
        left_behind.remove([file])
        Path(file).write_bytes(b"another's")
        assert left_behind.noted(notes) == []


def test_what_a_process_group_has_mapped_is_found_and_removed_and_nothing_else(
    segments: list[SharedMemory],
) -> None:
    one, two, foreign = (segment.name for segment in segments)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, one, two],
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as leader:
        try:
            assert leader.stdout is not None
            assert [leader.stdout.readline() for _ in range(2)] == ["mapped\n"] * 2
            found = left_behind.mapped_by([leader.pid])
            nobodys = left_behind.mapped_by([])
        finally:
            subprocess.run(["kill", "-9", "--", f"-{leader.pid}"], check=True)
    assert found == {f"/dev/shm/{one}", f"/dev/shm/{two}"}
    assert nobodys == set()
    left_behind.remove(found)
    left_behind.remove(found)
    assert [Path("/dev/shm", name).exists() for name in (one, two, foreign)] == [False, False, True]
