"""Images in memory: summed up while nothing moves, checked when another agent takes them over."""

import asyncio
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.daemons.part_tier import PartTier
from plexrl_slurm.memory import durable, sums
from plexrl_slurm.memory.slab import read_header
from plexrl_slurm.transport import messages as tm
from tests.daemons import test_part_tier as parts
from tests.daemons.test_spares import WPG, persist, save, tier_in
from tests.memory.test_sums import flip


def switch(deployment: str = "a") -> tm.SwitchOrder:
    return tm.SwitchOrder(epoch=1, id="1", wpg=WPG, incarnation=1, incoming=deployment)


def slab_of(folder: Path, deployment: str) -> Path:
    (found,) = [
        path for path in folder.rglob("slot-*") if read_header(path).deployment == deployment
    ]
    return found


async def summed(folder: Path) -> Path:
    """An agent that ended when its image had checksums; the slab."""
    tier = tier_in(folder)
    await save(tier, "a", 1)
    await tier.idle(quiet=lambda: True)
    return slab_of(folder, "a")


def test_images_get_checksums_when_nothing_moves(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = tier_in(tmp_path)
        await save(tier, "a", 1)
        slab = slab_of(tmp_path, "a")
        await tier.idle(quiet=lambda: False)
        assert sums.read(slab) is None
        await tier.idle(quiet=lambda: True)
        assert sums.check(slab)
        passage = await tier.begin_save(
            tm.SaveOrder(
                epoch=1, id="2", wpg=WPG, incarnation=1, deployment="a", progress=(2, 0),
                replaceable=True,
            )
        )  # fmt: skip
        assert passage.saves == [slab]
        assert sums.read(slab) is None

    asyncio.run(scene())


def test_a_slab_that_is_written_while_it_is_summed_up_gets_no_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        tier = tier_in(tmp_path)
        await save(tier, "a", 1)
        slab, real = slab_of(tmp_path, "a"), asyncio.to_thread

        async def meanwhile(function: object, *args: object, **named: object) -> object:
            found: object = await real(function, *args, **named)  # type: ignore[arg-type]
            if function is sums.compute and len(seen) == 0:
                seen.append(found)
                await save(tier, "a", 1, replaceable=True)
            return found

        seen: list[object] = []
        monkeypatch.setattr(asyncio, "to_thread", meanwhile)
        await tier.idle(quiet=lambda: True)
        assert seen and seen[0] is not None
        assert sums.read(slab) is None, "they are of what was there before"

    asyncio.run(scene())


@pytest.mark.parametrize("damaged", [False, True])
def test_an_agent_checks_what_an_earlier_one_left(tmp_path: Path, damaged: bool) -> None:
    async def scene() -> None:
        slab = await summed(tmp_path)
        if damaged:
            flip(slab, 4096 + 10)
        tier = tier_in(tmp_path)
        assert [image.progress for image in tier.images()] == [(1, 0)]
        passage = await tier.begin_switch(switch())
        assert (passage.held is None) == damaged
        assert passage.left is not None
        if damaged:
            assert "is damaged in memory" in passage.left.damaged[0]
            assert tier.images() == []
        else:
            assert passage.left.damaged == []

    asyncio.run(scene())


def test_an_image_without_checksums_is_taken_over_as_it_is(tmp_path: Path) -> None:
    async def scene() -> None:
        await save(tier_in(tmp_path), "a", 1)
        passage = await tier_in(tmp_path).begin_switch(switch())
        assert passage.held is not None and passage.held.progress == (1, 0)

    asyncio.run(scene())


def test_a_damaged_image_is_found_while_nothing_moves_and_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        slab = await summed(tmp_path)
        flip(slab, 4096 + 10)
        tier = tier_in(tmp_path)
        caplog.set_level("INFO")
        for _ in range(3):
            await tier.idle(quiet=lambda: True)
        told = [record for record in caplog.records if "slab_damaged" in record.message]
        assert len(told) == 1

    asyncio.run(scene())


def test_an_image_that_turns_out_damaged_when_it_is_copied_is_none(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = tier_in(tmp_path)
        await save(tier, "a", 1)
        await tier.persist(persist(tmp_path, "a"))
        await save(tier, "a", 2, replaceable=True)
        await tier.idle(quiet=lambda: True)
        flip(slab_of(tmp_path, "a"), 4096 + 10)
        found = await tier.persist(persist(tmp_path, "a"))
        assert found.held is None
        assert "is damaged in memory" in found.damaged[0]
        (folder,) = durable.folders_of(tmp_path / "durable" / "a")
        assert durable.progress_of(folder) == (1, 0)

    asyncio.run(scene())


def test_a_share_of_an_image_is_checked_too(tmp_path: Path) -> None:
    async def scene() -> None:
        first = await parts.tier_in(tmp_path, 0)
        await parts.save(first, "a", 1)
        await first.idle(quiet=lambda: True)
        flip(slab_of(tmp_path, "a"), 4096 + 10)
        tier = PartTier(tmp_path / "host-0", snapshots=None, writer="n0.2")
        tier.part("train-0", world=2, ranks=range(0, 1))
        with pytest.raises(BadImage, match="is damaged in memory"):
            await tier.fetch_part(parts.fetch("a", 1))

    asyncio.run(scene())
