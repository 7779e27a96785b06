"""An image of a WPG over two nodes counts when both have it, and never sooner."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.ids import CauseId, DeploymentId
from plexrl_slurm.core.messages import Activity, ImagesLeft, Persist, Switch
from plexrl_slurm.daemons import gang_orders
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.memory import durable, manifests
from plexrl_slurm.transport import messages as tm
from tests.daemons.gang_bench import (
    IMAGE,
    MODEL,
    NEWER,
    Play,
    Site,
    image,
    player,
    save_step,
)
from tests.daemons.holds_bench import TRAIN, World


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return player(tmp_path)


def test_an_image_counts_when_every_part_has_it(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.daemon.hub.save(save_step(IMAGE))
        one, other = site.last(tm.SaveOrder)
        site.answer(site.first, one, "save")
        assert site.settled() is None
        assert not site.daemon.orders(site.first, tm.SettleOrder)
        site.answer(site.second, other, "save")
        assert site.settled() == IMAGE
        assert [order.images for order in site.last(tm.SettleOrder)] == [{MODEL: IMAGE}] * 2

    play(scene)


def test_an_image_that_one_part_could_not_write_is_none(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        for progress, ok in ((IMAGE, True), (NEWER, False)):
            site.daemon.hub.save(save_step(progress))
            one, other = site.last(tm.SaveOrder)
            site.answer(site.first, one, "save")
            site.answer(site.second, other, "save", ok=ok, error="" if ok else "full")
        assert site.settled() == IMAGE
        assert [order.images for order in site.last(tm.SettleOrder)] == [{MODEL: IMAGE}] * 2

    play(scene)


def test_ranks_that_wait_for_those_of_a_part_that_failed_are_not_left_alone(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_orders, "PATIENCE_S", 0.01)

    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.daemon.hub.save(save_step(IMAGE))
        one, _ = site.last(tm.SaveOrder)
        site.answer(site.first, one, "save", ok=False, error="full")
        await asyncio.sleep(0.05)
        assert site.activity() == Activity.DOWN
        assert {order.incarnation for order in site.last(tm.PrepareOrder)} == {2}

    play(scene)


def test_a_save_that_ended_on_one_part_before_the_gang_died_is_forgotten(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.daemon.hub.save(save_step(NEWER))
        one, _ = site.last(tm.SaveOrder)
        site.answer(site.first, one, "save")
        site.changed("down", 1, site.second)
        await site.ready(2, [image(1), image(4)], [image(1)])
        assert site.settled() == IMAGE
        assert site.last(tm.SettleOrder)[0].images == {MODEL: IMAGE}
        assert site.last(tm.StartOrder)[0].incarnation == 2

    play(scene)


def test_a_save_that_ended_on_all_parts_counts_though_the_daemon_did_not_hear_of_it(
    play: Play,
) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.changed("down", 1, site.second)
        await site.ready(2, [image(1), image(4)], [image(4), image(1)])
        assert site.settled() == NEWER

    play(scene)


def switch_step(incoming: str, *, outgoing: str | None = MODEL) -> Switch:
    return Switch(
        wpg=TRAIN,
        outgoing=DeploymentId(outgoing) if outgoing else None,
        outgoing_progress=NEWER,
        incoming=DeploymentId(incoming),
        cause=CauseId("test"),
    )


def test_ranks_switch_when_every_node_has_what_comes_in(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        kept = Durable(progress=(9, 0), path="/durable/b")
        site.daemon.hub.switch(switch_step("b"), None, kept)
        one, other = site.last(tm.FetchOrder)
        assert (one.image, one.durable_path) == ((9, 0), "/durable/b")
        site.answer(site.first, one, "fetch")
        assert not site.daemon.orders(site.first, tm.SwitchOrder)
        site.answer(site.second, other, "fetch")
        one, other = site.last(tm.SwitchOrder)
        assert (one.incoming, one.outgoing, one.image) == ("b", MODEL, (9, 0))
        site.answer(site.first, one, "switch")
        site.answer(site.second, other, "switch")
        settled = [order.images for order in site.daemon.orders(site.second, tm.SettleOrder)]
        assert settled == [{"b": (9, 0)}, {MODEL: NEWER}]

    play(scene)


def test_no_rank_is_disturbed_if_a_node_cannot_get_what_comes_in(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        await site.created()
        site.daemon.hub.switch(switch_step("b"), None, Durable(progress=(9, 0), path="/durable/b"))
        one, other = site.last(tm.FetchOrder)
        site.answer(site.first, one, "fetch")
        site.answer(site.second, other, "fetch", ok=False, error="it is damaged")
        assert not site.daemon.orders(site.first, tm.SwitchOrder)
        assert site.daemon.hub.wpgs[TRAIN].reason == "it is damaged"

    play(scene)


class Teller:
    """What the shell hears of a switch."""

    def __init__(self, site: Site, patch: pytest.MonkeyPatch) -> None:
        self.heard: list[dict[str, Any]] = []
        #: What whoever keeps the books of damaged images hears.
        self.left: list[tm.ImagesLeft | None] = []
        site.daemon.hub.on_left = lambda done, node: self.left.append(done.left)
        patch.setattr(site.daemon.shell, "switch_ended", self._note)

    def _note(self, wpg: str, **facts: Any) -> None:
        assert wpg == TRAIN
        self.heard.append(facts)


def durable_images(folder: Path, *seqs: int) -> list[Durable]:
    """Complete ones of the model, in the durable tier."""
    found = []
    for seq in seqs:
        path = durable.folder_of(folder, MODEL, (seq, 0))
        path.mkdir(parents=True)
        manifest = durable.Manifest(deployment=MODEL, progress=(seq, 0), files=())
        (path / durable.MANIFEST).write_bytes(manifests.encoded(manifest))
        found.append(Durable(progress=(seq, 0), path=str(path)))
    return found


def answer_fetch(site: Site, *damaged: bytes) -> None:
    """Those agents say that their share is torn."""
    left = tm.ImagesLeft(image=None, durable=None, damaged=["it is torn"])
    for address, order in zip((site.first, site.second), site.last(tm.FetchOrder), strict=True):
        if address in damaged:
            site.answer(address, order, "fetch", ok=False, error="it is torn", left=left)
        else:
            site.answer(address, order, "fetch")


def test_if_one_share_is_damaged_the_image_is_none_and_the_durable_one_comes_in(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        daemon, told = site.daemon, Teller(site, monkeypatch)
        (kept,) = durable_images(world.settings.durable_dir, 0)
        daemon.shell.durable[MODEL] = kept
        daemon.hub.switch(switch_step(MODEL, outgoing=None), None, kept)
        one, _ = site.last(tm.FetchOrder)
        assert (one.image, one.durable_path) == (IMAGE, "")
        answer_fetch(site, site.second)
        assert site.settled() is None
        assert site.last(tm.SettleOrder)[1].images == {MODEL: None}
        assert {order.durable_path for order in site.last(tm.FetchOrder)} == {kept.path}
        answer_fetch(site)
        for address, order in zip(
            (site.first, site.second), site.last(tm.SwitchOrder), strict=True
        ):
            assert order.image == (0, 0)
            site.answer(address, order, "switch")
        left = ImagesLeft(image=(0, 0), durable=(0, 0))
        assert told.heard == [{"ok": True, "moved_bytes": 0, "left": left}]
        assert told.left == [
            tm.ImagesLeft(image=(0, 0), durable=(0, 0), damaged=["n2: it is torn"])
        ]

    play(scene)


def test_a_damaged_durable_image_is_set_aside_once_and_an_older_one_comes_in(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        daemon, told = site.daemon, Teller(site, monkeypatch)
        older, newest = durable_images(world.settings.durable_dir, 3, 9)
        daemon.shell.durable[MODEL] = newest
        daemon.hub.switch(switch_step(MODEL, outgoing=None), None, newest)
        answer_fetch(site, site.first, site.second)
        home = Path(newest.path).parent
        assert {path.name for path in home.iterdir()} == {
            Path(older.path).name,
            f"damaged-{Path(newest.path).name}",
        }
        assert {order.durable_path for order in site.last(tm.FetchOrder)} == {older.path}
        assert {order.image for order in site.last(tm.FetchOrder)} == {(3, 0)}
        answer_fetch(site)
        assert site.settled() == (3, 0)
        for address, order in zip(
            (site.first, site.second), site.last(tm.SwitchOrder), strict=True
        ):
            site.answer(address, order, "switch")
        assert [facts["left"] for facts in told.heard] == [ImagesLeft(image=(3, 0), durable=(3, 0))]
        problems = ["n1: it is torn", "n2: it is torn"]
        assert told.left == [tm.ImagesLeft(image=(3, 0), durable=(3, 0), damaged=problems)]

    play(scene)


def test_without_an_older_durable_image_what_all_nodes_have_comes_in(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        told = Teller(site, monkeypatch)
        (newest,) = durable_images(world.settings.durable_dir, 9)
        site.daemon.shell.durable[MODEL] = newest
        site.daemon.hub.switch(switch_step(MODEL, outgoing=None), None, newest)
        answer_fetch(site, site.second)
        assert {(o.image, o.durable_path) for o in site.last(tm.FetchOrder)} == {(IMAGE, "")}
        answer_fetch(site, site.first)
        (facts,) = told.heard
        assert not facts["ok"] and facts["left"] == ImagesLeft(image=None, durable=None)
        assert "n2: it is torn" in facts["error"] and "n1: it is torn" in facts["error"]
        assert site.settled() is None
        assert [left and (left.image, left.durable) for left in told.left] == [(None, None)]

    play(scene)


def test_a_durable_image_that_may_be_whole_all_the_same_is_not_touched(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        told = Teller(site, monkeypatch)
        _, newest = durable_images(world.settings.durable_dir, 3, 9)
        site.daemon.hub.switch(switch_step(MODEL, outgoing=None), None, newest)
        one, other = site.last(tm.FetchOrder)
        site.answer(site.first, one, "fetch")
        site.answer(site.second, other, "fetch", ok=False, error="Stale file handle")
        (facts,) = told.heard
        assert not facts["ok"] and facts["left"] is None and not told.left
        assert durable.read_manifest(Path(newest.path)).progress == (9, 0)

    play(scene)


def persist_step() -> Persist:
    return Persist(deployment=MODEL, wpg=TRAIN, progress=IMAGE, cause=CauseId("test"))


async def with_image(world: World) -> Site:
    site = await Site.up(await world.daemon())
    await site.created()
    site.changed("down", 1, site.second)
    await site.ready(2, [image(1)], [image(1)])
    site.changed("up", 2)
    for address in (site.first, site.second):
        site.daemon.server.posted = [
            each for each in site.daemon.server.posted if each[0] != address
        ]
    return site


def test_a_durable_image_is_made_whole_by_one_when_all_have_written(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        site.daemon.hub.persist(persist_step(), None)
        one, other = site.last(tm.PersistOrder)
        assert one == other and one.image == IMAGE and one.shares == []
        site.answer(site.second, other, "share", result=b"of n2")
        assert len(site.daemon.orders(site.first, tm.PersistOrder)) == 1
        site.answer(site.first, one, "share", result=b"of n1")
        last = site.daemon.orders(site.first, tm.PersistOrder)[-1]
        assert last.shares == [b"of n1", b"of n2"] and last.share == one.share
        assert len(site.daemon.orders(site.second, tm.PersistOrder)) == 1

    play(scene)


def test_a_durable_image_that_one_node_could_not_write_is_tried_again(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        site.daemon.hub.persist(persist_step(), None)
        one, other = site.last(tm.PersistOrder)
        site.answer(site.first, one, "share", result=b"of n1")
        site.answer(site.second, other, "share", ok=False, error="full")
        assert len(site.daemon.orders(site.first, tm.PersistOrder)) == 1
        assert MODEL not in site.daemon.hub._persisting

    play(scene)


def test_a_copy_goes_on_while_ranks_start_again_and_ends_with_an_agent(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world)
        site.daemon.hub.persist(persist_step(), None)
        one, _ = site.last(tm.PersistOrder)
        site.changed("down", 2, site.second)
        assert MODEL in site.daemon.hub._persisting
        site.answer(site.first, one, "share", result=b"of n1")
        await site.daemon.hello(site.hold, "n2", epoch=2)
        assert MODEL not in site.daemon.hub._persisting

    play(scene)
