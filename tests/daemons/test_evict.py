"""An image leaves host memory when it is told to, and never as the last complete copy."""

import asyncio
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.daemons.image_stories import ImageStories
from plexrl_slurm.transport import messages as tm
from tests.daemons.test_damaged_images import persist
from tests.daemons.test_nvme_tier import all_of, bring, filled, in_memory, on_nvme, save


def evict(name: str, to: str = "nvme", durable: tuple[int, int] | None = None) -> tm.EvictOrder:
    return tm.EvictOrder(epoch=1, id="1", wpg="train-0", deployment=name, to=to, durable=durable)


def test_an_image_goes_to_nvme_and_comes_back(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"ab", slots=4)
        assert await tier.evict(evict("a")) > 0
        assert (in_memory(tier), on_nvme(tier)) == ({"b"}, {"a"})
        with pytest.raises(BadInput, match=r"not in host memory .it is on NVMe already"):
            await tier.evict(evict("a"))
        await bring(tier, "a")
        assert in_memory(tier) == {"a", "b"}

    asyncio.run(scene())


def test_what_would_be_the_last_copy_stays(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"ab", slots=4, copies=0)
        with pytest.raises(BadInput, match="could not be copied to NVMe"):
            await tier.evict(evict("a"))
        for durable in (None, (0, 9)):
            with pytest.raises(BadInput, match="no durable image is as new"):
                await tier.evict(evict("a", "durable", durable))
        with pytest.raises(BadInput, match=r"not in host memory .the node has no image"):
            await tier.evict(evict("c"))
        assert in_memory(tier) == {"a", "b"}

    asyncio.run(scene())


def test_what_is_being_read_stays(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, "a", slots=4)
        store = tier.store("train-0")
        held = store.find("a")
        assert held is not None
        store.pin(held.slot)
        for to in ("nvme", "durable"):
            with pytest.raises(BadInput, match="is being read just now"):
                await tier.evict(evict("a", to, (1, 0)))
        assert in_memory(tier) == {"a"}

    asyncio.run(scene())


def test_an_image_is_left_to_the_durable_tier(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, "a", slots=4)
        await tier.persist(persist(tmp_path / "durable"))
        await tier.copy_below(quiet=lambda: True)
        assert await tier.evict(evict("a", "durable", (1, 0))) > 0
        assert all_of(tier) == {}

    asyncio.run(scene())


def test_a_node_without_nvme_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = HostTier(tmp_path / "host", snapshots=None, writer="w")
        tier.store("train-0", 1)
        await save(tier, "a")
        with pytest.raises(BadInput, match="its node has no nvme_dir"):
            await tier.evict(evict("a"))
        with pytest.raises(BadInput, match="has no images on this node"):
            await tier.evict(
                tm.EvictOrder(epoch=1, id="1", wpg="train-9", deployment="a", to="nvme")
            )
        assert tier.stock().nvme_limit is None

    asyncio.run(scene())


def test_a_stock_has_every_copy_with_its_last_use(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"ab", slots=4)
        await tier.evict(evict("a"))
        stock = tier.stock()
        assert {(each.deployment, each.tier) for each in stock.images} == {
            ("a", "nvme"), ("b", "host"),
        }  # fmt: skip
        assert all(each.last_use_us > 0 and each.progress == (1, 0) for each in stock.images)
        assert 0 < stock.nvme_used <= (stock.nvme_limit or 0)

    asyncio.run(scene())


# ---- the story ---------------------------------------------------------------------------------


def image(tier: str, seq: int, name: str = "m") -> tm.StockImage:
    return tm.StockImage(
        wpg="train-0", deployment=name, tier=tier, progress=(seq, 0), bytes=1, last_use_us=1
    )


def test_a_story_has_a_line_for_each_change_and_none_for_what_stays() -> None:
    stories = ImageStories()
    host, both = [image("host", 3)], [image("host", 3), image("nvme", 3)]
    for images in (host, host, both, [image("nvme", 3)], []):
        stories.heard("n1", tm.Stock(images=[*images, image("host", 1, "other")]))
    assert [line["text"] for line in stories.of("m")] == [
        "n1: host (seq 3)",
        "n1: host (seq 3) and nvme (seq 3)",
        "n1: nvme (seq 3)",
        "n1: gone",
    ]
    assert len(stories.of("other")) == 1
    stories.forget("m")
    assert stories.of("m") == []
