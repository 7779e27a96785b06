"""The tier below the host tier: images leave memory, come back, and outlive their agent."""

import asyncio
import errno
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.core.errors import Denied, StorageFailed
from plexrl_slurm.daemons.host_room import HostRoom
from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.memory import disk, nvme, swap, swap_manifest
from plexrl_slurm.memory.slab import read_header
from plexrl_slurm.transport import messages as tm
from tests.memory.test_slab import make_header, write

SLAB = 4096 * 4
SIZE = 4096 * 3 - 8


def tier_in(folder: Path, *, slots: int = 2, copies: int = 9) -> HostTier:
    return HostTier(
        folder / "host" / "n1" / "h1.0",
        snapshots=folder / "snapshots",
        writer="w",
        nvme=NvmeTier(folder / "nvme" / "n1" / "h1.0", limit=copies * SLAB, shared=True),
        host_bytes=slots * SLAB,
    )


def release(tier: HostTier) -> None:
    """What the end of a process does."""
    assert tier._lock is not None and tier._nvme is not None and tier._nvme._lock is not None
    os.close(tier._lock)
    os.close(tier._nvme._lock)


async def save(tier: HostTier, name: str, seq: int = 1) -> None:
    order = tm.SaveOrder(
        epoch=1, id="1", wpg="train-0", incarnation=1, deployment=name, progress=(seq, 0)
    )
    passage = await tier.begin_save(order)
    header = make_header(SIZE, deployment=name)
    header = msgspec.structs.replace(header, progress=(seq, 0), world=1)
    write(passage.saves[0], header, seq)
    tier.end(passage, name, (seq, 0), ok=True)


def switch(name: str, outgoing: str = "") -> tm.SwitchOrder:
    return tm.SwitchOrder(
        epoch=1, id="1", wpg="train-0", incarnation=1, incoming=name, outgoing=outgoing
    )


async def bring(tier: HostTier, name: str) -> None:
    passage = await tier.begin_switch(switch(name))
    assert passage is not None and passage.held is not None
    assert read_header(passage.loads[0]).deployment == name
    tier.end(passage, "", (0, 0), ok=True)


async def filled(folder: Path, *names: str, **sizes: int) -> HostTier:
    tier = tier_in(folder, **sizes)
    await tier.own()
    tier.store("train-0", 1)
    for name in names:
        await save(tier, name)
    return tier


def in_memory(tier: HostTier) -> set[str]:
    return {held.deployment for held in tier.store("train-0").held()}


def on_nvme(tier: HostTier) -> set[str]:
    assert tier._nvme is not None
    return {copy.deployment for copy in tier._nvme.copies()}


def all_of(tier: HostTier) -> dict[str, tuple[int, int]]:
    return {image.deployment: image.progress for image in tier.images()}


