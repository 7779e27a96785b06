"""An engine's processes are watched."""

import asyncio
import subprocess
import sys
from collections.abc import Generator

import pytest

from plexrl_slurm.engines.processes import Watch

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleepers() -> Generator[list["subprocess.Popen[bytes]"], None, None]:
    started = [subprocess.Popen(SLEEPER) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_the_end_of_one_of_several_is_told_once(
    sleepers: list["subprocess.Popen[bytes]"],
) -> None:
    async def main() -> list[str]:
        told: list[str] = []
        names = {process.pid: f"worker {rank}" for rank, process in enumerate(sleepers)}
        watch = Watch(names, told.append)
        await asyncio.sleep(0.05)
        assert told == []
        for process in reversed(sleepers):
            process.kill()
            process.wait()
            await asyncio.sleep(0.05)
        watch.close()
        return told

    assert asyncio.run(main()) == [f"worker 1 (pid {sleepers[1].pid}) has ended"]


def test_one_that_has_ended_before_is_told_too_and_nothing_after_the_close(
    sleepers: list["subprocess.Popen[bytes]"],
) -> None:
    gone, other = sleepers
    gone.kill()
    gone.wait()

    async def main() -> list[str]:
        told: list[str] = []
        watch = Watch({gone.pid: "the engine", other.pid: "a worker"}, told.append)
        watch.close()
        other.kill()
        await asyncio.sleep(0.05)
        return told

    assert asyncio.run(main()) == [f"the engine (pid {gone.pid}) has ended"]
