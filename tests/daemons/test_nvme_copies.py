"""Copies on NVMe: which make room for others, and which take room that nobody may forget."""

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.memory import disk, nvme
from plexrl_slurm.memory.files import publish_folder
from plexrl_slurm.memory.images import Held
from tests.daemons.test_nvme_tier import SLAB, all_of, filled, on_nvme, save


def test_a_copy_that_the_disk_does_not_let_go_takes_its_bytes_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scene() -> None:
        tier = await filled(tmp_path, *"abc", copies=1)
        below = tier._nvme
        assert below is not None and on_nvme(tier) == {"a"} and below.used == SLAB
        with monkeypatch.context() as patch:
            patch.setattr(type(disk.disk), "rename", fail)
            below.drop("train-0", "a")
        assert on_nvme(tier) == set() and below.used == SLAB
        below.drop("train-0", "nobody")
        assert below.used == SLAB
        await save(tier, "d")
        assert on_nvme(tier) == set(), "there is no room yet"
        below._delete(tmp_path / "nothing", 0)
        assert below.used == 0

    asyncio.run(scene())


def test_a_copy_whose_name_may_not_last_is_none_and_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = publish_folder

    def publish_and_fail(part: Path, folder: Path) -> None:
        publish(part, folder)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scene() -> None:
        tier = await filled(tmp_path, *"ab")
        monkeypatch.setattr(nvme, "publish_folder", publish_and_fail)
        await save(tier, "c")
        below = tier._nvme
        assert below is not None and on_nvme(tier) == set() and below.used == 0
        assert not list(below._images.rglob("manifest.json"))

    asyncio.run(scene())


def test_a_copy_made_ahead_does_not_make_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are to leave memory and the disk has room for one: each took the other's, for ever."""
    written: list[str] = []
    write_below = NvmeTier.write

    async def write(self: NvmeTier, wpg: str, held: Held, paths: Sequence[Path]) -> None:
        written.append(held.deployment)
        await write_below(self, wpg, held, paths)

    async def scene() -> None:
        tier = await filled(tmp_path, *"abc", slots=3, copies=1)
        assert tier._room is not None
        tier._room._limit = 2 * SLAB  # as where images are larger than was thought
        monkeypatch.setattr(NvmeTier, "write", write)
        for _ in range(2):
            looks = iter(range(20))
            await tier.idle(quiet=lambda looks=looks: next(looks, None) is not None)  # type: ignore[misc]
        assert written == ["a"] and on_nvme(tier) == {"a"}
        await save(tier, "d")
        assert all_of(tier) == dict.fromkeys("abcd", (1, 0)) and on_nvme(tier) == {"a"}

    asyncio.run(scene())