def test_more_images_than_memory_holds_are_all_there_and_come_back(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcde")
        assert len(in_memory(tier)) == 2 and all_of(tier) == dict.fromkeys("abcde", (1, 0))
        for name in "abcdeab":
            await bring(tier, name)
            assert name in in_memory(tier) and len(all_of(tier)) == 5
            assert tier.store("train-0").all_bytes() <= 2 * SLAB

    asyncio.run(scene())


def test_room_is_made_for_what_leaves_now_and_not_for_what_left_last(tmp_path: Path) -> None:
    """An open step, or the first moments, make the next image larger."""

    async def scene() -> None:
        tier = await filled(tmp_path, "a", "b", slots=4)
        await bring(tier, "b")
        passage = await tier.begin_switch(switch("b", outgoing="a"), out=3 * SLAB)
        larger = msgspec.structs.replace(
            make_header(3 * SLAB - 4096, deployment="a"), progress=(2, 0), world=1
        )
        write(passage.saves[0], larger, 2)
        assert passage.saves[0].stat().st_size == 3 * SLAB
        assert tier.store("train-0").all_bytes() <= 4 * SLAB
        tier.end(passage, "a", (2, 0), ok=True)
        assert all_of(tier) == {"a": (2, 0), "b": (1, 0)}

    asyncio.run(scene())


def test_the_next_agent_finds_what_its_predecessor_copied(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcd")
        release(tier)
        after = tier_in(tmp_path)
        await after.own()
        assert all_of(after) == dict.fromkeys("abcd", (1, 0))
        for name in "abcd":
            await bring(after, name)

    asyncio.run(scene())


def test_what_was_copied_from_a_host_tier_that_is_gone_is_not_believed(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcd")
        release(tier)
        (tmp_path / "host" / "n1" / "h1.0" / "nvme.owner").unlink()  # the node was started again
        after = tier_in(tmp_path)
        await after.own()
        assert on_nvme(after) == set()
        assert not list((tmp_path / "nvme").rglob("*.slab"))

    asyncio.run(scene())


def test_a_copy_that_was_overtaken_is_dropped_and_the_newer_image_wins(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abc")
        assert "a" in on_nvme(tier)
        await save(tier, "a", seq=2)
        assert "a" not in on_nvme(tier) and all_of(tier)["a"] == (2, 0)

    asyncio.run(scene())


def test_what_lives_no_more_leaves_both_tiers(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcd")
        tier.drop(tm.DropOrder(epoch=1, deployments=["a"], snapshots=[]))
        assert sorted(all_of(tier)) == ["b", "c", "d"]
        tier.keep_only(deployments=["d"], snapshots=[])
        assert sorted(all_of(tier)) == ["d"]
        tier.clear()
        assert not (tmp_path / "nvme" / "n1" / "h1.0").exists()

    asyncio.run(scene())


def test_copies_are_made_while_nothing_moves_so_that_leaving_is_a_drop(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"ab")
        assert on_nvme(tier) == set()
        await tier.idle(quiet=lambda: False)
        assert on_nvme(tier) == set()
        await tier.idle(quiet=lambda: True)
        assert on_nvme(tier) == {"a"} and in_memory(tier) == {"a", "b"}

    asyncio.run(scene())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_leaves_every_image_in_memory(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    async def scene() -> None:
        tier = await filled(tmp_path, *"ab")
        monkeypatch.setattr(os, "pwrite", fail)
        await save(tier, "c")
        assert in_memory(tier) == {"a", "b", "c"} and on_nvme(tier) == set()

    asyncio.run(scene())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_said_in_one_sentence_and_rests(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    async def scene() -> None:
        tier = await filled(tmp_path, *"ab")
        with monkeypatch.context() as patch, caplog.at_level("INFO"):
            patch.setattr(os, "pwrite", fail)
            for name in "cde":
                await save(tier, name)
                await tier.idle(quiet=lambda: True)
        lines = [line for line in caplog.messages if line.startswith("image_not_copied")]
        (full,) = [line for line in caplog.messages if line.startswith("host_tier_full")]
        assert "none can leave for nvme_dir: look at image_not_copied and the disk" in full
        assert len(lines) == 1 and all_of(tier) == dict.fromkeys("abcde", (1, 0))
        told = tier.stock().trouble
        assert told.startswith("no image can be copied to nvme_dir: ") and "; images take " in told
        assert os.strerror(number) in told or number == errno.ENOSPC
        assert tier._room is not None
        tier._room._resting_us = 0
        await tier.idle(quiet=lambda: True)
        await save(tier, "a", seq=2)
        assert on_nvme(tier) and len(all_of(tier)) == 5
        assert tier.stock().trouble == ""

    asyncio.run(scene())


def test_a_folder_that_is_unmounted_is_not_made_again_on_the_disk_below(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"ab")
        (tmp_path / "nvme" / "n1").rename(tmp_path / "elsewhere")
        with caplog.at_level("INFO"):
            await save(tier, "c")
        assert in_memory(tier) == {"a", "b", "c"}
        assert not (tmp_path / "nvme" / "n1").exists()
        assert any("deleted or unmounted" in line for line in caplog.messages)

    asyncio.run(scene())


def test_a_full_nvme_gives_up_what_is_in_memory_as_well_and_no_last_copy(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcd", slots=2, copies=3)
        for name in "abcdabcd":
            await bring(tier, name)
            assert len(all_of(tier)) == 4

    asyncio.run(scene())


def test_a_damaged_copy_is_dropped_with_a_sentence(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abc")
        (slab,) = (tmp_path / "nvme").rglob("rank-0.slab")
        with slab.open("r+b") as file:
            file.seek(9000)
            file.write(b"!")
        passage = await tier.begin_switch(switch("a"))
        assert passage.held is None and passage.left is not None and passage.left.image is None
        assert "rank-0.slab: is damaged: block 0" in passage.left.damaged[0]
        assert "a" not in all_of(tier)
        await bring(tier, "b")

    asyncio.run(scene())


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plexrl_slurm.daemons.nvme_tier.network_kind", lambda _: "NFS")
    with pytest.raises(Denied, match=r"nvme_dir .* is on NFS"):
        asyncio.run(tier_in(tmp_path).own())


def test_an_image_that_is_brought_back_late_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abc")
        order = tm.PersistOrder(
            epoch=1, id="1", wpg="train-0", deployment="a", folder=str(tmp_path / "durable")
        )
        bringing = asyncio.create_task(tier.persist(order))
        await asyncio.sleep(0)
        await save(tier, "a", seq=2)
        await asyncio.gather(bringing, return_exceptions=True)
        assert all_of(tier)["a"] == (2, 0)
        await bring(tier, "a")

    asyncio.run(scene())


def test_a_copy_that_is_written_late_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, "a")
        store, below = tier.store("train-0"), tier._nvme
        assert below is not None
        old = store.find("a")
        assert old is not None
        store.pin(old.slot)
        await save(tier, "a", seq=2)
        new = store.find("a")
        assert new is not None
        await below.write("train-0", new, store.paths(new.slot))
        await below.write("train-0", old, store.paths(old.slot))
        assert [copy.progress for copy in below.copies()] == [(2, 0)]
        # os.walk, because folders that are gone are being deleted meanwhile.
        files = [name for _, _, names in os.walk(tmp_path / "nvme") for name in names]
        assert files.count("manifest.json") <= 2

    asyncio.run(scene())


def test_an_older_image_in_a_free_slab_is_not_believed_when_nvme_has_a_newer(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, "a", slots=4)
        await save(tier, "a", seq=2)  # the slab of the first is free now, and as it was
        store, room = tier.store("train-0"), tier._room
        assert room is not None and await room._copy("train-0", "a")
        store.release("a")
        release(tier)
        after = tier_in(tmp_path, slots=4)
        await after.own()
        assert all_of(after) == {"a": (2, 0)} and in_memory(after) == set()

    asyncio.run(scene())


# ---- ahead of time -----------------------------------------------------------------------------


def expect(tier: HostTier, name: str) -> Coroutine[Any, Any, None]:
    order = tm.ExpectOrder(epoch=1, wpg="train-0", deployment=name)
    return tier.expect(order, quiet=lambda: True)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that are read from now on."""
    read: list[str] = []
    real = nvme.read_image

    def counted(folder: Path, *arguments: Any, **named: Any) -> Any:
        read.append(folder.parent.name)
        return real(folder, *arguments, **named)

    monkeypatch.setattr(nvme, "read_image", counted)
    return read


def test_what_is_expected_is_in_memory_before_it_is_switched_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcde", slots=4)
        await bring(tier, "e")
        assert "a" not in in_memory(tier)
        read = count_reads(monkeypatch)
        await expect(tier, "a")
        assert {"a", "e"} <= in_memory(tier) and read == ["a"]
        await bring(tier, "a")
        assert read == ["a"] and len(all_of(tier)) == 5

    asyncio.run(scene())


def test_what_is_resident_or_the_last_copy_does_not_leave_for_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abc", slots=2)
        await bring(tier, "c")
        monkeypatch.setattr(NvmeTier, "write", broken)
        before = in_memory(tier)
        await expect(tier, "a")
        assert in_memory(tier) >= before - {"a"} and "c" in in_memory(tier)
        assert len(all_of(tier)) == 3

    asyncio.run(scene())


async def broken(*_: Any) -> None:
    raise StorageFailed("/nvme", "Input/output error")


def test_another_hint_ends_what_is_under_way_at_the_next_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "BLOCK", 4096)

    async def scene() -> None:
        tier = await filled(tmp_path, *"abcde", slots=4)
        first = asyncio.create_task(expect(tier, "a"))
        while not isinstance(tier._room, HostRoom) or tier._room.prefetcher._key is None:
            await asyncio.sleep(0)
        gate = tier._room.prefetcher._gate
        tier._room.prefetcher.expect("train-0", "b")
        with pytest.raises(nvme.Abandoned), gate.block():
            pass
        await first
        await expect(tier, "b")
        assert "b" in in_memory(tier)

    asyncio.run(scene())


def test_a_switch_to_what_is_being_brought_waits_for_it_and_reads_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcde", slots=4)
        read = count_reads(monkeypatch)
        coming = asyncio.create_task(expect(tier, "a"))
        while not read:
            await asyncio.sleep(0)
        await bring(tier, "a")
        await coming
        assert read == ["a"]

    asyncio.run(scene())


def test_a_switch_that_needs_the_disk_ends_what_is_under_way(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abcde", slots=3)
        coming = asyncio.create_task(expect(tier, "a"))
        while tier._room is not None and tier._room.prefetcher._key is None and not coming.done():
            await asyncio.sleep(0)
        await bring(tier, "b")
        await coming
        assert "b" in in_memory(tier) and len(all_of(tier)) == 5

    asyncio.run(scene())


def test_a_disk_that_fails_is_told_once_and_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scene() -> None:
        tier = await filled(tmp_path, *"abcde", slots=4)
        with monkeypatch.context() as patch, caplog.at_level("INFO"):
            patch.setattr(disk.disk, "read", fail)
            await expect(tier, "a")
        (line,) = [
            each.getMessage() for each in caplog.records if "prefetched" in each.getMessage()
        ]
        assert "image_not_prefetched" in line
        await bring(tier, "a")

    asyncio.run(scene())


def test_a_dropped_deployments_swap_folder_goes_once_no_rank_uses_it(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = tier_in(tmp_path)
        await tier.own()
        assert tier._nvme is not None
        root = Path(os.environ[swap.SWAP_DIR])
        assert root == tmp_path / "nvme" / "n1" / "h1.0" / "swap"
        tier.store("train-0", 1)
        used = swap.SwapFolder(swap.home_of(root, "train-0", "a"), rank=0, world=1)
        used.begin({"master.0.swp": 4096})
        used.commit()
        swap.SwapFolder(swap.home_of(root, "train-0", "b"), rank=0, world=1).close()
        assert tier._nvme.used == 4096 + swap_manifest.room_for(1)
        tier.drop(tm.DropOrder(epoch=1, deployments=["a", "b"], snapshots=[]))
        assert [path.name for path in (root / "train-0").iterdir()] == ["a"]
        used.close()
        tier.drop_again(quiet=True)
        assert list((root / "train-0").iterdir()) == []
        swap.SwapFolder(swap.home_of(root, "train-0", "c"), rank=0, world=1).close()
        swap.scratch_of(root, "train-0", 0).mkdir()
        tier.keep_only(deployments=["d"], snapshots=[])
        assert [path.name for path in (root / "train-0").iterdir()] == [".scratch-0"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(swap.SWAP_DIR, "")
        asyncio.run(scene())
