"""Agents are believed as long as they are the partition's, and no longer."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CauseId, DeploymentId
from plexrl_slurm.core.messages import Persist, Persisted
from plexrl_slurm.daemons.agent_config import AgentConfig
from plexrl_slurm.daemons.agentd import Agent
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import TRAIN, Daemon, World, world_in

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[[Scene], None]
MODEL = DeploymentId("job7-1:train:0")


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene) -> None:
        async def whole() -> None:
            async with world_in(tmp_path) as world:
                await scene(world)

        asyncio.run(whole())

    return run


def address(hold: str, node: str) -> bytes:
    return f"{hold}.0.{node}".encode()


def lose_node(daemon: Daemon, hold: str, node: str) -> None:
    live = daemon.keeper.live[hold]
    for place in [place for place in live.places if place.node == node]:
        daemon.keeper._wpgs.lose_place(live, place, f"Slurm lost node {node}")


# ---- fencing -----------------------------------------------------------------------------------


def test_an_agent_of_a_lost_node_is_refused_by_the_next_daemon_too(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1", "n2")
        await daemon.all_up(hold, "n1", "n2")
        lose_node(daemon, hold, "n1")
        assert daemon.orders(address(hold, "n1"), tm.StopOrder)
        await daemon.die()
        daemon = await world.daemon()
        await daemon.hello(hold, "n1")
        assert daemon.orders(address(hold, "n1"), tm.StopOrder)
        assert not daemon.orders(address(hold, "n1"), tm.Welcome)

    play(scene)


def test_an_agent_of_a_hold_that_waits_is_asked_again_when_its_nodes_are_known(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        world.slurm.put(daemon.keeper.live[hold].slurm_id, "PENDING", reason="Priority")
        await daemon.look()
        await daemon.die()
        daemon = await world.daemon()
        # One of its former node, which it does not get again, and an early one of its next.
        for node in ("n1", "n2"):
            await daemon.hello(hold, node)
            assert not daemon.server.posted
        daemon.give_nodes(hold, "n2", start_us=now_us() + 1_000_000)
        await daemon.look()
        for node in ("n1", "n2"):
            assert daemon.orders(address(hold, node), tm.WhoAreYou)
            await daemon.hello(hold, node)
        assert daemon.orders(address(hold, "n1"), tm.StopOrder)
        assert daemon.orders(address(hold, "n2"), tm.Welcome)

    play(scene)


def test_an_agent_of_a_time_before_its_hold_was_requeued_is_refused(play: Play) -> None:
    """It never ended, and its hold has the same node again."""

    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        number = daemon.keeper.live[hold].slurm_id
        world.slurm.put(number, "PENDING", reason="BeginTime", restarts=1)
        await daemon.look()
        daemon.give_nodes(hold, "n1", start_us=now_us() + 1_000_000, restarts=1)
        await daemon.look()
        await daemon.hello(hold, "n1", epoch=1)
        assert daemon.orders(address(hold, "n1"), tm.StopOrder)
        assert not daemon.orders(address(hold, "n1"), tm.Welcome)
        await daemon.hello(hold, "n1", epoch=2, restarts=1)
        assert daemon.orders(address(hold, "n1"), tm.Welcome)

    play(scene)


def test_an_agent_of_a_hold_that_nobody_knows_is_sent_away(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        await daemon.hello("h9", "n1")
        assert daemon.orders(address("h9", "n1"), tm.StopOrder)

    play(scene)


def test_a_report_that_cannot_be_read_ends_nothing(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        hello = tm.Hello(
            agent="x", hold=hold, node="n1", epoch=1, pid=1, wpgs=[], images=[], snapshots=[],
            finished=[],
        )  # fmt: skip
        said = [b"\x81\xa4type\xa5hello", tm.encode(hello)]

        async def receive() -> tuple[bytes, tm.Report]:
            if not said:
                await asyncio.Event().wait()
            return address(hold, "n1"), tm.decode_report(said.pop(0))

        daemon.server.receive = receive  # type: ignore[attr-defined]
        listening = asyncio.create_task(daemon.hub.listen())
        await asyncio.sleep(0.02)
        assert not listening.done()
        assert daemon.orders(address(hold, "n1"), tm.Welcome)
        listening.cancel()

    play(scene)


def test_what_an_agent_was_told_to_drop_is_on_none_of_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        agent = Agent(
            AgentConfig(
                agent="h1.0.n1",
                hold="h1",
                node="n1",
                endpoint="tcp://127.0.0.1:9",
                state_dir=str(tmp_path),
                host_dir=str(tmp_path / "host"),
            )
        )
        agent._orders.resident |= {"train-0": "moved", "train-1": "stays"}
        said = [tm.DropOrder(epoch=1, deployments=["moved"], snapshots=[])]

        async def receive() -> tm.Command:
            if not said:
                await asyncio.Event().wait()
            return said.pop()

        monkeypatch.setattr(agent._link, "receive", receive)
        hearing = asyncio.create_task(agent._hear_daemon())
        await asyncio.sleep(0.02)
        assert agent._orders.resident == {"train-1": "stays"}
        hearing.cancel()
        agent._link.close()
        agent._inbox.close()
        agent._ranks.close()
        agent._context.term()
        shutil.rmtree(agent._private)

    asyncio.run(scene())


# ---- copies to the durable tier ----------------------------------------------------------------


async def persisting(world: World, daemon: Daemon, hold: str) -> list[Persisted]:
    """A copy is under way at n1; what the core hears of its end."""
    heard: list[Persisted] = []
    real = daemon.shell.feed

    def feed(event: Any) -> None:
        if isinstance(event, Persisted):
            heard.append(event)
        real(event)

    daemon.shell.feed = feed  # type: ignore[method-assign]
    daemon.hub.persist(
        Persist(deployment=MODEL, wpg=TRAIN, progress=(4, 0), cause=CauseId("test")), None
    )
    assert daemon.orders(address(hold, "n1"), tm.PersistOrder)
    return heard


def done(progress: tuple[int, int] = (4, 0)) -> tm.Done:
    return tm.Done(
        number=9,
        wpg=TRAIN,
        order="1",
        what="persist",
        ok=True,
        deployment=MODEL,
        progress=progress,
    )


def test_a_wpg_whose_ranks_die_whenever_they_are_woken_costs_its_node(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        agent = address(hold, "n1")
        reason = "its ranks died while they were woken: rank 0 ended with exit code 1"
        granted = structs.replace(done(), what="grant", ok=False, error=reason)

        def die(times: int) -> None:
            for number in range(times):
                for state in ("down", "up"):
                    daemon.hub._heard(
                        agent,
                        tm.WpgChanged(
                            number=9, name=TRAIN, state=state, incarnation=number + 2, pids=[1],
                            reason="rank 0 ended" if state == "down" else "", at_us=now_us(),
                        ),
                    )  # fmt: skip
                    if state == "down":
                        daemon.hub._heard(agent, granted)

        die(3)
        view = daemon.hub.wpgs[TRAIN]
        assert (view.state, view.reason) == ("up", reason), "an admin sees it while it is up too"
        assert daemon.hub.hopeless() == []
        daemon.hub._heard(agent, structs.replace(granted, ok=True, error=""))
        die(3)
        assert daemon.hub.hopeless() == []
        die(1)
        ((place, said),) = daemon.hub.hopeless()
        assert (place.node, said) == ("n1", f"WPG {TRAIN} does not start: {reason}")

    play(scene)


def test_a_copy_that_dies_with_its_agent_has_failed(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        heard = await persisting(world, daemon, hold)
        await daemon.hello(hold, "n1", epoch=2)
        assert [event.ok for event in heard] == [False]

    play(scene)


def test_the_end_of_a_copy_is_heard_only_from_whom_it_was_asked(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        heard = await persisting(world, daemon, hold)
        daemon.hub._heard(b"another", done((2, 0)))
        assert heard == []
        daemon.hub._heard(address(hold, "n1"), done())
        await daemon.writer.drain()
        assert [event.ok for event in heard] == [True]

    play(scene)


def test_a_copy_that_was_under_way_when_its_deployment_left_is_nobodys_answer(play: Play) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        heard = await persisting(world, daemon, hold)
        daemon.hub.drop_at(TRAIN, deployments=[MODEL])
        assert daemon.orders(address(hold, "n1"), tm.DropOrder)
        daemon.hub._heard(address(hold, "n1"), done())
        await daemon.writer.drain()
        assert heard == []
        assert daemon.shell.durable_progress(MODEL) is None

    play(scene)
