"""Holds are kept, whatever Slurm, the database and the clock do meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import DatabaseUnavailable, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.daemons import hold_hygiene, hold_job
from plexrl_slurm.daemons import holds as module
from plexrl_slurm.daemons import watch as watch_module
from plexrl_slurm.db import holds as rows
from plexrl_slurm.db import queue
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import Daemon, World, world_in

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[..., None]
SECOND = 1_000_000


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene, **hold: Any) -> None:
        async def whole() -> None:
            async with world_in(tmp_path, **hold) as world:
                await scene(world)

        asyncio.run(whole())

    return run


def submitted(world: World) -> int:
    return sum(verb == "submit" for verb, _ in world.slurm.told)


def break_store(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, *functions: object) -> None:
    """Those functions find no database."""
    real = daemon.store.run

    async def run(function: Any, *arguments: Any, **named: Any) -> Any:
        if function in functions:
            raise DatabaseUnavailable("sqlite:///x.db", "it is locked")
        return await real(function, *arguments, **named)

    monkeypatch.setattr(daemon.store, "run", run)


# ---- trouble that passes -----------------------------------------------------------------------


def test_a_database_that_is_away_ends_neither_the_keeper_nor_a_submission(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        with monkeypatch.context() as broken:
            break_store(daemon, broken, rows.next_hold_id)
            keeping = asyncio.create_task(daemon.keeper.run())
            for _ in range(3):
                await daemon.parts.watch.look()
                await asyncio.sleep(0.01)
            assert not keeping.done()
            assert submitted(world) == 0
            assert "locked" in daemon.keeper.trouble
        await daemon.parts.watch.look()
        async with asyncio.timeout(30):
            while not submitted(world):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert submitted(world) == 1
        keeping.cancel()
        await daemon.writer.drain()
        (hold,) = daemon.keeper.live
        assert (await daemon.row(hold)).slurm_id == "101"

    play(scene)


def test_a_hold_whose_row_cannot_be_written_yet_is_kept(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        with monkeypatch.context() as broken:
            break_store(daemon, broken, rows.open_hold)
            await daemon.look()
        assert len(daemon.keeper.live) == 1
        await daemon.look()
        assert submitted(world) == 1
        (hold,) = daemon.keeper.live
        await daemon.writer.drain()
        assert (await daemon.row(hold)).slurm_id == "101"

    play(scene)


def test_a_daemon_that_starts_while_slurm_does_not_answer_adopts_and_submits_nothing(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        first = await world.daemon()
        hold = await first.hold("n1")
        await first.die()
        world.slurm.error = SlurmUnavailable("slurmctld does not answer")
        second = await world.daemon()
        await second.keeper.look()
        await second.keeper.look()
        assert set(second.keeper.live) == {hold}
        assert len(second.keeper.live[hold].wpgs) == 2
        await second.hello(hold, "n1")
        assert second.orders(f"{hold}.0.n1".encode(), tm.Welcome)
        world.slurm.error = None
        await second.look()
        assert submitted(world) == 1
        assert len(second.keeper.live[hold].wpgs) == 2

    play(scene)


def test_a_daemon_that_slept_does_not_take_its_agents_for_silent(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        await daemon.look()
        asleep_us = 3600 * SECOND
        monkeypatch.setattr(hold_hygiene, "now_us", lambda: now_us() + asleep_us)
        await daemon.look()
        assert len(daemon.keeper.live[hold].wpgs) == 2

    play(scene)


def test_a_node_whose_agent_never_says_hello_is_lost_in_the_end(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1", "n2")
        await daemon.hello(hold, "n1")
        step_us = 60 * SECOND
        for turn in range(1, 30):
            monkeypatch.setattr(hold_hygiene, "now_us", lambda by=turn: now_us() + by * step_us)
            for agent in daemon.hub.agents.values():
                agent.heard_us = now_us() + turn * step_us
            await daemon.look()
        assert {place.node for place in daemon.keeper.live[hold].places} == {"n1"}

    play(scene)


def test_a_job_stays_where_it_is_though_another_hold_ended_while_no_daemon_was_there(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        while len(daemon.keeper.live) < 3:
            await daemon.look()
        holds = list(daemon.keeper.live)
        for number, hold in enumerate(holds):
            daemon.give_nodes(hold, f"n{number}")
        await daemon.look()
        job = await daemon.job()
        last = daemon.keeper.live[holds[2]]
        homes = {str(held.slot.pool): str(wpg) for wpg, held in last.wpgs.items()}
        await world.store.run(queue.set_homes, job.id, homes)
        await daemon.die()
        daemon.end(daemon.keeper.live[holds[1]].slurm_id, end_us=now_us())
        daemon = await world.daemon()
        await daemon.look()
        assert holds[1] not in daemon.keeper.live
        found = {str(pool): str(wpg) for pool, wpg in daemon.state.jobs[job.id].homes.items()}
        assert found == homes

    play(scene, min=3, max=3)


# ---- requeued while nobody looked --------------------------------------------------------------


@pytest.mark.parametrize("daemon_dies", [True, False])
def test_a_hold_that_was_requeued_and_runs_again_unseen_has_new_nodes_and_true_books(
    play: Play, daemon_dies: bool
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        await daemon.settle()
        if daemon_dies:
            await daemon.die()
            world_start = now_us()
        await asyncio.sleep(0.02)
        number = daemon.keeper.live[hold].slurm_id
        other = SlurmId(f"{number}1")
        world_start = now_us()
        world.slurm.run(number, "n3", components=(number, other), start_us=world_start, restarts=1)
        world.slurm.run(other, "n3", leader=number)
        if daemon_dies:
            daemon = await world.daemon()
        await daemon.look()
        await daemon.look()
        live = daemon.keeper.live[hold]
        assert {place.node for place in live.places} == {"n3"}
        assert len(live.wpgs) == 2
        assert live.running_us is not None and live.running_us >= world_start
        assert await daemon.flaws(hold) == []
        assert submitted(world) == 1

    play(scene)


def test_the_node_that_is_down_when_slurm_requeues_a_hold_is_blamed(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1", "n2")
        await daemon.all_up(hold, "n1", "n2")
        await daemon.look()
        number = daemon.keeper.live[hold].slurm_id
        world.slurm.down = {"n2"}
        world.slurm.put(number, "PENDING", reason="BeginTime", restarts=1)
        await daemon.look()
        await daemon.look()
        (fault,) = await daemon.parts.store.run(rows.node_faults, partition="rlvr", since_us=0)
        assert fault.node == "n2" and "while node n2 was DOWN" in fault.reason

    play(scene)


@pytest.mark.parametrize("other", ["FAILED", "gone", "PENDING"])
def test_a_hold_that_slurm_requeued_without_a_component_is_replaced(play: Play, other: str) -> None:
    """22.05: the first component has one node, the other two, and one of those is lost."""

    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1", "n2")
        await daemon.all_up(hold, "n1", "n2")
        await daemon.look()
        number = daemon.keeper.live[hold].slurm_id
        second = SlurmId(f"{number}1")
        for look in range(20):
            reason = "BeginTime" if look < 3 else "Resources"
            world.slurm.put(
                number, "PENDING", components=(number, second), reason=reason, restarts=1
            )
            world.slurm.put(second, "PENDING" if other == "PENDING" else "FAILED", leader=number)
            if other == "gone":
                del world.slurm.jobs[second]
            await daemon.look()
        torn = other != "PENDING"
        assert (hold not in daemon.keeper.live) == torn
        assert (("cancel", number) in world.slurm.told) == torn
        assert submitted(world) == 1 + torn
        assert await daemon.flaws(hold) == []

    play(scene)


def test_books_of_a_requeued_hold_do_not_overlap_though_the_daemon_was_started_again(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        began = daemon.keeper.live[hold].running_us
        assert began is not None
        world.slurm.put(daemon.keeper.live[hold].slurm_id, "PENDING", reason="BeginTime")
        await daemon.look()
        await daemon.settle()
        await daemon.die()
        daemon = await world.daemon()
        # Slurm cuts its instants to seconds.
        daemon.give_nodes(hold, "n1", start_us=began - SECOND, restarts=1)
        await daemon.look()
        assert await daemon.flaws(hold) == []

    play(scene)


def test_a_drain_is_over_for_the_next_daemon_too_once_slurm_has_requeued_the_hold(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        daemon.keeper._drain(daemon.keeper.live[hold], "a test")
        world.slurm.put(daemon.keeper.live[hold].slurm_id, "PENDING", reason="Priority")
        await daemon.look()
        daemon.give_nodes(hold, "n1", start_us=now_us() + SECOND)
        await daemon.look()
        await daemon.die()
        daemon = await world.daemon()
        assert not daemon.keeper.live[hold].draining

    play(scene)


# ---- given back --------------------------------------------------------------------------------


def test_a_hold_that_starts_while_it_is_given_back_gets_no_work(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        await daemon.look()
        (hold,) = daemon.keeper.live
        world.slurm.error = SlurmUnavailable("slurmctld does not answer")
        await daemon.keeper.release(daemon.keeper.live[hold])
        world.slurm.error = None
        daemon.give_nodes(hold, "n1")
        await daemon.look()
        assert daemon.parts.placer.wpgs == {}
        assert ("cancel", daemon.keeper.live[hold].slurm_id) in world.slurm.told
        await daemon.hello(hold, "n1")
        assert daemon.orders(f"{hold}.0.n1".encode(), tm.StopOrder)

    play(scene)


def test_taking_the_partition_down_gives_a_hold_back_that_is_just_being_submitted(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        real, begun = hold_job.submit_hold, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*arguments: Any, **named: Any) -> SlurmId:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result()
            return real(*arguments, **named)

        monkeypatch.setattr(module, "submit_hold", slow)
        await daemon.parts.watch.look()
        looking = asyncio.create_task(daemon.keeper.look())
        await begun.wait()
        await daemon.keeper.release_all(0.0)
        await looking
        assert ("cancel", "101") in world.slurm.told
        assert daemon.keeper.live == {}
        assert str((await daemon.row("h1")).state) == "ended"

    play(scene)


def test_a_limit_that_slurm_says_it_raised_and_did_not_counts_as_refused(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        daemon.give_nodes(hold, "n1", start_us=1, end_us=now_us() + 600 * SECOND)
        await daemon.look()
        assert ("limit", "101") in world.slurm.told
        assert not daemon.keeper.live[hold].extend_refused
        monkeypatch.setattr(watch_module, "now_us", lambda: now_us() + 120 * SECOND)
        await daemon.look()
        assert daemon.keeper.live[hold].extend_refused
        assert submitted(world) == 2

    play(scene)
