"""Deployments that lose their home find another, whoever was just about to make them."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadInput, ModelTooLarge
from plexrl_slurm.core.ids import DeploymentId, JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.daemons import layout
from plexrl_slurm.daemons.layout import Place, Room, lay_out, wpg_slots
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.db import deployments, queue
from plexrl_slurm.settings import WpgSettings
from tests.daemons.holds_bench import TINY, TRAIN, Daemon, World, settings_in, world_in

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene, **hold: Any) -> None:
        async def whole() -> None:
            async with world_in(tmp_path, **hold) as world:
                await scene(world)

        asyncio.run(whole())

    return run


async def running(world: World) -> tuple[Daemon, str, LiveJob]:
    """A daemon, its hold, and a job with its homes there."""
    daemon = await world.daemon()
    hold = await daemon.hold("n1")
    await daemon.all_up(hold, "n1")
    await daemon.look()
    return daemon, hold, await daemon.job()


async def lose(daemon: Daemon, hold: str) -> None:
    """The hold ends; the next one is submitted."""
    daemon.end(daemon.keeper.live[hold].slurm_id, end_us=now_us())
    await daemon.look()
    assert hold not in daemon.keeper.live


async def next_hold(daemon: Daemon, *nodes: str) -> str:
    (new,) = daemon.keeper.live
    daemon.give_nodes(new, *nodes)
    await daemon.look()
    await daemon.all_up(new, *nodes)
    await asyncio.sleep(0.01)
    return new


def test_an_admitted_job_whose_hold_ends_before_its_first_call_waits_for_the_next_one(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        daemon, hold, job = await running(world)
        session = await daemon.session(job)
        await lose(daemon, hold)
        call, _ = await daemon.model(job, session)
        assert not daemon.shell.entries[call].ended.is_set()
        new = await next_hold(daemon, "n2")
        await daemon.finish_runs(f"{new}.0.n2".encode())
        assert daemon.shell.entries[call].ended.is_set()

    play(scene)


@pytest.mark.parametrize("pool", [Pool.TRAIN, Pool.ROLLOUT])
def test_what_is_being_made_when_its_home_goes_follows_its_job(
    play: Play, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    async def scene(world: World) -> None:
        daemon, hold, job = await running(world)
        session = await daemon.session(job)
        first, model = await daemon.model(job, session)
        await asyncio.sleep(0.01)
        await daemon.finish_runs(f"{hold}.0.n1".encode())
        go, real = asyncio.Event(), daemon.store.run
        records = (daemon.service._record_model, daemon.service._record_snapshot)

        async def slow(function: Any, *arguments: Any, **named: Any) -> Any:
            if function in records:
                await go.wait()
            return await real(function, *arguments, **named)

        monkeypatch.setattr(daemon.store, "run", slow)
        making: asyncio.Future[Any]
        if pool is Pool.TRAIN:
            making = asyncio.ensure_future(daemon.model(job, session, 1))
        else:
            making = asyncio.ensure_future(
                daemon.service.publish(
                    daemon.who(job),
                    model_id=model,
                    seq_id=1,
                    name=None,
                    sampling_session_seq_id=0,
                )
            )
        await asyncio.sleep(0.01)
        await lose(daemon, hold)
        # Another hold's WPGs have the old names by then, so that the new ones have others.
        taken = dict(daemon.parts.placer.wpgs)
        monkeypatch.setattr(layout, "_name", lambda slot, _: f"{slot.name}-again")
        new = await next_hold(daemon, "n2")
        assert job.homes[pool] == f"{pool}-0-again"
        go.set()
        await making
        await daemon.look()
        assert taken == {}
        if pool is Pool.TRAIN:
            (wpg,) = {live.wpg for live in daemon.state.deployments.values()}
        else:
            (wpg,) = {snapshot.wpg for snapshot in daemon.state.snapshots.values()}
        assert wpg == f"{pool}-0-again"
        assert new in daemon.keeper.live
        assert first

    play(scene)


def test_a_deployment_that_was_written_down_at_a_home_that_is_gone_is_found_and_moved(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        daemon, hold, job = await running(world)
        session = await daemon.session(job)
        _, model = await daemon.model(job, session)
        name = DeploymentId(model)
        await daemon.writer.drain()
        gone = WpgId("train-9")
        await world.store.run(deployments.moved, name, wpg=gone, now_us=1)
        await daemon.die()
        daemon = await world.daemon()
        await daemon.hello(hold, "n1")
        await daemon.look()
        assert daemon.state.deployments[name].wpg == TRAIN
        assert daemon.shell.deployments[name].wpg == TRAIN
        await daemon.writer.drain()
        told = [row.text for row in await world.store.run(queue.story, job.id)]
        assert f"WPG train-9 is held no more: train-9 -> {TRAIN}" in told

    play(scene)


def test_a_model_waits_while_only_smaller_wpgs_than_it_needs_are_held(
    tmp_path: Path,
) -> None:
    large = WpgSettings(pool="train", engine="fake_train", gpus=2)
    small = WpgSettings(
        pool="train", engine="fake_train", options={"device_bytes": TINY.train_bytes - 1}
    )
    settings = replace(settings_in(tmp_path), wpgs=(large, small))
    placer = Placer(State(), settings)
    room = Room(place=Place(hold="h1", component=0, node="n1"), pool=Pool.TRAIN, gpus=1)
    (held,) = lay_out(wpg_slots(settings), [room], taken=())
    placer.wpgs[held.id] = held
    job = LiveJob(
        id=JobId(1),
        uid=1,
        user="ada",
        name="j",
        seed=0,
        priority=1,
        slurm_id=SlurmId("1"),
        running=False,
    )
    assert any("larger train WPG" in each.sentence for each in placer.admit(job, ["tiny"]))
    with pytest.raises(BadInput, match="larger train WPG"):
        placer.home(job, Pool.TRAIN, TINY)
    job.declared = [(Pool.TRAIN, TINY.train_bytes)]
    assert placer.rehome(job, Pool.TRAIN) is None
    too_small = replace(settings, wpgs=(small,))
    other = Placer(State(), too_small)
    other.wpgs[held.id] = held
    with pytest.raises(ModelTooLarge):
        other.admit(job, ["tiny"])


def test_each_node_of_a_wpg_has_its_share_of_an_image(tmp_path: Path) -> None:
    table = WpgSettings(pool="train", engine="fake_train", gpus=2, nodes=2)
    # Two images do not fit into one node's memory, and their halves do.
    settings = replace(
        settings_in(tmp_path), wpgs=(table,), host_bytes=TINY.train_bytes + TINY.train_bytes // 4
    )
    rooms = [
        Room(place=Place(hold="h1", component=0, node=node), pool=Pool.TRAIN, gpus=1)
        for node in ("n1", "n2")
    ]
    job = LiveJob(
        id=JobId(1), uid=1, user="ada", name="j", seed=0, priority=1, slurm_id=SlurmId("1"),
        running=False,
    )  # fmt: skip
    placer = Placer(State(), settings)
    (held,) = lay_out(wpg_slots(settings), rooms, taken=())
    placer.wpgs[held.id] = held
    assert placer.home(job, Pool.TRAIN, TINY) == held.id
    one_node = replace(settings, wpgs=(replace(table, nodes=1),))
    other = Placer(State(), one_node)
    whole = [replace(rooms[0], gpus=2)]
    (alone,) = lay_out(wpg_slots(one_node), whole, taken=())
    other.wpgs[alone.id] = alone
    job.homes.clear()
    with pytest.raises(ModelTooLarge):
        other.home(job, Pool.TRAIN, TINY)
