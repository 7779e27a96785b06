"""A hold that all could leave for the others is let go, and one that a merge has emptied idles."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.daemons.hold_book import keep_rules
from plexrl_slurm.daemons.relief import MERGE_US, Relief
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.journal import JournalledCore, replay
from plexrl_slurm.sharing_settings import SharingSettings
from tests.daemons.holds_bench import TICK_S, Daemon, World, world_in
from tests.daemons.test_relief import copy_all

IDLE_US = 1
Scene = Callable[["Two"], Coroutine[Any, Any, None]]
Play = Callable[..., None]


class Two:
    """Two holds with a training WPG and one to sample on each, and a job on each hold."""

    def __init__(self, daemon: Daemon, path: Path) -> None:
        settings = daemon.settings
        self.daemon, self.sharing = daemon, SharingSettings(regroup_us=0)
        self.relief = Relief(daemon.parts, daemon.mover)
        self.relief._sharing, self.path = self.sharing, path
        self.journal = JournalledCore(
            find_policy("fifo"), path=path, prior=SwitchCosts(), leaving=self.sharing.leaving,
            holds=keep_rules(settings.hold),
        )  # fmt: skip
        daemon.parts.placer.journal, self.relief.journal = self.journal.placed, self.journal
        daemon.keeper.book.journal = self.journal
        daemon.shell.on_drained = self.relief.drained
        self.holds: list[str] = []
        self.jobs: list[LiveJob] = []

    async def come_up(self) -> None:
        daemon = self.daemon
        for number in range(2):
            await daemon.look()
            name = sorted(daemon.keeper.live)[number]
            daemon.give_nodes(name, f"n{number}")
            await daemon.look()
            self.holds.append(name)
            await daemon.all_up(self.holds[-1], f"n{number}")
            await daemon.look()
            job = await daemon.job(str(7 + number))
            job.started_us = 1
            job.homes |= {pool: WpgId(f"{pool}-{number}") for pool in Pool}
            self.jobs.append(job)
            daemon.state.waiting_since_us = 1  # which brings another hold
        daemon.state.waiting_since_us = None

    async def look(self) -> None:
        """A while passes."""
        self.relief._merged_us = None
        self.relief.look()
        for _ in range(3):
            await asyncio.sleep(TICK_S)
            await self.daemon.look()

    def holds_of(self, job: LiveJob) -> set[str]:
        wpgs = self.daemon.parts.placer.wpgs
        return {wpgs[home].place.hold for home in job.homes.values()}

    def cancelled(self) -> list[str]:
        return [job for verb, job in self.daemon.slurm.told if verb == "cancel"]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Scene, **hold: Any) -> None:
        async def whole(world: World) -> None:
            two = Two(await world.daemon(), tmp_path / "journal" / "1.jsonl")
            await two.come_up()
            await scene(two)
            for name in two.holds:
                assert await two.daemon.flaws(name) == []
            two.journal.close()
            assert len(list(replay(two.path))) == two.path.read_bytes().count(b"\n") - 1

        async def played() -> None:
            values = {"max": 2, "scale_up_after_us": 0, "idle_release_us": IDLE_US} | hold
            async with world_in(tmp_path, **values) as world:
                await whole(world)

        asyncio.run(played())

    return run


def test_all_leave_the_hold_that_is_used_least_and_it_is_given_back(play: Play) -> None:
    async def scene(two: Two) -> None:
        daemon = two.daemon
        session = await daemon.session(two.jobs[0])
        _, model = await daemon.model(two.jobs[0], session)
        left, stays = two.holds
        address = f"{left}.0.n0".encode()
        await daemon.finish_runs(address)
        assert [two.holds_of(job) for job in two.jobs] == [{left}, {stays}]
        await two.look()
        assert daemon.keeper.live[left].draining
        assert "others have had room for all" in daemon.keeper.live[left].reason
        assert daemon.keeper.live[left].phase == "running"  # until what it trains is durable
        await copy_all(daemon, address)
        await two.look()
        assert [two.holds_of(job) for job in two.jobs] == [{stays}, {stays}]
        (live,) = daemon.state.deployments.values()
        assert (live.id, live.wpg) == (model, two.jobs[1].homes[Pool.TRAIN])
        assert daemon.keeper.live[left].phase == "ending"
        assert daemon.keeper.live[stays].phase == "running"
        assert not daemon.keeper.live[stays].draining
        for word in ('["vacate",', '["hold",', '"Drain"', '"Release"'):
            assert word in two.path.read_text()
        # One is the least: it stays, whoever lives there.
        for _ in range(3):
            await two.look()
        assert not daemon.keeper.live[stays].draining

    play(scene)


def test_a_hold_that_a_merge_left_empty_is_given_back_when_it_was_idle_long_enough(
    play: Play,
) -> None:
    async def scene(two: Two) -> None:
        daemon, (one, _) = two.daemon, two.jobs
        one.homes[Pool.ROLLOUT] = WpgId("rollout-1")
        daemon.state.waiting_since_us = 1
        two.relief.look()
        await asyncio.sleep(TICK_S)
        assert two.relief.merges == 1
        (stays,) = two.holds_of(one)
        (empty,) = set(two.holds) - {stays}
        await daemon.look()
        assert not daemon.keeper.live[empty].draining  # somebody waits
        daemon.state.waiting_since_us = None
        await daemon.look()
        await daemon.look()
        assert daemon.keeper.live[empty].phase == "ending"
        assert daemon.keeper.live[stays].phase == "running"

    play(scene)


@pytest.mark.parametrize(
    "hold",
    [
        pytest.param({"idle_release_us": 0}, id="idle holds stay"),
        pytest.param({"min": 2}, id="it is one of the least"),
        pytest.param({"idle_release_us": 10**12}, id="not for long enough"),
    ],
)
def test_a_hold_stays_that_should(play: Play, hold: dict[str, Any]) -> None:
    async def scene(two: Two) -> None:
        before = [dict(job.homes) for job in two.jobs]
        for _ in range(3):
            await two.look()
        assert not any(hold.draining for hold in two.daemon.keeper.live.values())
        assert [job.homes for job in two.jobs] == before

    play(scene, **hold)


@pytest.mark.parametrize("why", ["somebody waits", "they do not run", "not with merge = false"])
def test_nobody_leaves_a_hold_while(play: Play, why: str) -> None:
    async def scene(two: Two) -> None:
        daemon = two.daemon
        if why == "somebody waits":
            daemon.state.waiting_since_us = 1
        elif why == "they do not run":
            for job in two.jobs:
                job.started_us = None
        else:
            two.relief._sharing = SharingSettings(regroup_us=0, merge=False)
        await two.look()
        assert not any(hold.draining for hold in daemon.keeper.live.values())

    play(scene)


def test_what_was_true_of_a_hold_is_forgotten_when_it_is_not(play: Play) -> None:
    async def scene(two: Two) -> None:
        relief, live = two.relief, two.daemon.keeper.live

        def look() -> list[str]:
            relief._merged_us = None
            relief.look()
            return [name for name, hold in live.items() if hold.vacant_since_us is not None]

        (vacant,) = look()
        since_us = live[vacant].vacant_since_us
        assert look() == [vacant]
        assert live[vacant].vacant_since_us == since_us
        assert relief._merged_us is not None
        # Asked again only after a while.
        two.jobs[0].started_us = two.jobs[1].started_us = None
        relief.look()
        assert live[vacant].vacant_since_us == since_us
        relief._merged_us -= MERGE_US
        relief.look()
        assert live[vacant].vacant_since_us is None
        two.jobs[0].started_us = two.jobs[1].started_us = 1
        assert look() == [vacant]
        two.daemon.state.waiting_since_us = 1
        relief._look_for_merge()
        assert live[vacant].vacant_since_us is None

    play(scene, idle_release_us=10**12)


def test_a_merged_wpg_idles_from_then_on_and_every_instant_is_attributed_once(play: Play) -> None:
    async def scene(two: Two) -> None:
        daemon, (one, other) = two.daemon, two.jobs
        daemon.state.waiting_since_us = 1
        left = {job.id: job.homes[Pool.TRAIN] for job in two.jobs}
        two.relief.look()
        await asyncio.sleep(TICK_S)
        assert one.homes[Pool.TRAIN] == other.homes[Pool.TRAIN]
        moved = next(job for job in two.jobs if job.homes[Pool.TRAIN] != left[job.id])
        empty = left[moved.id]
        await asyncio.sleep(10 * TICK_S)
        await daemon.settle()
        found = await daemon.store.run(_by_activity, str(empty))
        assert set(found) == {("down", None), ("idle", None)}
        assert found["idle", None] >= 10_000

    play(scene)


def _by_activity(session: Any, wpg: str) -> dict[tuple[str, JobId | None], int]:
    rows = session.connection().exec_driver_sql(
        f"SELECT activity, job_id, SUM(gpu_us) FROM ledger WHERE wpg = '{wpg}' "
        "GROUP BY activity, job_id"
    )
    return {(activity, job): gpu_us for activity, job, gpu_us in rows}
