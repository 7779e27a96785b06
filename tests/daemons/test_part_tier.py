"""What the agent of one of several nodes keeps, in memory, on its disk and in the durable tier."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.daemons.part_tier import PartTier
from plexrl_slurm.memory.durable import read_manifest
from plexrl_slurm.memory.slab import read_header
from plexrl_slurm.transport import messages as tm
from tests.memory.test_slab import make_header, write

SLAB = 4096 * 4
SIZE = 4096 * 3 - 8
NODES = (0, 1)


async def tier_in(folder: Path, node: int, *, slots: int = 0) -> PartTier:
    """Of a node of a WPG of two ranks; with ``slots``, memory for so many images, and a disk."""
    nvme = NvmeTier(folder / f"nvme-{node}", limit=9 * SLAB, shared=False) if slots else None
    tier = PartTier(
        folder / f"host-{node}",
        snapshots=None,
        writer=f"n{node}",
        nvme=nvme,
        host_bytes=slots * SLAB,
    )
    await tier.own()
    tier.part("train-0", world=2, ranks=range(node, node + 1))
    return tier


async def save(tier: PartTier, name: str, seq: int) -> None:
    order = tm.SaveOrder(
        epoch=1, id="1", wpg="train-0", incarnation=1, deployment=name, progress=(seq, 0)
    )
    passage = await tier.begin_save(order)
    rank = tier.part("train-0", world=2, ranks=_ranks(tier)).ranks.start
    header = make_header(SIZE, deployment=name)
    write(
        passage.saves[0],
        msgspec.structs.replace(header, progress=(seq, 0), rank=rank, world=2),
        seq,
    )
    tier.end(passage, name, (seq, 0), ok=True)


def _ranks(tier: PartTier) -> range:
    return tier._part("train-0").ranks


def images(tier: PartTier) -> set[tuple[str, int]]:
    return {(image.deployment, image.progress[0]) for image in tier.images()}


def fetch(name: str, seq: int, path: Path | str = "") -> tm.FetchOrder:
    return tm.FetchOrder(
        epoch=1, id="1", wpg="train-0", deployment=name, image=(seq, 0), durable_path=str(path)
    )


def persist(folder: Path, seq: int, *shares: bytes) -> tm.PersistOrder:
    return tm.PersistOrder(
        epoch=1, id="1", wpg="train-0", deployment="a", folder=str(folder / "durable"),
        image=(seq, 0), share="n", shares=list(shares),
    )  # fmt: skip


def test_an_agent_tells_of_every_image_until_it_is_told_which_one_counts(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await tier_in(tmp_path, 0)
        await save(tier, "a", 1)
        await save(tier, "a", 2)
        assert images(tier) == {("a", 1), ("a", 2)}
        tier.settle("train-0", "a", (1, 0))
        assert images(tier) == {("a", 1)}
        tier.settle("train-0", "a", None)
        assert images(tier) == set()

    asyncio.run(scene())


def test_just_the_image_that_every_node_has_is_loaded(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await tier_in(tmp_path, 1)
        await save(tier, "a", 1)
        await save(tier, "a", 2)
        order = tm.SwitchOrder(
            epoch=1, id="1", wpg="train-0", incarnation=1, incoming="a", image=(1, 0)
        )
        passage = await tier.begin_switch(order)
        assert passage is not None and passage.held is not None
        assert read_header(passage.loads[0]).progress == (1, 0)
        with pytest.raises(BadImage, match="has no image"):
            await tier.fetch_part(fetch("a", 3))

    asyncio.run(scene())


def test_a_share_that_is_damaged_in_memory_is_not_loaded(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await tier_in(tmp_path, 1)
        await save(tier, "a", 1)
        tier.settle("train-0", "a", (1, 0))
        held = await tier.fetch_part(fetch("a", 1))
        tier._part("train-0").paths(held.slot)[0].write_bytes(b"garbage")
        with pytest.raises(BadImage, match="no PlexRL image"):
            await tier.fetch_part(fetch("a", 1))

    asyncio.run(scene())


def test_images_leave_memory_for_the_disk_and_come_back(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await tier_in(tmp_path, 0, slots=2)
        names = "abcd"
        for name in names:
            await save(tier, name, 1)
            tier.settle("train-0", name, (1, 0))
        assert images(tier) == {(name, 1) for name in names}
        store = tier._part("train-0")
        assert len(list(store.held())) <= 2
        for name in names:
            held = await tier.fetch_part(fetch(name, 1))
            assert read_header(store.paths(held.slot)[0]).deployment == name

    asyncio.run(scene())


def test_the_copy_on_the_disk_is_kept_until_the_newer_image_counts(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await tier_in(tmp_path, 0, slots=2)
        for name in "abc":
            await save(tier, name, 1)
            tier.settle("train-0", name, (1, 0))
        gone = {name for name, _ in images(tier)} - {
            held.deployment for held in tier._part("train-0").held()
        }
        (name, *_) = sorted(gone)
        await save(tier, name, 2)
        assert {(name, 1), (name, 2)} <= images(tier)
        tier.settle("train-0", name, (2, 0))
        assert (name, 1) not in images(tier) and (name, 2) in images(tier)

    asyncio.run(scene())


def test_two_nodes_make_a_durable_image_that_each_reads_its_ranks_of(tmp_path: Path) -> None:
    async def scene() -> None:
        tiers = [await tier_in(tmp_path, node) for node in NODES]
        for tier in tiers:
            await save(tier, "a", 5)
        said = [(await tier.share(persist(tmp_path, 5)))[1] for tier in tiers]
        manifest = await tiers[0].join(persist(tmp_path, 5, *said))
        folder = tmp_path / "durable" / "a" / "000000005.0000"
        assert read_manifest(folder) == manifest and len(manifest.files) == 2
        for node, tier in enumerate(tiers):
            tier.settle("train-0", "a", None)
            held = await tier.fetch_part(fetch("a", 5, folder))
            paths = tier._part("train-0").paths(held.slot)
            assert [read_header(path).rank for path in paths] == [node]
            assert images(tier) == {("a", 5)}

    asyncio.run(scene())


def test_a_share_that_is_damaged_here_comes_from_the_durable_tier_if_that_has_it(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        tiers = [await tier_in(tmp_path, node) for node in NODES]
        for tier in tiers:
            await save(tier, "a", 5)
        said = [(await tier.share(persist(tmp_path, 5)))[1] for tier in tiers]
        await tiers[0].join(persist(tmp_path, 5, *said))
        folder = tmp_path / "durable" / "a" / "000000005.0000"
        held = await tiers[1].fetch_part(fetch("a", 5))
        tiers[1]._part("train-0").paths(held.slot)[0].write_bytes(b"garbage")
        held = await tiers[1].fetch_part(fetch("a", 5, folder))
        assert read_header(tiers[1]._part("train-0").paths(held.slot)[0]).rank == 1
        tiers[1].settle("train-0", "a", None)
        (folder / "rank-1.slab").write_bytes(b"garbage")
        with pytest.raises(BadImage, match="cut off"):
            await tiers[1].fetch_part(fetch("a", 5, folder))
        assert images(tiers[1]) == set()

    asyncio.run(scene())


def test_a_wpg_that_is_no_more_leaves_no_memory_taken(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await tier_in(tmp_path, 0)
        await save(tier, "a", 1)
        tier.settle("train-0", "a", (1, 0))
        await save(tier, "a", 2)
        tier.forget("train-0")
        assert list((tmp_path / "host-0").rglob("slot-*")) == []

    asyncio.run(scene())
