"""Two half-empty training WPGs become one, and jobs leave a rollout WPG that breaks promises."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import DeploymentId, WpgId
from plexrl_slurm.core.leaving import Leaves
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.profiles import Guess
from plexrl_slurm.daemons import relief as module
from plexrl_slurm.daemons.relief import Relief
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from plexrl_slurm.journal import JournalledCore, replay
from plexrl_slurm.settings import WpgSettings
from plexrl_slurm.sharing_settings import SharingSettings
from plexrl_slurm.slurm_settings import ComponentSettings
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import TICK_S, Daemon, World, settings_in
from tests.daemons.test_relief import copy_all, rests

FIRST, SECOND = WpgId("train-0"), WpgId("train-1")
SHARING = SharingSettings(regroup_us=0)
Scene = Callable[[Daemon, Relief, LiveJob, LiveJob, bytes], Any]
Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Two WPGs of each pool; two jobs, each alone in the pool that is not ``together``."""

    def run(scene: Scene, together: Pool, sharing: SharingSettings = SHARING) -> None:
        async def whole() -> None:
            wpgs = (
                WpgSettings(pool="train", engine="fake_train", count=2),
                WpgSettings(pool="rollout", engine="fake_sample", count=2),
            )
            components = tuple(
                ComponentSettings(pool=pool, partition="gpu", gpus_per_node=2) for pool in Pool
            )
            known = settings_in(tmp_path, components=components)
            settings = replace(known, wpgs=wpgs, sharing=sharing)
            engine = open_database(settings.database_url)
            upgrade(engine)
            try:
                async with Store(engine) as store:
                    world = World(settings, store)
                    try:
                        await set_up(world, scene, together)
                    finally:
                        for daemon in world.daemons:
                            await daemon.die(written=False)
            finally:
                engine.dispose()

        asyncio.run(whole())

    return run


async def set_up(world: World, scene: Scene, together: Pool) -> None:
    daemon = await world.daemon()
    path = daemon.settings.state_dir / "journal.jsonl"
    journal = JournalledCore(
        find_policy("fifo"), path=path, prior=SwitchCosts(), leaving=daemon.settings.sharing.leaving
    )
    daemon.parts.placer.journal = journal.placed
    hold = await daemon.hold("n1")
    await daemon.all_up(hold, "n1")
    await daemon.look()
    relief = Relief(daemon.parts, daemon.mover)
    relief.journal = journal
    daemon.shell.on_drained = relief.drained
    one, two = await daemon.job("7"), await daemon.job("8")
    for number, job in enumerate((one, two)):
        job.started_us = 1
        for pool in Pool:
            job.homes[pool] = WpgId(f"{pool}-{0 if pool is together else number}")
    await scene(daemon, relief, one, two, f"{hold}.0.n1".encode())
    assert await daemon.flaws(hold) == []
    journal.close()
    said = path.read_text()
    assert len(list(replay(path))) == said.count("\n") - 1
    assert said.count('["still",true]') >= bool(relief.count), said


def somebody_waits(daemon: Daemon) -> None:
    daemon.state.waiting_since_us = 1


async def story(daemon: Daemon, job: LiveJob) -> dict[str, list[str]]:
    await daemon.writer.drain()
    found: dict[str, list[str]] = {}
    for line in await daemon.store.run(queue.story, job.id):
        found.setdefault(line.kind, []).append(line.text)
    return found


def test_a_job_leaves_a_rollout_wpg_on_which_promises_break(play: Play) -> None:
    async def scene(
        daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, agent: bytes
    ) -> None:
        trains = [job.homes[Pool.TRAIN] for job in (one, two)]
        relief.look()
        assert relief.under_way is None
        habits = Guess(train_share=0.01, sample_share=0.45).habits()
        daemon.parts.placer.habits_of = lambda *_: habits
        relief.heard_news(one.id)
        relief.look()
        await asyncio.sleep(TICK_S)
        assert {job.homes[Pool.ROLLOUT] for job in (one, two)} == {
            WpgId("rollout-0"), WpgId("rollout-1"),
        }  # fmt: skip
        assert [job.homes[Pool.TRAIN] for job in (one, two)] == trains
        assert (relief.count, relief.under_way) == (1, None)
        assert not any(view.draining for view in daemon.shell.core.views())
        moved = next(job for job in (one, two) if job.homes[Pool.ROLLOUT] == "rollout-1")
        told = await story(daemon, moved)
        assert "promised slowdowns are kept: rollout-0 -> rollout-1" in told["moved"][0]
        assert "rollout-0 is drained for a moment" in told["regroup"][0]
        row = await daemon.store.run(queue.get, moved.id)
        assert row.homes["rollout"] == "rollout-1"

    play(scene, Pool.ROLLOUT)


def test_what_is_published_moves_along(play: Play) -> None:
    async def scene(
        daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, agent: bytes
    ) -> None:
        session = await daemon.session(one)
        _, model = await daemon.model(one, session)
        await asyncio.sleep(TICK_S)
        await daemon.finish_runs(agent)
        await daemon.service.publish(
            daemon.who(one), model_id=model, seq_id=1, name=None, sampling_session_seq_id=0
        )
        (snapshot,) = daemon.state.snapshots.values()
        assert snapshot.wpg == "rollout-0"
        habits = Guess(train_share=0.01, sample_share=0.45).habits()
        daemon.parts.placer.habits_of = lambda *_: habits
        two.started_us = None
        relief.heard_news(one.id)
        relief.look()
        await asyncio.sleep(TICK_S)
        assert snapshot.wpg == "rollout-1"
        assert (one.homes[Pool.ROLLOUT], relief.count) == ("rollout-1", 1)
        await daemon.finish_runs(agent)
        assert all(each.wpg == "rollout-1" for each in daemon.state.snapshots.values())

    play(scene, Pool.ROLLOUT)


