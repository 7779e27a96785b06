"""Checkpoint folders."""

import hashlib
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.memory import checkpoint
from plexrl_slurm.memory.checkpoint import Manifest, RankFile

URI = "tinker://run/weights/one"


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def make_checkpoint(path: Path, content: bytes = b"state") -> Manifest:
    part = checkpoint.begin(path)
    name = checkpoint.rank_file(0)
    (part / name).write_bytes(content)
    manifest = Manifest(
        uri=URI,
        architecture="tiny",
        world=1,
        dtype="float32",
        step=4,
        files=(
            RankFile(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()),
        ),
    )
    checkpoint.finish(path, manifest)
    return manifest


def test_a_finished_checkpoint_is_read_back(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path / "run" / "one")
    assert checkpoint.read_manifest(tmp_path / "run" / "one", URI) == manifest
    assert manifest.bytes == 5
    checkpoint.check_file(tmp_path / "run" / "one", manifest.files[0], URI)
    assert names(tmp_path / "run") == ["one"]


def test_an_unfinished_checkpoint_has_no_name(tmp_path: Path) -> None:
    checkpoint.begin(tmp_path / "one")
    with pytest.raises(BadInput, match=f"{URI}: there is no checkpoint"):
        checkpoint.read_manifest(tmp_path / "one", URI)
    checkpoint.abandon(tmp_path / "one")
    assert names(tmp_path) == []


def test_a_new_checkpoint_replaces_the_old_one_of_its_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one")
    manifest = make_checkpoint(tmp_path / "one", b"newer state")
    assert checkpoint.read_manifest(tmp_path / "one", URI) == manifest
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        pytest.param(lambda file: file.write_bytes(b"stats"), "damaged", id="changed"),
        pytest.param(lambda file: file.unlink(), "missing", id="missing"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: object, sentence: str) -> None:
    assert callable(damage)
    manifest = make_checkpoint(tmp_path / "one")
    damage(tmp_path / "one" / manifest.files[0].name)
    with pytest.raises(BadInput, match=f"rank-00000.safetensors is {sentence}"):
        checkpoint.check_file(tmp_path / "one", manifest.files[0], URI)


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / checkpoint.MANIFEST).write_text("{}")
    with pytest.raises(BadInput, match="manifest cannot be read"):
        checkpoint.read_manifest(tmp_path, URI)
