"""Cold copies are read again: damage is found, told, and harms nobody who has a better copy."""

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.daemons import scrubber
from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.memory import nvme
from plexrl_slurm.transport import messages as tm
from tests.daemons.test_nvme_tier import SLAB, all_of, bring, in_memory, on_nvme, save

DAY_US = 86_400_000_000


async def filled(folder: Path, *names: str) -> HostTier:
    tier = HostTier(
        folder / "host" / "n1" / "h1.0", snapshots=folder / "snapshots", writer="w",
        nvme=NvmeTier(folder / "nvme" / "n1" / "h1.0", limit=9 * SLAB, shared=True),
        host_bytes=2 * SLAB, scrub_days=3,
    )  # fmt: skip
    await tier.own()
    tier.store("train-0", 1)
    for name in names:
        await save(tier, name)
    return tier


def damage(folder: Path, name: str) -> None:
    (slab,) = folder.glob(f"nvme/**/{name}/*/rank-0.slab")
    with slab.open("r+b") as file:
        file.seek(9000)
        file.write(b"!")


async def scrub(tier: HostTier, *, days: float = 4) -> int:
    """All that is due after so many days; how many were read."""
    assert tier._scrubber is not None
    read = 0
    while await tier._scrubber.once(now_us() + int(days * DAY_US)):
        read += 1
    return read


def test_each_copy_is_read_once_in_its_time(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcd")
        copies = len(on_nvme(tier))
        assert copies >= 2
        assert await scrub(tier, days=2) == 0
        assert await scrub(tier) == copies
        assert await scrub(tier) == 0 and tier.stock().faults == []

    asyncio.run(scene())


def test_a_damaged_copy_goes_if_memory_has_the_image(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"ab")
        await tier.idle(quiet=lambda: True)
        (name,) = on_nvme(tier) & in_memory(tier)
        damage(tmp_path, name)
        await scrub(tier)
        (fault,) = tier.stock().faults
        assert fault.dropped and fault.deployment == name and "block 0" in fault.reason
        assert on_nvme(tier) == set() and len(all_of(tier)) == 2
        await bring(tier, name)
        await tier.idle(quiet=lambda: True)
        assert len(on_nvme(tier)) == 1  # the coldest was copied again

    asyncio.run(scene())


def test_a_damaged_copy_goes_if_the_durable_tier_has_the_image(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, "a")
        order = tm.PersistOrder(
            epoch=1, id="1", wpg="train-0", deployment="a", folder=str(tmp_path / "durable")
        )
        await tier.persist(order)
        for name in "bc":
            await save(tier, name)
        assert "a" not in in_memory(tier)
        damage(tmp_path, "a")
        await scrub(tier)
        assert [fault.dropped for fault in tier.stock().faults] == [True]
        assert "a" not in on_nvme(tier)

    asyncio.run(scene())


def test_the_last_copy_stays_though_it_is_damaged_and_is_told_until_it_is_replaced(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abc")
        damage(tmp_path, "a")
        await scrub(tier)
        (fault,) = tier.stock().faults
        assert not fault.dropped and "a" in on_nvme(tier)
        await save(tier, "a", seq=2)
        assert tier.stock().faults == []

    asyncio.run(scene())


def test_a_disk_that_errs_once_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, errors = os.preadv, [0]

    def once(*arguments: Any) -> int:
        errors[0] += 1
        if errors[0] == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    async def scene() -> None:
        tier = await filled(tmp_path, *"abc")
        monkeypatch.setattr(os, "preadv", once)
        await scrub(tier)
        assert errors[0] > 1 and tier.stock().faults == []

    asyncio.run(scene())


def test_a_scrub_gives_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "SHARE", 1e-6)  # it would rest for days

    async def scene() -> None:
        tier = await filled(tmp_path, *"abc")
        assert tier._scrubber is not None and tier._room is not None
        scrubbing = asyncio.create_task(tier._scrubber.once(now_us() + 4 * DAY_US))
        while tier._room.prefetcher._key is None:
            await asyncio.sleep(0)
        start = time.monotonic()
        await bring(tier, "a")
        assert not await scrubbing or "a" in in_memory(tier)
        assert time.monotonic() - start < 60

    asyncio.run(scene())


def test_a_share_of_the_time_is_rested() -> None:
    gate = nvme.Gate(slow=True, share=0.25)
    start = time.monotonic()
    with gate.block():
        time.sleep(0.02)
    assert time.monotonic() - start >= 0.08
