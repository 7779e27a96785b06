"""Checkpoint folders."""

import fcntl
import hashlib
from pathlib import Path

import msgspec
import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.memory import checkpoint, claims
from plexrl_slurm.memory.checkpoint import Manifest, RankFile
from plexrl_slurm.memory.files import WRITER

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


def test_a_checkpoint_of_another_format_is_refused_with_both(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "one")
    newer = msgspec.structs.replace(made, format=2)
    (tmp_path / "one" / checkpoint.MANIFEST).write_bytes(checkpoint.encoded(newer))
    with pytest.raises(BadInput, match="has format 2; this release reads 1"):
        checkpoint.read_manifest(tmp_path / "one", URI)


# ---- two writers -------------------------------------------------------------------------------


def begun(path: Path, writer: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """``writer`` has filled its folder, and not published it."""
    monkeypatch.setenv(WRITER, writer)
    part = checkpoint.begin(path)
    (part / "rank-00000.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    file = RankFile(name="rank-00000.safetensors", bytes=len(content), sha256=digest)
    return Manifest(uri=URI, architecture="a", world=1, dtype="float32", step=1, files=(file,))


def finish(path: Path, writer: str, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRITER, writer)
    try:
        checkpoint.finish(path, manifest)
    finally:
        checkpoint.abandon(path)


def test_a_rank_of_an_earlier_start_never_replaces_what_a_later_one_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    old = begun(path, "agent.5.1", b"old", monkeypatch)
    new = begun(path, "agent.5.2", b"newer", monkeypatch)
    finish(path, "agent.5.2", new, monkeypatch)
    with pytest.raises(BadInput, match="by another gang since this one began"):
        finish(path, "agent.5.1", old, monkeypatch)
    assert checkpoint.read_manifest(path, URI) == new
    assert (path / "rank-00000.safetensors").read_bytes() == b"newer"
    assert names(tmp_path) == ["one"]


def test_a_rank_of_an_earlier_start_does_not_come_before_the_later_one_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    old = begun(path, "agent.5.1", b"old", monkeypatch)
    new = begun(path, "agent.5.2", b"newer", monkeypatch)
    with pytest.raises(BadInput, match="by another gang since this one began"):
        finish(path, "agent.5.1", old, monkeypatch)
    assert not path.exists()
    finish(path, "agent.5.2", new, monkeypatch)
    assert checkpoint.read_manifest(path, URI) == new
    assert names(tmp_path) == ["one"]


def test_what_a_dead_rank_left_goes_when_its_successor_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    begun(path, "agent.5.1", b"old", monkeypatch)
    finish(path, "agent.5.2", begun(path, "agent.5.2", b"new", monkeypatch), monkeypatch)
    assert names(tmp_path) == ["one"]


def test_one_that_gave_up_lets_the_next_one_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    begun(path, "agent.5.1", b"old", monkeypatch)
    checkpoint.abandon(path)
    assert names(tmp_path) == []
    finish(path, "agent.5.2", begun(path, "agent.5.2", b"new", monkeypatch), monkeypatch)
    assert names(tmp_path) == ["one"]


def test_one_that_hangs_with_the_lock_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one"
    monkeypatch.setattr(claims, "PATIENCE_S", 0.1)
    old = begun(path, "agent.5.1", b"old", monkeypatch)
    with (tmp_path / ".one.owner").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        new = begun(path, "agent.5.2", b"newer", monkeypatch)
        finish(path, "agent.5.2", new, monkeypatch)
    with pytest.raises(BadInput, match="another gang"):
        finish(path, "agent.5.1", old, monkeypatch)
    assert checkpoint.read_manifest(path, URI) == new