def test_two_half_empty_wpgs_become_one_for_somebody_who_waits(play: Play) -> None:
    async def scene(
        daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, agent: bytes
    ) -> None:
        relief.look()
        assert relief.under_way is None  # nobody waits
        somebody_waits(daemon)
        relief.look()
        await asyncio.sleep(TICK_S)
        assert one.homes[Pool.TRAIN] == two.homes[Pool.TRAIN]
        assert (relief.merges, relief.count, relief.under_way) == (1, 1, None)
        assert not any(view.draining for view in daemon.shell.core.views())
        moved = next(job for job in (one, two) if job.id in relief._moved_us)
        told = await story(daemon, moved)
        assert "is free for jobs that wait" in told["moved"][0]
        assert "the job moves to" in told["regroup"][0]
        # Nothing is left to merge.
        relief._merged_us = None
        relief.look()
        assert relief.under_way is None

    play(scene, Pool.ROLLOUT)


async def trains(daemon: Daemon, job: LiveJob, seq: int) -> tuple[Any, str]:
    session = await daemon.session(job)
    return await daemon.model(job, session, seq)


def test_what_they_train_moves_when_it_is_durable_and_each_call_runs_once(play: Play) -> None:
    async def scene(
        daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, agent: bytes
    ) -> None:
        calls = [await trains(daemon, job, 0) for job in (one, two)]
        await asyncio.sleep(TICK_S)
        somebody_waits(daemon)
        relief.look()
        assert relief.under_way is not None and relief.under_way.what.merges
        leaver = relief.under_way.what.homes[0][0]
        old, new = relief.under_way.what.wpg, relief.under_way.what.homes[0][1]
        await asyncio.sleep(TICK_S)
        (moving,) = [live for live in daemon.state.deployments.values() if live.job == leaver]
        assert moving.wpg == old  # its create runs
        for _ in range(3):
            await daemon.finish_runs(agent)
            await copy_all(daemon, agent)
        ran = [order.call for order in daemon.orders(agent, tm.RunOrder)]
        assert sorted(ran) == sorted(str(call) for call, _ in calls)
        assert moving.wpg == new
        assert daemon.shell.deployments[DeploymentId(moving.id)].wpg == new
        assert {live.wpg for live in daemon.state.deployments.values()} == {new}
        assert relief.merges == 1
        assert all(daemon.shell.entries[call].ended.is_set() for call, _ in calls)

    play(scene, Pool.ROLLOUT)


@pytest.mark.parametrize(
    "sharing",
    [
        pytest.param(SharingSettings(regroup_us=0, merge=False), id="switched off"),
        pytest.param(SharingSettings(regroup_us=0, regroup=False), id="nobody moves"),
        pytest.param(SharingSettings(regroup_us=0, placement="pack"), id="no promises"),
        pytest.param(SharingSettings(regroup_us=0, max_slowdown=1.0), id="promises would break"),
        pytest.param(SharingSettings(), id="they have just come"),
    ],
)
def test_nothing_is_merged_that_should_not_be(play: Play, sharing: SharingSettings) -> None:
    async def scene(
        daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, agent: bytes
    ) -> None:
        one.started_us = two.started_us = now_us()
        somebody_waits(daemon)
        relief.look()
        await asyncio.sleep(TICK_S)
        assert (relief.count, relief.under_way) == (0, None)

    play(scene, Pool.ROLLOUT, sharing)


def test_a_look_for_something_to_merge_is_rare_and_goes_on_when_the_clock_was_set_back(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(
        daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, agent: bytes
    ) -> None:
        looked: list[int] = []
        monkeypatch.setattr(Leaves, "merged", lambda _: looked.append(1))
        somebody_waits(daemon)
        for _ in range(3):
            relief.look()
        assert looked == [1]
        early = now_us() - 3_600_000_000
        monkeypatch.setattr(module, "now_us", lambda: early)
        relief.look()
        assert looked == [1, 1]
        relief.look()
        assert looked == [1, 1]

    play(scene, Pool.ROLLOUT)


def test_a_drain_is_given_up_though_the_clock_was_set_back(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(
        daemon: Daemon, relief: Relief, one: LiveJob, two: LiveJob, agent: bytes
    ) -> None:
        for job in (one, two):
            await trains(daemon, job, 0)
        await asyncio.sleep(TICK_S)
        somebody_waits(daemon)
        relief.look()
        begun = relief.under_way
        assert begun
        early = now_us() - 3_600_000_000
        monkeypatch.setattr(module, "now_us", lambda: early)
        relief.look()
        assert relief.under_way == replace(begun, since_us=early)
        monkeypatch.setattr(module, "now_us", lambda: early + module.PATIENCE_US + 1)
        relief.look()
        assert rests(relief)
        assert relief.count == 0

    play(scene, Pool.ROLLOUT)
