"""Images with a part in a swap folder: what somebody may have harmed is read, and gives way."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.memory import durable, swap, swap_manifest
from plexrl_slurm.memory.slab import Slab
from plexrl_slurm.transport import messages as tm
from tests.daemons.test_damaged_images import persist, switch_with
from tests.daemons.test_nvme_tier import SIZE, on_nvme, release, switch, tier_in
from tests.daemons.test_nvme_tier import save as save_whole
from tests.memory.test_slab import make_header

FILES = {"master.0.swp": 4096, "exp_avg.0.swp": 8192}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(swap.SWAP_DIR, "")
    monkeypatch.setenv(swap_manifest.SWAP_WRITER, "")


async def own(folder: Path) -> HostTier:
    tier = tier_in(folder)
    await tier.own()
    tier.store("train-0", 1)
    return tier


async def save(tier: HostTier, seq: int, name: str = "a") -> Path:
    """An image of a deployment whose rank has made a step; the version of it."""
    home = swap.home_of(Path(os.environ[swap.SWAP_DIR]), "train-0", name)
    folder = swap.SwapFolder(home, rank=0, world=1)
    place = folder.begin(FILES)
    for file in FILES:
        (place / file).write_bytes(bytes([seq]) * FILES[file])
    folder.commit()
    folder.close()
    order = tm.SaveOrder(
        epoch=1, id="1", wpg="train-0", incarnation=1, deployment=name, progress=(seq, 0)
    )
    passage = await tier.begin_save(order)
    state = {swap.VERSION: folder.current, swap.FILES: len(FILES)}
    header = make_header(SIZE, deployment=name)
    slab = Slab(passage.saves[0])
    slab.write(msgspec.structs.replace(header, progress=(seq, 0), world=1, state=state))
    slab.commit()
    tier.end(passage, name, (seq, 0), ok=True)
    return place


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)


def tear(path: Path) -> None:
    """What a power cut leaves of a file that was never synced."""
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)


async def with_a_durable_one(folder: Path) -> tuple[HostTier, Path]:
    """An image of seq 1 that is durable, and one of seq 2 with its version."""
    tier = await own(folder)
    await save(tier, 1)
    await tier.persist(persist(folder / "durable"))
    return tier, await save(tier, 2)


async def come_in(tier: HostTier, folder: Path) -> tm.ImagesLeft:
    passage = await tier.begin_switch(switch_with(folder / "durable", (1, 0)))
    tier.end(passage, "", (0, 0), ok=True)
    assert passage.left is not None
    return passage.left


@pytest.mark.parametrize("harm", [flip, tear, Path.unlink])
def test_after_a_restart_a_harmed_version_gives_way_to_the_image_before(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    async def scene() -> None:
        tier, version = await with_a_durable_one(tmp_path)
        harm(version / "exp_avg.0.swp")
        release(tier)
        left = await come_in(await own(tmp_path), tmp_path)
        assert left.image == left.durable == (1, 0)
        (sentence,) = left.damaged
        assert str(version) in sentence

    asyncio.run(scene())


def test_after_a_restart_a_good_version_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    check = swap_manifest.check

    def counted(place: Path, manifest: swap_manifest.SwapManifest) -> None:
        read.append(place)
        check(place, manifest)

    async def scene() -> None:
        tier, version = await with_a_durable_one(tmp_path)
        monkeypatch.setattr(swap_manifest, "check", counted)
        assert (await come_in(tier, tmp_path)).image == (2, 0)
        assert read == []
        release(tier)
        tier = await own(tmp_path)
        for _ in range(2):
            left = await come_in(tier, tmp_path)
            assert left.image == (2, 0) and not left.damaged
        assert read == [version]
        newer = await save(tier, 3)
        assert (await come_in(tier, tmp_path)).image == (3, 0)
        assert newer not in read

    asyncio.run(scene())


def test_a_version_is_read_again_when_its_image_comes_back_from_nvme(tmp_path: Path) -> None:
    async def scene() -> None:
        tier, version = await with_a_durable_one(tmp_path)
        for name in "bcd":
            await save_whole(tier, name)
        assert on_nvme(tier) >= {"a"}
        flip(version / "master.0.swp")
        left = await come_in(tier, tmp_path)
        assert left.image == (1, 0)
        assert "master.0.swp" in left.damaged[0]

    asyncio.run(scene())


@pytest.mark.parametrize("harm", [flip, tear, Path.unlink])
def test_a_version_is_read_again_when_a_rank_has_died_with_it(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    async def scene() -> None:
        tier, version = await with_a_durable_one(tmp_path)
        assert (await come_in(tier, tmp_path)).image == (2, 0)
        harm(version / "exp_avg.0.swp")
        tier.doubt("train-0", "another")
        tier.doubt("train-0", "a")
        left = await come_in(tier, tmp_path)
        assert left.image == (1, 0)
        assert str(version) in left.damaged[0]

    asyncio.run(scene())


def test_a_harmed_version_gets_no_durable_copy_and_is_known_from_then_on(tmp_path: Path) -> None:
    async def scene() -> None:
        tier, version = await with_a_durable_one(tmp_path)
        flip(version / "exp_avg.0.swp")
        found = await tier.persist(persist(tmp_path / "durable"))
        assert found.held is None
        assert "exp_avg.0.swp" in found.damaged[0]
        assert [path.name for path in durable.folders_of(tmp_path / "durable" / "a")] == [
            "000000001.0000"
        ]
        assert (await come_in(tier, tmp_path)).image == (1, 0)

    asyncio.run(scene())


def test_without_an_older_image_there_is_none(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await own(tmp_path)
        flip(await save(tier, 1) / "master.0.swp")
        release(tier)
        passage = await (await own(tmp_path)).begin_switch(switch("a"))
        assert passage.held is None and passage.left is not None
        assert "master.0.swp" in passage.left.damaged[0]

    asyncio.run(scene())
