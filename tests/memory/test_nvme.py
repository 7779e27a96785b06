"""Images on a disk of the node: whole, checked block by block, and refused with a reason."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage, StorageFailed, StorageFull
from plexrl_slurm.filesystems import magic_of, network_kind
from plexrl_slurm.memory import nvme
from plexrl_slurm.memory.slab import Slab, read_header
from tests.memory.test_slab import make_header, write

SIZES = (8, 100_000, 12)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "BLOCK", 8192)


@pytest.fixture
def slabs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"slot-0.rank-{rank}" for rank in range(2)]
    for rank, path in enumerate(paths):
        write(path, make_header(*SIZES), 7 + rank)
    return paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme" / "a" / "000000007.0001"


def content(path: Path) -> list[bytes]:
    slab = Slab(path)
    header = slab.read()
    return [bytes(view) for view in slab.views(header.tensors)]


def back(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"slot-1.rank-{rank}" for rank in range(2)]


def none_is_valid(paths: list[Path]) -> bool:
    for path in paths:
        if path.exists():
            with pytest.raises(BadImage):
                read_header(path)
    return True


def refuse_direct(monkeypatch: pytest.MonkeyPatch, *, late: bool) -> list[int]:
    """A file system without O_DIRECT, or one that says so only when it is written."""
    refused: list[int] = []
    real_open, real_pwrite = os.open, os.pwrite

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and not late:
            refused.append(flags)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *more, **named)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if late and not refused:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    return refused


@pytest.mark.parametrize("how", ["direct", "refused", "refused late"])
def test_an_image_comes_back_as_it_was(
    tmp_path: Path, slabs: list[Path], folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [1] if how == "direct" else refuse_direct(monkeypatch, late=how == "refused late")
    written = nvme.write_image(folder, slabs, owner="o")
    assert refused
    assert (written.deployment, written.progress) == ("a", (7, 1))
    assert len(written.files[0].blocks) > 2 * nvme.DEPTH
    assert nvme.read_image(folder, back(tmp_path), owner="o") == written
    for old, new in zip(slabs, back(tmp_path), strict=True):
        assert content(new) == content(old) and read_header(new) == read_header(old)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_larger_slab_in_use_is_overwritten_in_place(
    tmp_path: Path, slabs: list[Path], folder: Path
) -> None:
    nvme.write_image(folder, slabs, owner="o")
    mapped = write(back(tmp_path)[0], make_header(4, 900_000), 1)
    nvme.read_image(folder, back(tmp_path), owner="o")
    assert mapped.current() and content(back(tmp_path)[0]) == content(slabs[0])


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def older(folder: Path) -> None:
    path = folder / "manifest.json"
    text = path.read_bytes().split(b"\n")[1].replace(b'"format":1', b'"format":0')
    path.write_bytes(b"%08x\n%s\n" % (crc32c(text), text))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "first block": (lambda f: flip(f / "rank-0.slab", 9), r"rank-0.slab: is damaged: block 0 "),
    "last block": (lambda f: flip(f / "rank-1.slab", 106_000), r"rank-1.slab: is damaged: block 1"),
    "cut off": (lambda f: os.truncate(f / "rank-1.slab", 8192), r"rank-1.slab: is cut off: 8192 "),
    "a rank is gone": (lambda f: (f / "rank-1.slab").unlink(), r"rank-1.slab: cannot be read"),
    "manifest": (lambda f: flip(f / "manifest.json", 40), r"manifest.json: is damaged"),
    "torn": (lambda f: (f / "manifest.json").unlink(), r"manifest.json: cannot be read"),
    "empty": (lambda f: os.truncate(f / "manifest.json", 0), r"manifest.json: is "),
    "older": (older, r"manifest.json: has format 0; this release reads format 1"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_no_slab_is_valid(
    tmp_path: Path, slabs: list[Path], folder: Path, name: str
) -> None:
    nvme.write_image(folder, slabs, owner="o")
    damage, sentence = DAMAGE[name]
    damage(folder)
    for rank, path in enumerate(back(tmp_path)):
        write(path, make_header(*SIZES), rank)  # what the slot held before
    with pytest.raises(BadImage, match=sentence):
        nvme.read_image(folder, back(tmp_path), owner="o")
    assert any(not _valid(path) for path in back(tmp_path)) or "manifest" in sentence


def _valid(path: Path) -> bool:
    try:
        read_header(path)
    except BadImage:
        return False
    return True


def test_an_image_of_another_owner_or_gang_is_refused(
    tmp_path: Path, slabs: list[Path], folder: Path
) -> None:
    nvme.write_image(folder, slabs, owner="o")
    with pytest.raises(BadImage, match="another agent's host tier"):
        nvme.read_image(folder, back(tmp_path), owner="p")
    with pytest.raises(BadImage, match="is of 2 ranks, and 1 are to load it"):
        nvme.read_image(folder, back(tmp_path)[:1], owner="o")
    assert none_is_valid(back(tmp_path))


def test_a_torn_slab_is_not_written(slabs: list[Path], folder: Path) -> None:
    Slab(slabs[1]).write(make_header(*SIZES))
    with pytest.raises(BadImage, match="torn"):
        nvme.write_image(folder, slabs, owner="o")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, StorageFailed)]
)
def test_a_disk_that_is_full_or_broken_keeps_what_was_good(
    tmp_path: Path,
    slabs: list[Path],
    folder: Path,
    number: int,
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvme.write_image(folder, slabs, owner="o")
    real, calls = os.pwrite, 0

    def fail(descriptor: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(kind, match=str(tmp_path)):
        nvme.write_image(folder, slabs, owner="o")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    nvme.read_image(folder, back(tmp_path), owner="o")


def test_a_disk_that_does_not_give_back_fails_the_image(
    tmp_path: Path, slabs: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    nvme.write_image(folder, slabs, owner="o")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(BadImage, match=r"rank-0.slab: cannot be read \(Input/output error\)"):
        nvme.read_image(folder, back(tmp_path), owner="o")
    assert none_is_valid(back(tmp_path))


def test_what_the_system_moves_in_small_pieces_is_whole(
    tmp_path: Path, slabs: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: real_write(d, data[:4096], at))
    monkeypatch.setattr(os, "preadv", lambda d, parts, at: real_read(d, [parts[0][:4096]], at))
    nvme.write_image(folder, slabs, owner="o")
    nvme.read_image(folder, back(tmp_path), owner="o")
    assert content(back(tmp_path)[1]) == content(slabs[1])


def test_a_dropped_image_is_gone_and_so_is_a_half_written_one(
    slabs: list[Path], folder: Path
) -> None:
    nvme.write_image(folder, slabs, owner="o")
    shutil.copytree(folder, folder.with_name(f".{folder.name}.part"))
    nvme.drop_image(folder)
    nvme.drop_image(folder)
    assert list(folder.parent.iterdir()) == []


def test_network_file_systems_are_known_by_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert network_kind(tmp_path) == "" == network_kind(tmp_path / "not" / "there")
    assert magic_of(Path("/proc")) == 0x9FA0
    monkeypatch.setattr("plexrl_slurm.filesystems.NETWORK", {0x9FA0: "Proc"})
    assert network_kind(Path("/proc/not-there")) == "Proc"
