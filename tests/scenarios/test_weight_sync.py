"""Weights get from the node that trains to the node that samples, whoever is killed meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.two_nodes import (
    SNAPSHOT_BYTES,
    Learner,
    LiveDaemon,
    Site,
    all_up,
    site_in,
    until,
)
from tests.transport.bulk_proxy import Proxy

Scene = Callable[[Site, LiveDaemon, Learner], Coroutine[Any, Any, list[Any]]]
STEPS = 2
#: Somewhere in the middle of a transfer.
MIDDLE = SNAPSHOT_BYTES // 3


def play(
    folder: Path, model: Path, scene: Scene, *, between: Proxy | None, shared: bool = False
) -> list[Any]:
    async def whole() -> list[Any]:
        async with site_in(folder, model, shared=shared, wire_=between) as (site, daemon):
            learner = Learner(daemon)
            await learner.begin()
            return await scene(site, daemon, learner)

    return asyncio.run(whole())


async def _undisturbed(site: Site, daemon: LiveDaemon, learner: Learner) -> list[Any]:
    seen = await learner.run(STEPS)
    # Both see the same memory: nothing is copied.
    assert list((site.host_of("n2") / "fetched").iterdir()) == []
    return seen


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Any]:
    """Samples of nodes that see one folder."""
    folder = tmp_path_factory.mktemp("one-folder")
    return play(folder, model, _undisturbed, between=None, shared=True)


def test_a_snapshot_that_came_over_the_network_is_the_same(
    tmp_path: Path, model: Path, expected: list[Any]
) -> None:
    async def scene(site: Site, daemon: LiveDaemon, learner: Learner) -> list[Any]:
        seen = await learner.run(STEPS)
        here, there = site.host_of("n1") / "snapshots", site.host_of("n2") / "fetched"
        name = max(daemon.state.snapshots)
        file = f"{name}.safetensors"
        assert (here / file).read_bytes() == (there / file).read_bytes()
        assert (there / file).stat().st_mode & 0o777 == 0o600
        assert sorted(daemon.hub.snapshots.nodes(name)) == ["n1", "n2"]
        return seen

    with Proxy(("127.0.0.1", 1)) as between:
        assert play(tmp_path, model, scene, between=between) == expected
        assert between.passed > STEPS * SNAPSHOT_BYTES


@pytest.mark.parametrize("shared", [False, True])
def test_the_death_of_the_agent_that_gives_is_a_pause(
    tmp_path: Path, model: Path, expected: list[Any], shared: bool
) -> None:
    """With a shared folder the copy there is taken, without one the publish runs again."""

    async def scene(site: Site, daemon: LiveDaemon, learner: Learner) -> list[Any]:
        await learner.step()
        between.hold_at = between.passed + MIDDLE
        published = await learner.publish()
        await until(between.held.is_set)
        if shared:
            await learner.answer(published)
        site.kill("n1")
        between.release()
        await asyncio.sleep(0.3)
        site.start("n1")
        await until(lambda: all_up(daemon))
        seen = [await learner.sample(published)]
        return [*seen, *await learner.run(STEPS - 1)]

    with Proxy(("127.0.0.1", 1)) as between:
        assert play(tmp_path, model, scene, between=between, shared=shared) == expected


def test_the_death_of_the_agent_that_fetches_is_a_pause_and_what_has_come_stays(
    tmp_path: Path, model: Path, expected: list[Any]
) -> None:
    async def scene(site: Site, daemon: LiveDaemon, learner: Learner) -> list[Any]:
        await learner.step()
        before = between.passed
        between.hold_at = before + MIDDLE
        published = await learner.publish()
        await until(between.held.is_set)
        await asyncio.sleep(0.2)
        site.kill("n2")
        between.release()
        site.start("n2")
        seen = [await learner.sample(published)]
        (line,) = [line for line in site.log("n2").splitlines() if "snapshot_fetched" in line]
        received = int(line.partition("received=")[2].split()[0])
        assert 0 < received < SNAPSHOT_BYTES * 0.8
        return [*seen, *await learner.run(STEPS - 1)]

    with Proxy(("127.0.0.1", 1)) as between:
        assert play(tmp_path, model, scene, between=between) == expected


def test_the_death_of_the_daemon_meanwhile_changes_nothing(
    tmp_path: Path, model: Path, expected: list[Any]
) -> None:
    async def scene(site: Site, daemon: LiveDaemon, learner: Learner) -> list[Any]:
        await learner.step()
        between.hold_at = between.passed + MIDDLE
        published = await learner.publish()
        await until(between.held.is_set)
        await daemon.die()
        between.release()
        learner.daemon = await site.daemon()
        await until(lambda: all_up(learner.daemon))
        seen = [await learner.sample(published)]
        return [*seen, *await learner.run(STEPS - 1)]

    with Proxy(("127.0.0.1", 1)) as between:
        assert play(tmp_path, model, scene, between=between) == expected
