"""The format of an image."""

import os
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadImage, StorageFull
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor, read_header


def make_header(*sizes: int, deployment: str = "a") -> SlabHeader:
    return SlabHeader(
        deployment=deployment,
        progress=(7, 1),
        rank=0,
        world=2,
        architecture="tiny",
        tensors=tuple(
            SlabTensor(name=f"t{i}", dtype="float32", shape=(size // 4,), bytes=size)
            for i, size in enumerate(sizes)
        ),
        state={"step": 3},
    )


def write(path: Path, header: SlabHeader, fill: int, slab: Slab | None = None) -> Slab:
    slab = slab or Slab(path)
    placed = slab.write(header)
    for view in slab.views(placed.tensors):
        view[:] = bytes([fill]) * len(view)
    slab.commit()
    return slab


def test_what_was_written_is_read_by_another(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    write(path, make_header(8, 4096, 12), 5)
    reader = Slab(path)
    header = reader.read()
    assert (header.deployment, header.progress, header.rank, header.world) == ("a", (7, 1), 0, 2)
    assert header.bytes == 8 + 4096 + 12
    assert header.state == {"step": 3}
    assert [bytes(view) for view in reader.views(header.tensors)] == [
        bytes([5]) * size for size in (8, 4096, 12)
    ]
    assert read_header(path) == header


def test_a_header_of_many_tensors_does_not_run_into_them(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    write(path, make_header(*[4] * 3000), 255)
    assert len(read_header(path).tensors) == 3000


def test_tensors_are_page_aligned(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    write(path, make_header(4, 4, 5000), 1)
    assert [tensor.offset % 4096 for tensor in read_header(path).tensors] == [0, 0, 0]


def test_a_slab_whose_writer_died_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    slab = write(path, make_header(64), 1)
    slab.write(make_header(64, deployment="b"))
    with pytest.raises(BadImage, match="torn"):
        read_header(path)
    slab.commit()
    assert read_header(path).deployment == "b"


def test_a_header_that_does_not_match_its_mark_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    write(path, make_header(64), 1)
    with path.open("r+b") as file:
        file.seek(40)
        byte = file.read(1)[0]
        file.seek(40)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BadImage, match="torn"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "no PlexRL image", id="empty"),
        pytest.param(b"x" * 100, "no PlexRL image", id="foreign"),
        pytest.param(b"PLEXSLAB\x09" + bytes(99), "format 9", id="of a later release"),
    ],
)
def test_what_is_no_slab_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "slab"
    path.write_bytes(content)
    with pytest.raises(BadImage, match=reason):
        read_header(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="No such file"):
        Slab(tmp_path / "slab").read()


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    write(path, make_header(8192), 1)
    os.truncate(path, 8192)
    with pytest.raises(BadImage, match="cut off"):
        read_header(path)


def test_a_slab_grows_and_is_reused_when_it_could_be_smaller(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    slab = write(path, make_header(4096), 1)
    write(path, make_header(4096, 8192), 2, slab)
    size = path.stat().st_size
    write(path, make_header(4096), 3, slab)
    assert path.stat().st_size == size
    header = Slab(path).read()
    assert header.bytes == 4096


def test_a_mapping_notices_that_its_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    slab = write(path, make_header(64), 1)
    write(tmp_path / "other", make_header(64, deployment="b"), 9)
    (tmp_path / "other").rename(path)
    assert not slab.current()
    header = slab.read()
    assert header.deployment == "b"
    assert bytes(slab.views(header.tensors)[0]) == bytes([9]) * 64


def test_a_full_file_system_is_an_error_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "slab"
    slab = write(path, make_header(64), 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull) as failure:
        slab.write(make_header(1 << 20))
    assert failure.value.needed_bytes > 1 << 20
    assert read_header(path).deployment == "a"
    with pytest.raises(StorageFull):
        Slab(tmp_path / "new").write(make_header(64))
    assert not (tmp_path / "new").exists()
