"""An image of a WPG over two nodes leaves the memory of both, and is complete all the time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.db import queue
from plexrl_slurm.transport import messages as tm
from tests.daemons.gang_bench import IMAGE, MODEL, Play, Site, player, save_step
from tests.daemons.holds_bench import World


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return player(tmp_path)


async def with_image(world: World, *, known: bool) -> Site:
    """Both nodes have an image in memory; ``known``: a durable one, too."""
    site = await Site.up(await world.daemon())
    await site.created()
    site.daemon.hub.save(save_step(IMAGE))
    for address, order in zip((site.first, site.second), site.last(tm.SaveOrder), strict=True):
        site.answer(address, order, "save")
    if known:
        done = tm.Done(
            number=99, wpg="train-0", order="x", what="persist", ok=True, deployment=MODEL,
            progress=IMAGE,
        )  # fmt: skip
        site.daemon.service.image_persisted(done)
    site.daemon.hub._persisting.clear()
    return site


def evict(site: Site, to: str) -> "asyncio.Task[dict[str, Any]]":
    (job,) = site.daemon.state.jobs.values()
    return asyncio.create_task(
        site.daemon.service.evict_state(site.daemon.who(job), job.id, deployment="", to=to)
    )


async def asked(site: Site, kind: type[Any], *, beyond: int = 0) -> list[Any]:
    """The next order of a kind to each agent."""
    for _ in range(200):
        found = [site.daemon.orders(each, kind)[beyond:] for each in (site.first, site.second)]
        if all(found):
            return [each[-1] for each in found]
        await asyncio.sleep(0.01)
    raise AssertionError("nobody was asked")


def test_each_node_moves_its_share_to_its_own_disk(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world, known=False)
        task = evict(site, "nvme")
        one, other = await asked(site, tm.EvictOrder)
        assert (one.to, one.deployment, one.durable) == ("nvme", MODEL, None)
        site.answer(site.first, one, "evict", moved_bytes=5)
        site.answer(site.second, other, "evict", moved_bytes=6)
        (row,) = (await task)["evicted"]
        assert (row["bytes"], row["node"], row["to"]) == (11, "n1,n2", "nvme")
        assert site.settled() == IMAGE, "every node has it still, on its disk"

    play(scene)


def test_a_node_that_cannot_says_so_and_the_image_counts_as_before(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world, known=False)
        task = evict(site, "nvme")
        one, other = await asked(site, tm.EvictOrder)
        site.answer(site.first, one, "evict", moved_bytes=5)
        site.answer(site.second, other, "evict", ok=False, error="its disk is full")
        with pytest.raises(BadInput, match="stays where it is: its disk is full"):
            await task
        assert site.settled() == IMAGE

    play(scene)


@pytest.mark.parametrize("refused", [False, True], ids=["both", "one refuses"])
def test_what_a_durable_image_has_leaves_all_nodes(play: Play, refused: bool) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world, known=True)
        task = evict(site, "durable")
        one, other = await asked(site, tm.EvictOrder)
        assert (one.to, one.durable) == ("durable", IMAGE)
        site.answer(site.first, one, "evict", moved_bytes=5)
        facts = {"ok": False, "error": "it is being read just now"} if refused else {}
        site.answer(site.second, other, "evict", **facts)
        if refused:
            with pytest.raises(BadInput, match="is being read just now"):
                await task
        else:
            assert (await task)["evicted"][0]["bytes"] == 5
        # What one node has given up counts nowhere: the durable image does.
        assert site.settled() is None
        assert [order.images for order in site.last(tm.SettleOrder)] == [{MODEL: None}] * 2

    play(scene)


def test_an_image_is_made_durable_before_it_leaves(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world, known=False)
        before = len(site.daemon.orders(site.first, tm.PersistOrder))
        task = evict(site, "durable")
        one, other = await asked(site, tm.PersistOrder, beyond=before)
        assert one.share == other.share and one.image == IMAGE and one.id != other.id
        site.answer(site.first, one, "share", result=b"of n1")
        site.answer(site.second, other, "share", result=b"of n2")
        for _ in range(200):
            last = site.daemon.orders(site.first, tm.PersistOrder)[-1]
            if last.shares:
                break
            await asyncio.sleep(0.01)
        assert last.shares == [b"of n1", b"of n2"]
        assert not site.daemon.orders(site.first, tm.EvictOrder)
        site.answer(site.first, last, "persist", deployment=MODEL, progress=IMAGE)
        for address, order in zip(
            (site.first, site.second), await asked(site, tm.EvictOrder), strict=True
        ):
            site.answer(address, order, "evict", moved_bytes=1)
        assert (await task)["evicted"][0]["bytes"] == 2
        assert site.daemon.shell.durable[MODEL].progress == IMAGE
        assert site.settled() is None

    play(scene)


def test_while_an_image_moves_nothing_is_evicted(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await with_image(world, known=True)
        site.daemon.hub.save(save_step((4, 0)))
        with pytest.raises(BadInput, match="moves an image just now"):
            await evict(site, "nvme")
        assert not site.daemon.orders(site.first, tm.EvictOrder)

    play(scene)


def test_a_job_without_a_model_in_training_has_nothing_to_evict(play: Play) -> None:
    async def scene(world: World) -> None:
        site = await Site.up(await world.daemon())
        job = await site.daemon.job("41")

        async def refused() -> str:
            with pytest.raises(BadInput) as caught:
                await site.daemon.service.evict_state(
                    site.daemon.who(job), job.id, deployment="", to="nvme"
                )
            return str(caught.value)

        assert (await refused()).startswith("job 41 trains no model now, and has no images")
        await site.daemon.store.run(_end, job.id)
        assert (await refused()).startswith("job 41 has ended, and has no images in memory")

    play(scene)


def _end(session: Any, job: JobId) -> None:
    queue.cancel(session, job, reason="over", now_us=1)
