"""A job moves to another training WPG once it is known that promises break where it is."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import DeploymentId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.profiles import Guess
from plexrl_slurm.daemons import relief as module
from plexrl_slurm.daemons.relief import Relief
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from plexrl_slurm.settings import WpgSettings
from plexrl_slurm.sharing_settings import SharingSettings
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import TICK_S, Daemon, World, settings_in

FIRST, SECOND = WpgId("train-0"), WpgId("train-1")
SHARING = SharingSettings(regroup_us=0)


@contextlib.asynccontextmanager
async def world_in(folder: Path, sharing: SharingSettings) -> AsyncIterator[World]:
    """Two training WPGs and one to sample on."""
    wpgs = (
        WpgSettings(pool="train", engine="fake_train", count=2),
        WpgSettings(pool="rollout", engine="fake_sample"),
    )
    settings = replace(settings_in(folder), wpgs=wpgs, sharing=sharing)
    engine = open_database(settings.database_url)
    upgrade(engine)
    try:
        async with Store(engine) as store:
            world = World(settings, store)
            try:
                yield world
            finally:
                for daemon in world.daemons:
                    await daemon.die(written=False)
    finally:
        engine.dispose()


Scene = Callable[[Daemon, Relief, LiveJob, LiveJob, str], Any]
Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene, sharing: SharingSettings = SHARING) -> None:
        async def whole() -> None:
            async with world_in(tmp_path, sharing) as world:
                daemon = await world.daemon()
                hold = await daemon.hold("n1")
                await daemon.all_up(hold, "n1")
                await daemon.look()
                relief = Relief(daemon.parts, daemon.mover)
                daemon.shell.on_drained = relief.drained
                one, two = await daemon.job("7"), await daemon.job("8")
                for job in (one, two):
                    job.started_us = 1
                assert {job.homes[Pool.TRAIN] for job in (one, two)} == {FIRST}
                await scene(daemon, relief, one, two, hold)
                assert await daemon.flaws(hold) == []

        asyncio.run(whole())

    return run


def learn(daemon: Daemon, relief: Relief, *jobs: LiveJob) -> None:
    """They train almost half of the time, which nobody had guessed."""
    habits = Guess(train_share=0.45, sample_share=0.01).habits()
    daemon.parts.placer.habits_of = lambda _job, _model, _gpus: habits
    for job in jobs:
        relief.heard_news(job.id)


def rests(relief: Relief) -> bool:
    return relief.under_way is None


async def copy_all(daemon: Daemon, address: bytes) -> None:
    """The agent saves and copies whatever it is told to."""
    seen: set[str] = set()
    for _ in range(10):
        await asyncio.sleep(TICK_S)
        orders: list[tuple[tm.SaveOrder | tm.PersistOrder, str, tuple[int, int]]] = []
        orders += [
            (order, "save", order.progress) for order in daemon.orders(address, tm.SaveOrder)
        ]
        orders += [(order, "persist", (1, 0)) for order in daemon.orders(address, tm.PersistOrder)]
        for order, what, progress in orders:
            if order.id not in seen:
                seen.add(order.id)
                done = tm.Done(
                    number=2000 + len(seen), wpg=order.wpg, order=order.id, what=what, ok=True,
                    deployment=order.deployment, progress=progress,
                )  # fmt: skip
                daemon.hub._heard(address, done)
        await daemon.writer.drain()


def test_a_job_with_nothing_under_way_moves_at_once_and_the_wpg_goes_on(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=module.__name__)

    async def scene(daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, hold: str) -> None:
        relief.look()
        assert rests(relief)  # nobody knows better yet
        learn(daemon, relief, one, two)
        relief.look()
        await asyncio.sleep(TICK_S)
        assert {one.homes[Pool.TRAIN], two.homes[Pool.TRAIN]} == {FIRST, SECOND}
        assert one.homes[Pool.ROLLOUT] == two.homes[Pool.ROLLOUT]
        assert relief.count == 1
        assert rests(relief)
        assert not any(view.draining for view in daemon.shell.core.views())
        relief.look()
        relief.look()
        assert relief.count == 1
        await daemon.writer.drain()
        moved = next(job for job in (one, two) if job.homes[Pool.TRAIN] == SECOND)
        story = await daemon.store.run(queue.story, moved.id)
        assert any("promised slowdowns" in line.text for line in story if line.kind == "moved")
        assert f"homes={{'{moved.slurm_id}': 'train-1'}}" in caplog.text

    play(scene)


def test_what_a_job_trains_moves_along_when_its_calls_have_ended(play: Play) -> None:
    async def scene(daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, hold: str) -> None:
        session = await daemon.session(one)
        _, model = await daemon.model(one, session)
        learn(daemon, relief, one, two)
        # The other one is tied, so it is this one that has to go.
        two.started_us = None
        await asyncio.sleep(TICK_S)
        relief.look()
        await asyncio.sleep(TICK_S)
        assert relief.under_way is not None
        assert daemon.state.deployments[DeploymentId(model)].wpg == FIRST  # its create runs
        await daemon.finish_runs(f"{hold}.0.n1".encode())
        await asyncio.sleep(TICK_S)
        # Until its state is durable nothing moves.
        assert one.homes[Pool.TRAIN] == FIRST
        views = {view.wpg: view for view in daemon.shell.core.views()}
        assert views[FIRST].draining
        assert relief.under_way.what.homes == ((one.id, SECOND),)
        await copy_all(daemon, f"{hold}.0.n1".encode())
        assert rests(relief)
        assert one.homes[Pool.TRAIN] == SECOND
        assert daemon.state.deployments[DeploymentId(model)].wpg == SECOND
        assert daemon.shell.deployments[DeploymentId(model)].wpg == SECOND

    play(scene)


def test_a_relief_that_takes_too_long_is_given_up_and_the_wpg_goes_on(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, hold: str) -> None:
        session = await daemon.session(one)
        await daemon.model(one, session)
        learn(daemon, relief, one, two)
        two.started_us = None
        await asyncio.sleep(TICK_S)
        relief.look()
        monkeypatch.setattr(module, "PATIENCE_US", -1)
        relief.look()
        assert rests(relief)
        assert one.homes[Pool.TRAIN] == FIRST
        assert not any(view.draining for view in daemon.shell.core.views())

    play(scene)


def test_a_wpg_that_is_given_back_meanwhile_is_the_movers(play: Play) -> None:
    async def scene(daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, hold: str) -> None:
        session = await daemon.session(one)
        await daemon.model(one, session)
        learn(daemon, relief, one, two)
        two.started_us = None
        await asyncio.sleep(TICK_S)
        relief.look()
        daemon.keeper._drain(daemon.keeper.live[hold], "a test")
        relief.look()
        assert rests(relief)
        assert any(view.draining for view in daemon.shell.core.views())

    play(scene)


@pytest.mark.parametrize(
    "sharing",
    [
        pytest.param(SharingSettings(regroup=False, regroup_us=0), id="switched off"),
        pytest.param(SharingSettings(placement="pack", regroup_us=0), id="no promises"),
        pytest.param(SharingSettings(), id="they have just come"),
    ],
)
def test_nobody_moves_where_nobody_should(play: Play, sharing: SharingSettings) -> None:
    async def scene(daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, hold: str) -> None:
        for job in (one, two):
            job.started_us = now_us()
        learn(daemon, relief, one, two)
        relief.look()
        await asyncio.sleep(TICK_S)
        assert relief.count == 0
        assert one.homes == two.homes

    play(scene, sharing)
