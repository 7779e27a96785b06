"""Slots of one WPG: which are kept, and which are given back."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import disk as seam
from plexrl_slurm.memory import sums
from plexrl_slurm.memory.images import ImageStore
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor
from tests.memory.faults import STOP, TEAR, FaultyDisk, Stopped


def write(store: ImageStore, deployment: str) -> int:
    """A complete image, as a rank and its agent make one."""
    slot = store.begin()
    (path,) = store.paths(slot)
    slab = Slab(path)
    slab.write(
        SlabHeader(
            deployment=deployment,
            progress=(1, 0),
            rank=0,
            world=1,
            architecture="none",
            tensors=(SlabTensor("state", "bytes", (5000,), 5000),),
        )
    )
    slab.commit()
    store.commit(slot, deployment=deployment, progress=(1, 0))
    return slot


def test_so_many_deployments_take_as_many_slabs_and_one(tmp_path: Path) -> None:
    store = ImageStore(tmp_path, world=1)
    for turn in range(3):
        for name in "abcd":
            write(store, name)
        assert len(list(tmp_path.iterdir())) == (4 if turn == 0 else 5)


def test_when_deployments_end_one_free_slab_stays(tmp_path: Path) -> None:
    store = ImageStore(tmp_path, world=1)
    for name in "abcda":
        write(store, name)
    store.keep_only(["c"])
    assert [held.deployment for held in store.held()] == ["c"]
    assert len(list(tmp_path.iterdir())) == 2
    assert len(store.free_slots()) == 1


def test_a_slab_that_somebody_reads_is_not_given_back(tmp_path: Path) -> None:
    store = ImageStore(tmp_path, world=1)
    slots = {name: write(store, name) for name in "abc"}
    store.pin(slots["c"])
    for name in "abc":
        store.drop(name)
    assert store.paths(slots["c"])[0].exists()
    assert len(store.free_slots()) == 1


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("fault", [STOP, TEAR])
def test_an_agent_that_dies_while_it_gives_a_damaged_image_up_leaves_none_that_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, fault: str
) -> None:
    folder = tmp_path / "images"
    slot = write(ImageStore(folder, world=1), "a")
    (slab,) = ImageStore(folder, world=1).paths(slot)
    found = sums.compute(slab, [], wanted=lambda: True)
    assert found is not None
    sums.write(slab, found)
    with slab.open("r+b") as file:
        file.seek(5000)
        file.write(b"!")
    disk = FaultyDisk(rng=random.Random(1), memory=tmp_path)
    disk.fault = lambda now, _kind: fault if now == step else ""
    store = ImageStore(folder, world=1)
    with monkeypatch.context() as patch, suppress(Stopped):
        patch.setattr(seam, "disk", disk)
        store.forget("a")
    next_agents = ImageStore(folder, world=1)
    if next_agents.find("a") is not None:
        with pytest.raises(BadImage, match="is damaged in memory"):
            sums.check(slab)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 0)])
def test_an_image_whose_file_is_gone_is_released_all_the_same(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    store = ImageStore(tmp_path, world=1)
    slot = write(store, "a")
    harm(store.paths(slot)[0])
    store.release("a")
    assert store.find("a") is None
    write(store, "b")
    assert [held.deployment for held in ImageStore(tmp_path, world=1).held()] == ["b"]
