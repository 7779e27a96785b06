"""The daemon's clock is set back by an hour: timers ring, and the queue goes on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plexrl_slurm import clock
from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.limits import LimitRules, Limits
from plexrl_slurm.core.messages import Tick, WakeAt
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.turns import TurnRules
from plexrl_slurm.daemons import shell as shell_module
from plexrl_slurm.daemons import turns
from plexrl_slurm.daemons.intake import last_heard_us
from plexrl_slurm.queue_settings import QueueSettings
from tests.daemons.controllers_bench import bench_in
from tests.daemons.test_queue_book import Notes
from tests.daemons.test_shell import Bench
from tests.daemons.test_turns import USERS, Queue

S = 1_000_000
HOUR = 3600 * S


class Wall:
    """The clock on the wall; ``turn`` sets it."""

    def __init__(self) -> None:
        self.off = 0

    def __call__(self) -> int:
        return clock.now_us() + self.off


def test_a_timer_rings_when_its_time_has_passed_and_not_an_hour_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = Wall()
    steady = clock.Steady(wall)
    monkeypatch.setattr(shell_module, "now_us", steady)

    async def run() -> None:
        bench = Bench(tmp_path)
        begun = steady()
        bench.core.next = [WakeAt(at_us=begun + S // 10, cause=CauseId("test"))]
        bench.shell.tick()
        await asyncio.sleep(0)
        bench.core.heard.clear()
        wall.off = -HOUR
        async with asyncio.timeout(5):
            while not bench.core.heard:
                await asyncio.sleep(0.01)
        (tick,) = bench.core.heard
        assert isinstance(tick, Tick)
        assert begun + S // 10 <= tick.at_us <= begun + 5 * S

    asyncio.run(run())


def test_the_shell_keeps_steady_time() -> None:
    assert vars(shell_module)["now_us"] is clock.steady_us


def in_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Any, free: int = 0, **settings: Any
) -> None:
    wall = Wall()
    monkeypatch.setattr(turns, "now_us", wall)

    async def whole() -> None:
        async with bench_in(tmp_path) as bench:
            queue = Queue(bench, QueueSettings(**settings), free)
            queue.bench.service.standings.journal = Notes(queue)
            await scene(queue, wall)

    asyncio.run(whole())


def test_the_queue_goes_on_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(q: Queue, wall: Wall) -> None:
        earlier = await q.submit("a", "physics", bound=False)
        await q.use(earlier, 500)
        mine, others = await q.submit("a", "physics"), await q.submit("b", "bio")
        assert await q.look() == []
        order = [each.row.id for each in q.bench.service.standings.in_order(
            [await q.row(mine), await q.row(others)], wall())]  # fmt: skip
        wall.off = -HOUR
        q.rooms.free = 1
        assert await q.look() == [others]
        assert order[0] == others
        # Ages are of jobs that have not come yet: none, and no less than none.
        (waits,) = (await q.bench.service.priorities(USERS["a"]))["jobs"]
        assert waits["parts"]["age"] >= 0
        q.rooms.free = 2
        assert await q.look() == [mine]

    in_queue(tmp_path, monkeypatch, scene)


def test_whoever_has_waited_long_is_still_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(q: Queue, wall: Wall) -> None:
        wall.off = 3 * HOUR
        large, small = await q.submit(models=2), await q.submit(priority=900)
        assert await q.look() == []
        assert q.words() == {large: "HostMemory", small: "Priority"}
        wall.off = 2 * HOUR
        assert await q.look() == []
        assert q.words() == {large: "HostMemory", small: "Priority"}

    in_queue(tmp_path, monkeypatch, scene, free=1, turns=TurnRules(guard_us=HOUR))


def test_sentences_are_written_anew_though_they_are_of_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(q: Queue, wall: Wall) -> None:
        job = await q.submit()
        sentences = iter(["1 GiB is missing", "2 GiB are missing"])

        def admit(*_: Any, **__: Any) -> tuple[Obstacle, ...]:
            return (Obstacle(kind=ObstacleKind.HOST_MEMORY, sentence=next(sentences)),)

        q.rooms.admit = admit  # type: ignore[method-assign]
        await q.look()
        wall.off = -HOUR
        await q.look()
        assert (await q.row(job)).reason == "2 GiB are missing"

    in_queue(tmp_path, monkeypatch, scene)


def test_what_was_used_counts_neither_more_nor_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(q: Queue, wall: Wall) -> None:
        earlier = await q.submit("a", "physics", bound=False)
        await q.use(earlier, 500)
        known = q.bench.service.standings
        mine = await q.submit("b", "physics")
        assert await q.look() == []
        for off in (-HOUR, -HOUR, 0):
            wall.off = off
            assert await q.look() == []
            assert q.words() == {mine: "AssocGrpGRESMinutes"}
            (used,) = known.dues.usage(wall()).values()
            assert used == pytest.approx(500e6, rel=1e-3)

    limits = LimitRules(accounts=Limits(gpu_us_per_day=400 * 10**6))
    in_queue(tmp_path, monkeypatch, scene, free=9, limits=limits)


def test_a_session_of_the_future_falls_silent_in_its_time() -> None:
    session: Any = SimpleNamespace(heartbeat_us=10 * HOUR)
    assert last_heard_us(session, 9 * HOUR) == 9 * HOUR
    assert last_heard_us(session, 9 * HOUR + S) == 9 * HOUR
    session.heartbeat_us = 8 * HOUR
    assert last_heard_us(session, 9 * HOUR) == 8 * HOUR
