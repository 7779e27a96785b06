"""Checksums of slabs: what they find, and when there are none."""

from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import durable, nvme, sums
from plexrl_slurm.memory.images import ImageStore
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor

SIZE = 20 << 20


def store_with_image(folder: Path) -> tuple[ImageStore, Path]:
    store = ImageStore(folder / "host", world=1)
    slot = store.begin()
    (path,) = store.paths(slot)
    slab = Slab(path)
    header = slab.write(
        SlabHeader(
            deployment="a", progress=(1, 0), rank=0, world=1, architecture="none",
            tensors=(SlabTensor("state", "bytes", (SIZE,), SIZE),),
        )
    )  # fmt: skip
    slab.views(header.tensors)[0][:4] = b"abcd"
    slab.commit()
    store.commit(slot, deployment="a", progress=(1, 0))
    return store, path


def sum_up(slab: Path) -> sums.Sums:
    found = sums.compute(slab, [], wanted=lambda: True)
    assert found is not None
    sums.write(slab, found)
    return found


def flip(slab: Path, at: int) -> None:
    with slab.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_slab_that_is_what_it_was_matches(tmp_path: Path) -> None:
    _, slab = store_with_image(tmp_path)
    assert not sums.check(slab), "it has none yet"
    assert len(sum_up(slab).blocks) == 3
    assert sums.check(slab)


@pytest.mark.parametrize("at", [5000, (8 << 20) + 1, SIZE - 1])
def test_a_bit_that_flips_is_found_wherever_it_is(tmp_path: Path, at: int) -> None:
    _, slab = store_with_image(tmp_path)
    sum_up(slab)
    flip(slab, at)
    block = at // sums.BLOCK
    with pytest.raises(BadImage, match=f"damaged in memory: block {block} does not match"):
        sums.check(slab)


def test_a_damaged_slab_is_copied_nowhere(tmp_path: Path) -> None:
    _, slab = store_with_image(tmp_path)
    sum_up(slab)
    flip(slab, 9 << 20)
    with pytest.raises(BadImage, match="damaged in memory"):
        nvme.write_image(tmp_path / "nvme" / "i", [slab], owner="o")
    with pytest.raises(BadImage, match="damaged in memory"):
        durable.write_image(tmp_path / "durable" / "a" / "000000001.0000", [slab], writer="w")
    assert not list((tmp_path / "nvme").glob("*"))
    assert not list((tmp_path / "durable" / "a").glob("*"))


def test_checksums_that_were_interrupted_go_on_where_they_were(tmp_path: Path) -> None:
    _, slab = store_with_image(tmp_path)
    begun: list[int] = []
    assert sums.compute(slab, begun, wanted=lambda: False) is None
    assert len(begun) == 1
    found = sums.compute(slab, begun, wanted=lambda: True)
    assert found == sums.compute(slab, [], wanted=lambda: True)


def test_checksums_that_are_damaged_themselves_are_none(tmp_path: Path) -> None:
    _, slab = store_with_image(tmp_path)
    sum_up(slab)
    flip(sums.path_of(slab), 30)
    assert sums.read(slab) is None
    assert not sums.check(slab)


@pytest.mark.parametrize("what", ["begin", "release", "delete"])
def test_a_slab_that_is_given_away_has_no_checksums(tmp_path: Path, what: str) -> None:
    store, slab = store_with_image(tmp_path)
    sum_up(slab)
    if what == "begin":
        store.begin("a")
    elif what == "release":
        store.release("a")
    else:
        store.forget("a")
        store.delete(store.free_slots()[0])
    assert not sums.path_of(slab).exists()


def test_an_image_that_came_from_nvme_has_the_checksums_of_its_copy(tmp_path: Path) -> None:
    store, slab = store_with_image(tmp_path)
    manifest = nvme.write_image(tmp_path / "nvme" / "i", [slab], owner="o")
    (other,) = store.paths(store.begin())
    nvme.read_image(tmp_path / "nvme" / "i", [other], owner="o")
    known = sums.read(other)
    assert known is not None and known.blocks == manifest.files[0].blocks
    assert sums.check(other)
