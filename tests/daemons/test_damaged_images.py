"""An agent takes the next older image; a daemon believes what is on the disk."""

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.core.ids import DeploymentId
from plexrl_slurm.daemons.damaged_images import DamagedImages, on_disk
from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.slab import read_header
from plexrl_slurm.transport import messages as tm
from tests.daemons.test_nvme_tier import filled, in_memory, on_nvme, save, switch


def persist(folder: Path, name: str = "a", known: tuple[int, int] | None = None) -> tm.PersistOrder:
    return tm.PersistOrder(
        epoch=1, id="1", wpg="train-0", deployment=name, folder=str(folder), known=known
    )


def switch_with(folder: Path, progress: tuple[int, int]) -> tm.SwitchOrder:
    return tm.SwitchOrder(
        epoch=1,
        id="1",
        wpg="train-0",
        incarnation=1,
        incoming="a",
        durable_path=str(durable.folder_of(folder, "a", progress)),
        durable_progress=progress,
    )


async def with_two_durable(folder: Path) -> HostTier:
    """Images of a at seq 1 and 2 are durable, none is in memory."""
    tier = await filled(folder)
    for seq in (1, 2):
        await save(tier, "a", seq)
        await tier.persist(persist(folder / "durable"))
    tier.store("train-0").drop("a")
    return tier


def cut(folder: Path) -> None:
    os.truncate(folder / "rank-0.slab", 100)


def left(image: int | None, durable_seq: int | None) -> tuple[object, object]:
    return (image and (image, 0), durable_seq and (durable_seq, 0))


