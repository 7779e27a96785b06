"""Images that are written over themselves, so that no spare slab is needed."""

import asyncio
from pathlib import Path

import pytest

from plexrl_slurm.daemons.host_tier import HostTier, Passage
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.images import ImageStore
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor, read_header
from plexrl_slurm.transport import messages as tm

WPG = "train-0"


def write(path: Path, deployment: str, seq: int, *, whole: bool = True) -> None:
    """What a rank does; ``whole``: it lives until it has done it."""
    slab = Slab(path)
    slab.write(
        SlabHeader(
            deployment=deployment, progress=(seq, 0), rank=0, world=1, architecture="none",
            tensors=(SlabTensor("state", "bytes", (5000,), 5000),),
        )
    )  # fmt: skip
    if whole:
        slab.commit()


def saved(store: ImageStore, deployment: str, seq: int, *, over: str = "") -> int:
    slot = store.begin(over)
    write(store.paths(slot)[0], deployment, seq)
    store.commit(slot, deployment=deployment, progress=(seq, 0))
    return slot


def slabs(folder: Path) -> int:
    return len(list(folder.rglob("slot-*")))


# ---- slots -------------------------------------------------------------------------------------


def test_images_that_can_be_replaced_take_as_many_slabs_as_there_are(tmp_path: Path) -> None:
    store = ImageStore(tmp_path, world=1)
    first = {name: saved(store, name, 1) for name in "abc"}
    for seq in (2, 3):
        for name in "abc":
            assert saved(store, name, seq, over=name) == first[name], "its own, which is warm"
    assert slabs(tmp_path) == 3
    assert {held.progress for held in store.held()} == {(3, 0)}


def test_an_image_that_somebody_reads_is_not_written_over(tmp_path: Path) -> None:
    store = ImageStore(tmp_path, world=1)
    read = saved(store, "a", 1)
    store.pin(read)
    assert saved(store, "a", 2, over="a") != read
    assert read_header(store.paths(read)[0]).progress == (1, 0)


@pytest.mark.parametrize("began", [False, True], ids=["before", "in the middle of"])
def test_an_older_image_counts_again_unless_writing_over_it_began(
    tmp_path: Path, began: bool
) -> None:
    store = ImageStore(tmp_path, world=1)
    saved(store, "a", 1)
    slot = store.begin("a")
    assert store.find("a") is None
    if began:
        write(store.paths(slot)[0], "a", 2, whole=False)
    store.abandon(slot)
    assert [held.progress for held in store.held()] == ([] if began else [(1, 0)])
    again = ImageStore(tmp_path, world=1)
    assert [held.progress for held in again.held()] == ([] if began else [(1, 0)])


def test_an_image_that_is_dropped_while_it_is_written_over_does_not_come_back(
    tmp_path: Path,
) -> None:
    store = ImageStore(tmp_path, world=1)
    saved(store, "a", 1)
    slot = store.begin("a")
    store.drop("a")
    store.abandon(slot)
    assert store.find("a") is None
    assert store.free_slots() == [slot]


# ---- the tier ----------------------------------------------------------------------------------


def tier_in(folder: Path) -> HostTier:
    tier = HostTier(folder / "host" / "h1", snapshots=None, writer="w")
    tier.store(WPG, 1)
    return tier


async def begin(tier: HostTier, name: str, seq: int, *, replaceable: bool) -> Passage:
    return await tier.begin_save(
        tm.SaveOrder(
            epoch=1, id="1", wpg=WPG, incarnation=1, deployment=name, progress=(seq, 0),
            replaceable=replaceable,
        )
    )  # fmt: skip


async def save(tier: HostTier, name: str, seq: int, *, replaceable: bool = False) -> None:
    passage = await begin(tier, name, seq, replaceable=replaceable)
    write(passage.saves[0], name, seq)
    tier.end(passage, name, (seq, 0), ok=True)


def persist(folder: Path, name: str) -> tm.PersistOrder:
    return tm.PersistOrder(
        epoch=1, id="1", wpg=WPG, deployment=name, folder=str(folder / "durable")
    )


def test_a_spare_slab_stays_until_all_images_have_durable_ones(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = tier_in(tmp_path)
        for name in ("a", "b"):
            for seq in (1, 2):
                await save(tier, name, seq)
        await tier.persist(persist(tmp_path, "a"))
        await tier.idle(quiet=lambda: True)
        assert slabs(tmp_path) == 3
        await tier.persist(persist(tmp_path, "b"))
        await tier.idle(quiet=lambda: True)
        assert slabs(tmp_path) == 2
        await save(tier, "a", 3, replaceable=True)
        assert slabs(tmp_path) == 2
        await save(tier, "new", 1)
        await save(tier, "new", 2)
        await tier.idle(quiet=lambda: True)
        assert slabs(tmp_path) == 4, "nothing else could replace the new one's image"
        tier.drop(tm.DropOrder(epoch=1, deployments=["new", "b"], snapshots=[]))
        assert slabs(tmp_path) == 1

    asyncio.run(scene())


def test_a_copy_to_the_durable_tier_waits_for_the_image_that_is_being_written(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        tier = tier_in(tmp_path)
        await save(tier, "a", 1)
        passage = await begin(tier, "a", 2, replaceable=True)
        copying = asyncio.create_task(tier.persist(persist(tmp_path, "a")))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not copying.done()
        (shown,) = tier.stock().images
        assert shown.progress == (1, 0)
        write(passage.saves[0], "a", 2)
        tier.end(passage, "a", (2, 0), ok=True)
        found = await copying
        assert found.held is not None and found.held.progress == (2, 0)
        folder = durable.folder_of(tmp_path / "durable", "a", (2, 0))
        assert durable.read_manifest(folder).progress == (2, 0)

    asyncio.run(scene())
