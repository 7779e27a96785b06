"""What a killed gang's libraries leave in /dev/shm."""

import subprocess
import sys
from collections.abc import Generator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from plexrl_slurm.daemons import left_behind

#: Maps a named segment and says so; a child of its own does the same.
HOLDER = """
import os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
name = sys.argv[1 + (os.fork() == 0)]
segment = SharedMemory(name)
resource_tracker.unregister(segment._name, "shared_memory")
print("mapped", flush=True)
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
