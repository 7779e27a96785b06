"""Swap folders: versions are whole, kept while an image may name them, and never written again."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from plexrl_slurm.core.errors import BadImage, StorageFull
from plexrl_slurm.memory import durable, swap, swap_manifest
from plexrl_slurm.memory.slab import Slab
from tests.memory.test_slab import make_header

SIZES = {"master.0.swp": 4096, "exp_avg.0.swp": 8192}


def folder_in(tmp_path: Path) -> swap.SwapFolder:
    return swap.SwapFolder(swap.home_of(tmp_path, "train-0", "s1-1:train:0"), rank=0, world=1)


def step(folder: swap.SwapFolder, mark: bytes) -> int:
    place = folder.begin(SIZES)
    for name in SIZES:
        with (place / name).open("r+b") as file:
            file.write(mark)
    folder.commit()
    return folder.current


def mark_of(folder: swap.SwapFolder, version: int) -> set[bytes]:
    return {(folder.path(version) / name).read_bytes()[:1] for name in SIZES}


def test_a_named_version_stays_and_others_are_written_again(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    step(folder, b"1")
    folder.saved()
    first = folder.current
    inodes = set()
    for mark in b"23456":
        version = step(folder, bytes([mark]))
        inodes.add((folder.path(version) / "master.0.swp").stat().st_ino)
    assert mark_of(folder, first) == {b"1"}
    assert mark_of(folder, folder.current) == {b"6"}
    assert len(inodes) == 2  # by turns
    assert len(list(folder.path(first).parent.iterdir())) == 3


def test_the_last_two_images_may_be_the_newest_one(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    named = []
    for mark in b"123":
        named.append(step(folder, bytes([mark])))
        folder.saved()
        folder.saved()  # an image of the same version
    step(folder, b"4")
    step(folder, b"5")
    assert not folder.path(named[0]).exists()
    assert [mark_of(folder, version) for version in named[1:]] == [{b"2"}, {b"3"}]


def test_a_new_process_goes_back_to_what_its_image_names(tmp_path: Path) -> None:
    dead = folder_in(tmp_path)
    step(dead, b"1")
    dead.saved()
    named = dead.current
    step(dead, b"2")
    dead.begin(SIZES)
    dead.close()
    folder = folder_in(tmp_path)
    folder.load(named, SIZES)
    assert folder.current == named
    later = step(folder, b"3")
    step(folder, b"4")
    assert later > dead.current
    assert mark_of(folder, named) == {b"1"}
    assert len(list(folder.path(named).parent.iterdir())) <= 3


@pytest.mark.parametrize("harm", ["gone", "short"])
def test_a_version_that_is_not_whole_is_refused(tmp_path: Path, harm: str) -> None:
    folder = folder_in(tmp_path)
    version = step(folder, b"1")
    file = folder.path(version) / "exp_avg.0.swp"
    if harm == "gone":
        file.unlink()
    else:
        os.truncate(file, 512)
    with pytest.raises(BadImage, match=r"exp_avg\.0\.swp"):
        folder.load(version, SIZES)


def test_a_full_disk_leaves_the_state_in_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_in(tmp_path)
    version = step(folder, b"1")

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull):
        folder.begin(SIZES)
    assert folder.current == version and mark_of(folder, version) == {b"1"}
    assert [path.name for path in folder.path(version).parent.iterdir()] == [str(version)]


def test_a_folder_in_use_is_not_taken_away(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    home = swap.home_of(tmp_path, "train-0", "s1-1:train:0")
    version = step(folder, b"1")
    assert not swap.set_aside(home, tmp_path / "gone")
    assert mark_of(folder, version) == {b"1"}
    folder.close()
    assert swap.set_aside(home, tmp_path / "gone")
    assert not home.exists() and (tmp_path / "gone").exists()
    assert swap.set_aside(home, tmp_path / "gone")  # it is not there: nothing to do
    size = sum(SIZES.values()) + swap_manifest.room_for(len(SIZES))
    assert swap.used_bytes(tmp_path / "gone") == size


def test_who_opens_a_folder_while_it_is_taken_away_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_in(tmp_path).close()
    home = swap.home_of(tmp_path, "train-0", "s1-1:train:0")
    lock = fcntl.flock
    taken: list[int] = []

    def taken_first(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(1)
            home.rename(tmp_path / "gone")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", taken_first)
    folder = folder_in(tmp_path)
    assert mark_of(folder, step(folder, b"1")) == {b"1"}
    assert home.is_dir()


# ---- durable -------------------------------------------------------------------------------------


def image_in(tmp_path: Path, node: str) -> tuple[Path, Path, int]:
    """A slab, its swap folder, and the version that it names."""
    home = tmp_path / node / "a"
    folder = swap.SwapFolder(home, rank=0, world=1)
    version = step(folder, b"1")
    slab = Slab(tmp_path / f"{node}.slab")
    slab.write(msgspec.structs.replace(make_header(8), state={swap.VERSION: version}))
    slab.commit()
    return tmp_path / f"{node}.slab", home, version


def test_a_durable_image_has_the_swap_folder_too(tmp_path: Path) -> None:
    slab, home, version = image_in(tmp_path, "one")
    manifest = durable.write_image(tmp_path / "durable" / "a" / "1", [slab], writer="w", swap=home)
    swapped = sum(SIZES.values()) + swap_manifest.room_for(len(SIZES))
    assert manifest.bytes == manifest.files[0].bytes + swapped
    other = tmp_path / "two" / "a"
    durable.read_image(tmp_path / "durable" / "a" / "1", [tmp_path / "back"], swap=other)
    back = swap.SwapFolder(other, rank=0, world=1)
    back.load(version, SIZES)
    assert mark_of(back, version) == {b"1"}
    assert (tmp_path / "back").read_bytes()[: slab.stat().st_size] == slab.read_bytes()


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda path: path.write_bytes(b"!" * path.stat().st_size)]
)
def test_a_durable_image_replaces_a_version_that_the_disk_damaged(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    slab, home, version = image_in(tmp_path, "one")
    folder = tmp_path / "durable" / "a" / "1"
    durable.write_image(folder, [slab], writer="w", swap=home)
    place = swap.rank_folder(home, 0, 1) / str(version)
    harm(place / "master.0.swp")
    durable.read_image(folder, [tmp_path / "back"], swap=home)
    back = swap.SwapFolder(home, rank=0, world=1)
    back.load(version, SIZES)
    assert mark_of(back, version) == {b"1"}
    assert [path.name for path in place.parent.iterdir()] == [str(version)]


def test_a_durable_image_whose_swap_file_is_damaged_is_refused(tmp_path: Path) -> None:
    slab, home, version = image_in(tmp_path, "one")
    folder = tmp_path / "durable" / "a" / "1"
    durable.write_image(folder, [slab], writer="w", swap=home)
    with (folder / "rank-0.swap" / "exp_avg.0.swp").open("r+b") as file:
        file.write(b"!")
    other = tmp_path / "two" / "a"
    with pytest.raises(BadImage, match=r"exp_avg\.0\.swp: is damaged"):
        durable.read_image(folder, [tmp_path / "back"], swap=other)
    with pytest.raises(BadImage, match="torn"):
        Slab(tmp_path / "back").read()
    assert not (swap.rank_folder(other, 0, 1) / str(version)).exists()


def test_a_swap_folder_needs_a_disk_on_both_nodes(tmp_path: Path) -> None:
    slab, home, _ = image_in(tmp_path, "one")
    folder = tmp_path / "durable" / "a" / "1"
    with pytest.raises(BadImage, match="this node has none"):
        durable.write_image(folder, [slab], writer="w")
    durable.write_image(folder, [slab], writer="w", swap=home)
    with pytest.raises(BadImage, match="this node has none"):
        durable.read_image(folder, [tmp_path / "back"])


def test_a_version_that_lacks_files_is_no_image(tmp_path: Path) -> None:
    home = tmp_path / "a"
    used = swap.SwapFolder(home, rank=0, world=1)
    place = used.begin({"master.0.swp": 4096, "exp_avg.0.swp": 4096})
    used.commit()
    state = {swap.VERSION: used.current, swap.FILES: 2}
    swap.check_version(home, rank=0, world=1, state=state)
    (place / "master.0.swp").unlink()
    with pytest.raises(BadImage, match="has 1 of 2 files"):
        swap.check_version(home, rank=0, world=1, state=state)
    used.close()


# ---- checksums -----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def swapped_by(writer: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The home and one version of it, which a rank of an agent wrote."""
    patch.setenv(swap_manifest.SWAP_WRITER, writer)
    folder = folder_in(tmp_path)
    version = step(folder, b"1")
    folder.close()
    return folder.path(version).parents[1], folder.path(version)


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["master.0.swp", "exp_avg.0.swp", swap_manifest.MANIFEST])
def test_another_agents_version_is_read_before_it_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None], name: str
) -> None:
    home, version = swapped_by("an earlier agent", tmp_path, monkeypatch)
    swap_manifest.Trust().check(home, version)
    harm(version / name)
    with pytest.raises(BadImage, match=name):
        swap_manifest.Trust().check(home, version)


