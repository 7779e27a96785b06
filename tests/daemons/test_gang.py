"""A gang is ended at any moment of its life, and then nothing of it is left."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.daemons import gang as gang_module
from plexrl_slurm.daemons.gang import Gang
from plexrl_slurm.transport.messages import WpgConfig

BEGIN = asyncio.create_subprocess_exec


def make(folder: Path) -> tuple[Gang, list[str]]:
    """A gang of two ranks, and the states that it says it is in."""
    said: list[str] = []

    async def send(_identity: bytes, _data: bytes) -> None:
        raise AssertionError("nobody orders anything")

    config = WpgConfig(name="train-0", engine="fake_train", world=2, gpus=2, options={}, cores=[])
    gang = Gang(
        config,
        models={},
        endpoint="ipc://nobody",
        folder=folder,
        specs=folder,
        writer="test",
        send=send,
        changed=lambda changed, _reason: said.append(changed.state),
    )
    return gang, said


@pytest.mark.parametrize("number", [1, 2])
def test_a_gang_that_is_ended_while_a_rank_of_it_starts_leaves_no_rank(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        begins, go = asyncio.Event(), asyncio.Event()
        begun: list[asyncio.subprocess.Process] = []

        async def slowly(*_command: str, **options: Any) -> asyncio.subprocess.Process:
            if len(begun) == number - 1:
                begins.set()
                await go.wait()
            begun.append(await BEGIN("sleep", "300", **options))
            return begun[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
        gang, said = make(tmp_path)
        gang.start()
        await begins.wait()
        end = asyncio.create_task(gang.stop())
        await asyncio.sleep(0.1)
        go.set()
        await asyncio.wait_for(end, 60)  # and not as long as a gang may take to come up
        assert len(begun) == 2
        for process in begun:
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
        assert said == []

    asyncio.run(scenario())


def test_a_gang_that_is_ended_before_its_next_start_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        pausing = asyncio.Event()

        def pause(_failures: int) -> float:
            pausing.set()
            return 3600

        async def fails(*_command: str, **_options: Any) -> asyncio.subprocess.Process:
            raise OSError("no memory")

        monkeypatch.setattr(gang_module, "pause_after", pause)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)
        gang, said = make(tmp_path)
        gang.start()
        await pausing.wait()
        await asyncio.wait_for(gang.stop(), 60)
        assert (gang.incarnation, said) == (1, ["down"])

    asyncio.run(scenario())
