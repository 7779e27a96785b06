"""A job that Slurm itself would not start takes no place."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.queue_settings import QueueSettings
from tests.daemons.controllers_bench import bench_in
from tests.daemons.test_turns import USERS, Queue, Scene


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scene], None]:
    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with bench_in(tmp_path) as bench:
                await scene(Queue(bench, QueueSettings(), free=1))

        asyncio.run(whole())

    return run


def test_a_job_that_slurm_would_not_start_takes_no_place(play: Callable[[Scene], None]) -> None:
    async def scene(q: Queue) -> None:
        """Else those that wait for the first one's end took the places that it waits for."""
        needed = await q.submit()
        dependent = await q.submit(priority=900)
        later = await q.submit(priority=900)
        slurm, at_us = q.bench.slurm, now_us()
        slurm.put("2", "PENDING", reason="JobHeldUser", dependency="afterany:1(unfulfilled)")
        slurm.put("3", "PENDING", reason="JobHeldUser", eligible_us=at_us + 3_600_000_000)
        await q.bench.parts.watch.look()
        assert await q.look() == [needed]
        assert q.words() == {dependent: "Dependency", later: "BeginTime"}
        slurm.put("1", "COMPLETED")
        slurm.put("3", "PENDING", reason="JobHeldUser", eligible_us=at_us)
        await q.bench.look()
        assert await q.look() == [dependent]
        assert q.words() == {later: "HostMemory"}

    play(scene)


def test_a_dependency_counts_before_slurm_is_asked_the_next_time(
    play: Callable[[Scene], None],
) -> None:
    async def scene(q: Queue) -> None:
        job = await q.submit(bound=False)
        slurm = q.bench.slurm
        slurm.put("1", "RUNNING")
        await q.bench.parts.watch.look()
        slurm.put("8", "PENDING", uid=1000, dependency="afterany:1(unfulfilled)")
        await q.bench.service.bind_job(USERS["a"], job, slurm_id="8")
        assert await q.look() == []
        assert q.words() == {job: "Dependency"}
        await q.bench.parts.watch.look()
        assert (await q.look(), q.bench.parts.watch.young) == ([], {})
        assert q.words() == {job: "Dependency"}

    play(scene)


def test_a_job_that_its_owner_holds_keeps_no_place_from_others(
    play: Callable[[Scene], None],
) -> None:
    async def scene(q: Queue) -> None:
        held = await q.submit(priority=900, hold="user")
        other = await q.submit()
        assert await q.look() == [other]
        assert q.words() == {held: "JobHeldUser"}
        q.bench.slurm.put("2", "COMPLETED")
        await q.bench.look()
        assert await q.look() == []
        q.bench.slurm.put("1", "PENDING", reason="None")  # its owner lets it go
        await q.bench.look()
        assert await q.look() == [held]
        assert q.words() == {}

    play(scene)


def test_a_job_that_its_owner_let_go_and_slurm_has_started_gets_its_place(
    play: Callable[[Scene], None],
) -> None:
    async def scene(q: Queue) -> None:
        job = await q.submit(hold="user")
        assert await q.look() == []
        q.bench.slurm.put("1", "RUNNING")  # before anybody could hold it again
        await q.bench.look()
        await q.look()
        assert (q.words(), list(q.bench.parts.state.jobs)) == ({}, [job])

    play(scene)