def test_what_an_agents_own_ranks_wrote_is_read_only_when_it_came_back_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = swap_manifest.Trust()
    home, version = swapped_by(trust.writer, tmp_path, monkeypatch)
    read: list[Path] = []
    crc_of = swap_manifest.crc_of

    def counted(path: Path) -> int:
        read.append(path)
        return crc_of(path)

    monkeypatch.setattr(swap_manifest, "crc_of", counted)
    trust.check(home, version)
    trust.settle(home)
    assert not read
    trust.doubt(home)
    trust.check(home, version)
    trust.settle(home)
    trust.check(home, version)
    assert sorted(path.name for path in read) == sorted(SIZES)
    trust.doubt(home)
    flip(version / "master.0.swp")
    for _ in range(2):  # until a good one takes its place
        with pytest.raises(BadImage, match="master"):
            trust.check(home, version)


def test_a_version_that_nobody_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_in(tmp_path)
    for mark in b"12":  # the third takes the place of the first
        step(folder, bytes([mark]))
    place = folder.begin(SIZES)
    with pytest.raises(BadImage, match="does not match its own checksum"):
        swap_manifest.read(place)


def test_checksums_that_are_known_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_in(tmp_path)
    place = folder.begin(SIZES)
    known = {name: swap_manifest.crc_of(place / name) for name in SIZES}
    monkeypatch.setattr(swap_manifest, "crc_of", Path.unlink)
    folder.commit(known)
    assert {n: f.crc32c for n, f in swap_manifest.read(place).files.items()} == known


def test_the_room_for_a_manifest_is_enough(tmp_path: Path) -> None:
    for count in (1, 3, 40, 3000):
        names = [f"exp_avg_sq.{number}.swp" for number in range(count)]
        swap_manifest.reserve(tmp_path, count)
        largest = dict.fromkeys(names, (1 << 40)), dict.fromkeys(names, (1 << 32) - 1)
        swap_manifest.write(tmp_path, *largest)
        assert (tmp_path / swap_manifest.MANIFEST).stat().st_size == swap_manifest.room_for(count)


def test_a_damaged_version_gets_no_durable_copy(tmp_path: Path) -> None:
    slab, home, version = image_in(tmp_path, "one")
    flip(swap.rank_folder(home, 0, 1) / str(version) / "exp_avg.0.swp")
    with pytest.raises(BadImage, match=r"exp_avg\.0\.swp: is damaged"):
        durable.write_image(tmp_path / "durable" / "a" / "1", [slab], writer="w", swap=home)
    assert not (tmp_path / "durable" / "a" / "1").exists()
