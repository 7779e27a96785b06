"""Images in the durable tier: complete or not there, checked when they come back."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from msgspec.structs import replace

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.images import ImageStore
from plexrl_slurm.memory.slab import Slab, read_header
from tests.memory.test_slab import make_header, write

SIZES = (8, 5000, 12)


@pytest.fixture
def slabs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"slot-0.rank-{rank}" for rank in range(2)]
    for rank, path in enumerate(paths):
        write(path, replace(make_header(*SIZES), rank=rank), 7 + rank)
    return paths


def content(path: Path) -> list[bytes]:
    slab = Slab(path)
    header = slab.read()
    return [bytes(view) for view in slab.views(header.tensors)]


def test_an_image_comes_back_as_it_was(tmp_path: Path) -> None:
    name = "s1-1:train:0"
    slabs = [tmp_path / f"slot-0.rank-{rank}" for rank in range(2)]
    for rank, path in enumerate(slabs):
        write(path, replace(make_header(*SIZES, deployment=name), rank=rank), 7 + rank)
    folder = durable.folder_of(tmp_path / "durable", name, (7, 1))
    assert folder.name == "000000007.0001" and folder.parent.name == "s1-1.train.0"
    written = durable.write_image(folder, slabs, writer="a")
    assert written.deployment == name and written.progress == (7, 1)
    back = [tmp_path / f"slot-1.rank-{rank}" for rank in range(2)]
    assert durable.read_image(folder, back) == written == durable.read_manifest(folder)
    for old, new in zip(slabs, back, strict=True):
        assert content(new) == content(old) and read_header(new) == read_header(old)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_larger_slab_in_use_is_overwritten_in_place(tmp_path: Path, slabs: list[Path]) -> None:
    folder = durable.folder_of(tmp_path / "durable", "a", (7, 1))
    durable.write_image(folder, slabs, writer="a")
    back = [tmp_path / f"slot-1.rank-{rank}" for rank in range(2)]
    mapped = write(back[0], make_header(4, 900_000), 1)
    inode = back[0].stat().st_ino
    durable.read_image(folder, back)
    assert back[0].stat().st_ino == inode and mapped.current()
    assert content(back[0]) == content(slabs[0])


def test_damage_is_found_and_the_slab_is_not_valid(tmp_path: Path, slabs: list[Path]) -> None:
    folder = durable.folder_of(tmp_path / "durable", "a", (7, 1))
    durable.write_image(folder, slabs, writer="a")
    with (folder / "rank-1.slab").open("r+b") as file:
        file.seek(4096)
        file.write(b"!")
    back = [tmp_path / f"slot-1.rank-{rank}" for rank in range(2)]
    with pytest.raises(BadImage, match=r"rank-1.slab: is damaged"):
        durable.read_image(folder, back)
    for path in back:
        with pytest.raises(BadImage, match="torn"):
            read_header(path)
    os.truncate(folder / "rank-0.slab", 5000)
    with pytest.raises(BadImage, match="is cut off"):
        durable.read_image(folder, back)
    (folder / "rank-0.slab").unlink()
    with pytest.raises(BadImage, match="cannot be read"):
        durable.read_image(folder, back)
    with pytest.raises(BadImage, match="is of 2 ranks, and 1 are to load it"):
        durable.read_image(folder, back[:1])


def another_format(folder: Path) -> None:
    text = (folder / durable.MANIFEST).read_bytes().splitlines()[1]
    text = text.replace(b'"format":1', b'"format":0')
    (folder / durable.MANIFEST).write_bytes(b"%08x\n%s\n" % (crc32c(text), text))


def flip(folder: Path) -> None:
    data = bytearray((folder / durable.MANIFEST).read_bytes())
    data[40] ^= 1
    (folder / durable.MANIFEST).write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (another_format, "has format 0; this release reads format 1"),
        (flip, "does not match its own checksum"),
        (lambda folder: os.truncate(folder / durable.MANIFEST, 30), "its own checksum"),
        (lambda folder: os.truncate(folder / durable.MANIFEST, 0), "its own checksum"),
    ],
)
def test_a_manifest_that_is_not_what_was_written_is_refused(
    tmp_path: Path, slabs: list[Path], harm: Callable[[Path], None], words: str
) -> None:
    folder = durable.folder_of(tmp_path / "durable", "a", (7, 1))
    durable.write_image(folder, slabs, writer="a")
    harm(folder)
    with pytest.raises(BadImage, match=words):
        durable.read_manifest(folder)
    assert durable.slab_bytes(folder, first=0, count=2) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"progress": (6, 0)}, r"rank-1.slab: is of a at 6\.0, rank 1"),
        ({"deployment": "b"}, r"rank-1.slab: is of b at 7\.1"),
        ({"rank": 0}, r"rank-1.slab: is of a at 7\.1, rank 0"),
    ],
)
def test_a_whole_slab_of_another_image_is_refused(
    tmp_path: Path, slabs: list[Path], changes: dict[str, Any], words: str
) -> None:
    """As if two copies had been mixed up while somebody restored a backup."""
    write(slabs[1], replace(read_header(slabs[1]), **changes), 9)
    folder = durable.folder_of(tmp_path / "durable", "a", (7, 1))
    durable.write_image(folder, slabs, writer="a")
    back = [tmp_path / f"slot-1.rank-{rank}" for rank in range(2)]
    with pytest.raises(BadImage, match=words):
        durable.read_image(folder, back)
    for path in back:
        with pytest.raises(BadImage, match="torn"):
            read_header(path)


def test_a_torn_slab_is_not_made_durable(tmp_path: Path, slabs: list[Path]) -> None:
    folder = durable.folder_of(tmp_path / "durable", "a", (7, 1))
    Slab(slabs[1]).write(make_header(*SIZES))
    with pytest.raises(BadImage, match="torn"):
        durable.write_image(folder, slabs, writer="a")
    assert list(folder.parent.iterdir()) == []
    with pytest.raises(BadImage, match="cannot be read"):
        durable.read_manifest(folder)


def test_the_second_writer_of_an_image_changes_nothing(tmp_path: Path, slabs: list[Path]) -> None:
    folder = durable.folder_of(tmp_path / "durable", "a", (7, 1))
    durable.write_image(folder, slabs, writer="a")
    before = (folder / "manifest.json").stat().st_ino
    durable.write_image(folder, slabs, writer="b")
    assert (folder / "manifest.json").stat().st_ino == before


def test_older_images_go_and_in_the_end_all(tmp_path: Path, slabs: list[Path]) -> None:
    root = tmp_path / "durable"
    for progress in ((3, 0), (7, 1), (7, 2)):
        durable.write_image(durable.folder_of(root, "a", progress), slabs, writer="w")
    durable.keep_newest(root, "a", (7, 1))
    assert sorted(path.name for path in durable.home_of(root, "a").iterdir()) == [
        "000000007.0001",
        "000000007.0002",
    ]
    durable.drop_images(root, "a")
    durable.drop_images(root, "a")
    assert not durable.home_of(root, "a").exists()


def test_a_slot_that_is_read_is_not_written(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images", world=1)
    slot = store.begin()
    write(store.paths(slot)[0], make_header(8), 1)
    store.commit(slot, deployment="a", progress=(7, 1))
    store.pin(slot)
    store.drop("a")
    assert store.begin() != slot and store.paths(slot)[0].exists()
    store.unpin(slot)
    assert store.begin() == slot
