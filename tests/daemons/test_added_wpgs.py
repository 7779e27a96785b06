"""WPGs that the settings get while a hold is there."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.daemons.hold_views import view_of
from plexrl_slurm.settings import Settings, WpgSettings
from plexrl_slurm.slurm_settings import ComponentSettings
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import ROLLOUT, TRAIN, World, world_in

SECOND = WpgId("rollout-1")


def play(folder: Path, scene: Callable[[World], Coroutine[Any, Any, None]], **hold: Any) -> None:
    async def whole() -> None:
        async with world_in(folder, **hold) as world:
            await scene(world)

    asyncio.run(whole())


def with_another(settings: Settings, *, gpus: int) -> Settings:
    """A second rollout WPG; on Slurm with a node that has a GPU for it."""
    more = WpgSettings(pool="rollout", engine="fake_sample")
    other = ComponentSettings(pool="rollout", partition="gpu", gpus_per_node=gpus)
    hold = settings.hold
    if hold.components:
        hold = dataclasses.replace(hold, components=(hold.components[0], other))
    return dataclasses.replace(settings, wpgs=(*settings.wpgs, more), hold=hold)


def test_a_hold_without_slurm_gets_them_when_the_daemon_is_started_again(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        await daemon.look()
        (hold,) = daemon.keeper.live
        daemon.slurm.run(daemon.keeper.live[hold].slurm_id, "localhost")
        await daemon.look()
        address = await daemon.hello(hold, "localhost")
        for wpg in (TRAIN, ROLLOUT):
            daemon.up(address, wpg)
        await daemon.look()
        assert daemon.keeper.views()[0]["state"] == "up"
        await daemon.die()
        world.settings = with_another(world.settings, gpus=1)
        daemon = await world.daemon()
        assert set(daemon.keeper.live[hold].wpgs) == {TRAIN, ROLLOUT, SECOND}
        address = await daemon.hello(hold, "localhost")
        (welcome,) = daemon.orders(address, tm.Welcome)
        assert {wpg.name for wpg in welcome.wpgs} == {TRAIN, ROLLOUT, SECOND}
        for wpg in (TRAIN, ROLLOUT, SECOND):
            daemon.up(address, wpg)
        await daemon.look()
        (view,) = daemon.keeper.views()
        assert (view["state"], view["trouble"]) == ("up", "")
        assert await daemon.flaws(hold) == []
        await daemon.die()
        daemon = await world.daemon()  # which finds it in the database
        assert set(daemon.keeper.live[hold].wpgs) == {TRAIN, ROLLOUT, SECOND}
        assert not any(verb == "cancel" for verb, _ in world.slurm.told)

    play(tmp_path, scene, backend="local", components=())


def test_a_hold_on_slurm_is_replaced_and_says_why_until_then(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1")
        await daemon.all_up(hold, "n1")
        await daemon.look()
        await daemon.die()
        world.settings = with_another(world.settings, gpus=2)
        daemon = await world.daemon()
        await daemon.all_up(hold, "n1")
        await daemon.look()
        view = view_of(daemon.keeper.live[hold], "slurm", 3)
        assert view["state"] == "up", "what it has is up"
        assert "was made before the settings had WPG rollout-1" in str(view["trouble"])
        assert "rollout-1" in daemon.parts.placer.why_no_more
        (new,) = set(daemon.keeper.live) - {hold}
        assert daemon.keeper.live[new].replaces == hold
        daemon.give_nodes(new, "n2")
        await daemon.look()
        assert len(daemon.keeper.live[new].wpgs) == 3
        await daemon.all_up(new, "n2")
        await daemon.look()
        assert daemon.keeper.live[hold].draining
        assert not daemon.keeper.live[new].draining
        await daemon.look()
        assert len(daemon.keeper.live) == 2, "it is replaced once"

    play(tmp_path, scene)


def test_a_hold_that_waited_in_slurm_meanwhile_is_replaced_too(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        await daemon.look()
        (hold,) = daemon.keeper.live
        await daemon.die()
        # The new WPG needs more GPUs than a node of its component offers.
        world.settings = with_another(world.settings, gpus=1)
        daemon = await world.daemon()
        assert daemon.keeper.live[hold].missing == ()
        daemon.give_nodes(hold, "n1")
        await daemon.look()
        assert daemon.keeper.live[hold].missing == ("rollout-1",)
        await daemon.look()
        assert [each.replaces for each in daemon.keeper.live.values()] == ["", hold]

    play(tmp_path, scene)


def test_a_hold_that_lost_a_node_is_not_taken_for_an_old_one(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        hold = await daemon.hold("n1", "n2")
        await daemon.all_up(hold, "n1", "n2")
        number = daemon.keeper.live[hold].slurm_id
        daemon.slurm.run(f"{number}1", "n3", leader=number)
        await daemon.look()
        assert set(daemon.keeper.live[hold].wpgs) == {TRAIN}
        await daemon.die()
        daemon = await world.daemon()
        assert daemon.keeper.live[hold].missing == ()

    play(tmp_path, scene)