def test_a_damaged_durable_image_is_set_aside_and_the_one_before_it_comes_in(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        tier = await with_two_durable(tmp_path)
        newest = durable.folder_of(tmp_path / "durable", "a", (2, 0))
        cut(newest)
        passage = await tier.begin_switch(switch_with(tmp_path / "durable", (2, 0)))
        assert passage.held is not None and passage.held.progress == (1, 0)
        assert read_header(passage.loads[0]).progress == (1, 0)
        assert passage.left is not None
        assert (passage.left.image, passage.left.durable) == left(1, 1)
        assert "is cut off" in passage.left.damaged[0]
        assert not newest.exists() and newest.with_name(f"damaged-{newest.name}").exists()

    asyncio.run(scene())


def test_without_any_whole_image_a_switch_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await with_two_durable(tmp_path)
        for seq in (1, 2):
            cut(durable.folder_of(tmp_path / "durable", "a", (seq, 0)))
        passage = await tier.begin_switch(switch_with(tmp_path / "durable", (2, 0)))
        assert passage.held is None and passage.left is not None
        assert (passage.left.image, passage.left.durable) == (None, None)
        assert len(passage.left.damaged) == 2

    asyncio.run(scene())


@pytest.mark.parametrize("problem", [errno.ESTALE, errno.EACCES])
def test_what_may_pass_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    async def scene() -> None:
        tier = await with_two_durable(tmp_path)

        def stale(*_: object, **_named: object) -> None:
            raise OSError(problem, os.strerror(problem))

        with monkeypatch.context() as patch:
            patch.setattr(durable, "read_image", stale)
            with pytest.raises(BadImage, match=os.strerror(problem)):
                await tier.begin_switch(switch_with(tmp_path / "durable", (2, 0)))
        passage = await tier.begin_switch(switch_with(tmp_path / "durable", (2, 0)))
        assert passage.held is not None and passage.held.progress == (2, 0)

    asyncio.run(scene())


def test_a_durable_tier_that_is_not_mounted_loses_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await with_two_durable(tmp_path)
        (tmp_path / "durable").rename(tmp_path / "elsewhere")
        with pytest.raises(BadImage, match="No such file"):
            await tier.begin_switch(switch_with(tmp_path / "durable", (2, 0)))

    asyncio.run(scene())


def test_an_image_whose_memory_was_taken_away_comes_from_its_copy(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"abc", slots=2)
        await tier.idle(quiet=lambda: True)
        both = sorted(in_memory(tier) & on_nvme(tier))
        assert both
        store = tier.store("train-0")
        held = store.find(both[0])
        assert held is not None
        store.paths(held.slot)[0].unlink()
        passage = await tier.begin_switch(switch(both[0]))
        assert passage.held is not None and passage.held.progress == (1, 0)
        assert passage.left is not None and passage.left.image == (1, 0)
        assert read_header(passage.loads[0]).deployment == both[0]

    asyncio.run(scene())


def test_a_slab_that_became_anothers_is_not_loaded(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, *"ab", slots=4)
        store = tier.store("train-0")
        (one, other) = (store.find(name) for name in "ab")
        assert one is not None and other is not None
        store.paths(one.slot)[0].write_bytes(store.paths(other.slot)[0].read_bytes())
        passage = await tier.begin_switch(switch("a"))
        assert passage.held is None and passage.left is not None
        assert "no longer the image of a" in passage.left.damaged[0]

    asyncio.run(scene())


def test_a_copy_to_the_durable_tier_says_that_there_is_nothing_to_copy(tmp_path: Path) -> None:
    async def scene() -> None:
        tier = await filled(tmp_path, "a")
        store = tier.store("train-0")
        held = store.find("a")
        assert held is not None
        os.truncate(store.paths(held.slot)[0], 0)
        found = await tier.persist(persist(tmp_path / "durable", known=(1, 0)))
        assert found.held is None and found.durable == (1, 0)
        assert not (tmp_path / "durable").exists()
        assert tier.images() == []

    asyncio.run(scene())


# ---- the daemon --------------------------------------------------------------------------------


def test_a_daemon_takes_the_newest_durable_image_that_is_there(tmp_path: Path) -> None:
    asyncio.run(with_two_durable(tmp_path))
    root, name = tmp_path / "durable", DeploymentId("a")
    newest = durable.folder_of(root, "a", (2, 0))
    kept = Durable(progress=(2, 0), path=str(newest))
    assert on_disk([(name, kept)]) == {
        name: Durable(progress=(2, 0), path=str(newest), spare=(1, 0))
    }
    durable.set_aside(newest)
    older = durable.folder_of(root, "a", (1, 0))
    assert on_disk([(name, kept)]) == {name: Durable(progress=(1, 0), path=str(older))}
    durable.set_aside(older)
    assert on_disk([(name, kept)]) == {name: None}
    durable.drop_images(root, "a")
    assert on_disk([(name, kept)]) == {name: kept}, "the file system may be away"


@pytest.mark.parametrize(
    ("image", "kept", "said"),
    [
        pytest.param(
            (3, 0), range(3, 8), "it goes on from the image at seq 3; calls since run again",
            id="an older image, and all calls since",
        ),
        pytest.param(
            None, range(8), "it goes on from its first call on, which all run again",
            id="no image, and all calls",
        ),
        pytest.param(
            None, range(3, 8),
            "its state is lost, because calls that no older image contains are gone: start from a "
            "checkpoint", id="no image, and not the first calls",
        ),
        pytest.param(
            None, (),
            "its state is lost, because calls that no older image contains are gone: start from a "
            "checkpoint", id="no image, and no calls",
        ),
        pytest.param(
            (8, 0), (), "it goes on from the image at seq 8; calls since run again",
            id="an image of everything",
        ),
    ],
)  # fmt: skip
def test_a_jobs_story_says_whether_its_state_is_lost(
    image: tuple[int, int] | None, kept: Any, said: str
) -> None:
    notes: list[str] = []

    def add(_function: Any, *values: Any, lazy: bool = False) -> None:
        if lazy:
            notes.append(values[1])

    live = SimpleNamespace(id="a", job=7, dropped=False, calls=dict.fromkeys(range(8), "call"))
    parts = SimpleNamespace(
        state=SimpleNamespace(deployments={"a": live}),
        shell=SimpleNamespace(durable={}),
        books=SimpleNamespace(kept={"a": dict.fromkeys(kept, "call")}),
        writer=SimpleNamespace(add=add),
        hub=None,
    )
    left = tm.ImagesLeft(image=image, durable=None, damaged=["it is cut off"])
    done = SimpleNamespace(deployment="a", left=left)
    DamagedImages(cast("Any", parts)).met(cast("Any", done), "n1")
    assert notes == [f"the newest image of a cannot be used (it is cut off); {said}"]
