"""A durable image that two nodes write."""

from pathlib import Path

import msgspec
import pytest

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.durable import folder_of, read_image, read_manifest, write_image
from plexrl_slurm.memory.shares import finish, write_share
from plexrl_slurm.memory.slab import read_header
from tests.memory.test_slab import make_header, write


def slabs(folder: Path, *, progress: tuple[int, int] = (7, 1)) -> list[Path]:
    """One of each rank of two."""
    paths = []
    for rank in (0, 1):
        path = folder / f"slab-{progress[0]}-{rank}"
        header = msgspec.structs.replace(make_header(8, 5000), rank=rank, progress=progress)
        write(path, header, 10 + rank)
        paths.append(path)
    return paths


def test_two_nodes_write_what_one_would_have_written(tmp_path: Path) -> None:
    paths = slabs(tmp_path)
    folder, other = folder_of(tmp_path / "d", "a", (7, 1)), folder_of(tmp_path / "e", "a", (7, 1))
    said = [write_share(folder, [path], name="n") for path in reversed(paths)]
    assert not folder.exists(), "not before all have written"
    manifest = finish(folder, said, name="n")
    write_image(other, paths, writer="w")
    assert manifest == read_manifest(folder) == read_manifest(other)
    for file in manifest.files:
        assert (folder / file.name).read_bytes() == (other / file.name).read_bytes()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_each_node_reads_its_own_ranks(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d", "a", (7, 1))
    write_image(folder, slabs(tmp_path), writer="w")
    for rank in (0, 1):
        target = tmp_path / f"read-{rank}"
        read_image(folder, [target], first=rank, world=2)
        assert read_header(target).rank == rank
        assert target.read_bytes() == (tmp_path / f"slab-7-{rank}").read_bytes()
    with pytest.raises(BadImage, match="is of 2 ranks, and 4 are to load it"):
        read_image(folder, [tmp_path / "x"], first=1, world=4)


def test_an_image_that_lacks_a_rank_is_none(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d", "a", (7, 1))
    said = [write_share(folder, [slabs(tmp_path)[1]], name="n")]
    with pytest.raises(BadImage, match="lacks ranks: 1 of 2"):
        finish(folder, said, name="n")
    assert list(folder.parent.iterdir()) == []


def test_shares_of_two_states_are_no_image(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "d", "a", (7, 1))
    older = slabs(tmp_path, progress=(6, 0))
    said = [
        write_share(folder, [slabs(tmp_path)[0]], name="n"),
        write_share(folder, [older[1]], name="n"),
    ]
    with pytest.raises(BadImage, match="several states"):
        finish(folder, said, name="n")
    assert not folder.exists()


def test_a_share_that_never_reached_the_shared_file_system_is_missed(tmp_path: Path) -> None:
    folder, elsewhere = folder_of(tmp_path / "d", "a", (7, 1)), folder_of(tmp_path, "a", (7, 1))
    paths = slabs(tmp_path)
    said = [
        write_share(folder, [paths[0]], name="n"),
        write_share(elsewhere, [paths[1]], name="n"),
    ]
    with pytest.raises(BadImage, match="is state_dir on all nodes"):
        finish(folder, said, name="n")


def test_what_a_node_could_not_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, paths = folder_of(tmp_path / "d", "a", (7, 1)), slabs(tmp_path)
    write_share(folder, [paths[0]], name="n")

    def broken(*_: object) -> durable.RankFile:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "write_rank", broken)
    with pytest.raises(OSError, match="Input/output"):
        write_share(folder, [paths[1]], name="n")
    assert list(folder.parent.iterdir()) == []
