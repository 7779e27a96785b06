"""Two gangs that take turns on the same GPUs, with engines that only say what they take."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import DeviceBusy
from plexrl_slurm.daemons.shared_gpus import Share, SharedGpus, WakeLost
from plexrl_slurm.engines import ranklink
from tests.engines.ranks import Ranks, wpg
from tests.model_folders import make_model_folder

MODEL = ModelSpec(
    name="tiny",
    path="",
    dtype="float32",
    max_context_length=128,
    vocab_size=64,
    parameters=1000,
    architecture="tiny",
)
#: What each takes awake and asleep, and the GPU has.
TRAIN = {"device_used": 70, "device_left": 4, "device_total": 100}
ROLLOUT = {"device_used": 60, "device_left": 6, "device_total": 100}


def run(
    folder: Path,
    work: Callable[[Ranks, SharedGpus], Awaitable[None]],
    *,
    residual: int = 10,
    needed: int = 60,
    rollout: dict[str, Any] | None = None,
) -> None:
    async def main() -> None:
        configs = (
            structs.replace(wpg("train-0", "fake_train", gpus=2, **TRAIN), group="train-0"),
            structs.replace(
                wpg("rollout-0", "fake_sample", **ROLLOUT, **(rollout or {})), group="train-0"
            ),
        )
        numbers = count()
        model = replace(MODEL, path=str(make_model_folder(folder / "tiny")))
        async with Ranks.running(folder, {"tiny": model}, *configs) as ranks:
            shares = {
                name: Share(
                    gang=gang,
                    awake_bytes=needed * gang.processes,
                    residual_bytes=residual * gang.processes,
                )
                for name, gang in ranks.gangs.items()
            }
            await work(ranks, SharedGpus(shares, order_id=lambda: f"turn-{next(numbers)}"))

    asyncio.run(main())


async def create(ranks: Ranks) -> ranklink.Answer:
    body = wire.encode(wire.Create(base_model="tiny"))
    return await ranks.order("train-0", ranklink.Call("c", "a", body))


def test_turns_are_granted_after_the_other_gave_its_memory_back(tmp_path: Path) -> None:
    async def work(ranks: Ranks, gpus: SharedGpus) -> None:
        assert gpus.awake == []
        await gpus.grant("train-0")
        assert (gpus.awake, gpus.used) == (["train-0"], {"train-0": 140})
        assert (await create(ranks)).ok
        await gpus.grant("train-0")
        assert gpus.used == {"train-0": 140}  # nothing was done
        await gpus.grant("rollout-0")
        assert (gpus.awake, gpus.used) == (["rollout-0"], {"train-0": 8, "rollout-0": 60})
        assert (await ranks.load("rollout-0", tmp_path / "tiny", model="tiny")).ok
        await asyncio.gather(gpus.grant("train-0"), gpus.grant("rollout-0"))
        assert gpus.awake == ["rollout-0"]

    run(tmp_path, work)


def test_memory_that_was_not_given_back_keeps_the_turn_where_it_was(tmp_path: Path) -> None:
    async def work(ranks: Ranks, gpus: SharedGpus) -> None:
        await gpus.grant("rollout-0")
        with pytest.raises(DeviceBusy, match="WPG rollout-0: vLLM sleeps and"):
            await gpus.grant("train-0")
        assert gpus.awake == ["rollout-0"]
        assert (await ranks.load("rollout-0", tmp_path / "tiny", model="tiny")).ok

    run(tmp_path, work, residual=1)


def test_nobody_is_woken_into_memory_that_is_not_free(tmp_path: Path) -> None:
    async def work(ranks: Ranks, gpus: SharedGpus) -> None:
        with pytest.raises(DeviceBusy, match="WPG rollout-0: vLLM needs"):
            await gpus.grant("rollout-0")
        assert gpus.awake == []

    run(tmp_path, work, needed=99)


def test_a_gang_that_was_started_anew_sleeps(tmp_path: Path) -> None:
    async def work(ranks: Ranks, gpus: SharedGpus) -> None:
        for name in ("train-0", "rollout-0"):
            await gpus.grant(name)
            os.kill(ranks.gangs[name].pids[0], signal.SIGKILL)
            await ranks.reaches(name, incarnation=2)
            assert gpus.awake == []
        await gpus.grant("train-0")
        assert gpus.awake == ["train-0"]
        assert (await create(ranks)).ok

    run(tmp_path, work)


def test_a_gang_that_dies_when_it_is_woken_is_counted_until_it_is_awake(tmp_path: Path) -> None:
    async def work(ranks: Ranks, gpus: SharedGpus) -> None:
        gang = ranks.gangs["rollout-0"]
        with pytest.raises(WakeLost, match=r"died while they were woken: .* exit code 9"):
            await gpus.grant("rollout-0")
        assert (gpus.awake, gang.lost_wakes) == ([], 1)
        await gpus.grant("train-0")  # the other is not disturbed
        await ranks.reaches("rollout-0", incarnation=2)
        await gpus.grant("rollout-0")
        assert (gpus.awake, gang.lost_wakes) == (["rollout-0"], 0)

    crash = {"crash_on": [{"kind": "wake", "count": 1}], "crash_marker": str(tmp_path / "died")}
    run(tmp_path, work, rollout=crash)


def test_a_gang_that_dies_whenever_it_is_woken_starts_less_and_less_often(tmp_path: Path) -> None:
    waits: list[int] = []

    def wait(failures: int) -> float:
        waits.append(failures)
        return 0.01

    async def work(ranks: Ranks, gpus: SharedGpus) -> None:
        for incarnation in (2, 3, 4):
            with pytest.raises(WakeLost):
                await gpus.grant("rollout-0")
            await ranks.reaches("rollout-0", incarnation=incarnation)
        assert waits == [1, 2, 3]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plexrl_slurm.daemons.gang.pause_after", wait)
        run(tmp_path, work, rollout={"crash_on": [{"kind": "wake", "count": 1}]})
