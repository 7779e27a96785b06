"""Where Slurm knows more than a row does, or less than it did."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.daemons import controllers as module
from tests.daemons.controllers_bench import ADA, Bench, bench_in

Play = Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with bench_in(tmp_path) as bench:
                await scene(bench)

        asyncio.run(whole())

    return run


def test_a_cancelled_job_that_slurm_has_back_is_cancelled_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld was killed, and has forgotten its last seconds."""
    monkeypatch.setattr(module, "CANCEL_AGAIN_US", 1_000)

    async def scene(bench: Bench) -> None:
        bench.slurm.put("7", "PENDING", reason="JobHeldUser")
        bench.slurm.put("8", "PENDING", reason="JobHeldUser")
        job = await bench.submit("7")
        await bench.service.cancel_job(ADA, job, reason="")
        assert bench.slurm.told == [("cancel", "7")]
        bench.slurm.put("7", "CANCELLED")
        await bench.look()
        assert bench.slurm.told == [("cancel", "7")]
        bench.slurm.put("7", "PENDING", reason="JobHeldUser")
        bench.slurm.error = SlurmUnavailable("nobody answered")
        await bench.look()
        bench.slurm.error = None
        await bench.look()
        assert bench.slurm.told == [("cancel", "7")] * 2
        monkeypatch.setattr(module, "CANCELLED_US", 0)
        await bench.look()
        assert bench.parts.watch.cancelled == {}

    play(scene)


def test_an_end_is_expected_by_what_slurm_says_of_the_time_limit(play: Play) -> None:
    """Of a plain submission nobody else knows it, and scontrol may have changed any."""

    async def scene(bench: Bench) -> None:
        service: Any = bench.service
        service.placer = SimpleNamespace(ends_of=lambda _: None)
        bench.slurm.put("7", "RUNNING")
        live = await bench.admit(await bench.submit("7", time_limit_us="7000000"))
        await bench.look()
        row = await bench.row(live.id)
        began = row.started_us
        assert began is not None
        bench.slurm.put("7", "RUNNING")
        await bench.look()
        assert service._end_us(row, None, began) == began + 7_000_000
        bench.slurm.put("7", "PENDING", limit_us=60_000_000)
        await bench.look()
        assert service._limit_us(row) == 60_000_000
        # Slurm has requeued it: its limit begins anew with it.
        assert service._end_us(row, None, began + 5_000_000) == began + 65_000_000

    play(scene)
