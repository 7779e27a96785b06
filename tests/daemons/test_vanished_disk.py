"""A disk of the node that is gone in the middle of a write."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.memory import nvme
from tests.daemons.test_nvme_tier import all_of, bring, filled, in_memory, on_nvme, save


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_disk_that_vanishes_while_it_is_written_takes_no_image_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, block: int
) -> None:
    """Nor is its folder made again where it was mounted, and it is said why."""
    real, written = os.pwrite, 0

    def vanish(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        written += 1
        if written == block:
            shutil.rmtree(tmp_path / "nvme" / "n1")
        return real(descriptor, data, offset)

    async def scene() -> None:
        monkeypatch.setattr(nvme, "BLOCK", 8192)
        tier = await filled(tmp_path, *"ab")
        with monkeypatch.context() as patch, caplog.at_level("INFO"):
            patch.setattr(os, "pwrite", vanish)
            await save(tier, "c")
        assert written >= block and on_nvme(tier) == set()
        assert in_memory(tier) == {"a", "b", "c"} == set(all_of(tier))
        (line,) = [line for line in caplog.messages if line.startswith("image_not_copied")]
        assert "No such file or directory" in line or "deleted" in line
        for name in "abc":
            await bring(tier, name)
        assert tier._room is not None
        tier._room._resting_us = 0
        with caplog.at_level("INFO"):
            await save(tier, "d")
        assert not (tmp_path / "nvme" / "n1").exists() and "d" in in_memory(tier)
        assert any("deleted or unmounted" in line for line in caplog.messages)

    asyncio.run(scene())
