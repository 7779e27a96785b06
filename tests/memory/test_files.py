"""Files and folders that are complete or not there."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from plexrl_slurm.core.errors import StorageFull
from plexrl_slurm.memory.files import NamedBuffer, publish_folder, write_tensors


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def make_buffer(
    name: str, array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
) -> NamedBuffer:
    return NamedBuffer(
        name=name, dtype="float32", shape=array.shape, data=memoryview(array.tobytes())
    )


@pytest.mark.engines
def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    from safetensors import safe_open

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = tmp_path / "w.safetensors"
    written = write_tensors(
        path, [make_buffer("a", values), make_buffer("b", values * 2)], durable=True, checksum=True
    )
    with safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert np.array_equal(file.get_tensor("b"), values * 2)
    content = path.read_bytes()
    assert written.bytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert names(tmp_path) == ["w.safetensors"]


def test_a_full_disk_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFull):
        write_tensors(path, [make_buffer("a", np.zeros((2,), np.float32))], durable=False)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["w.safetensors"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_gets_its_name_whole(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "old").touch()
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "new").touch()
    publish_folder(tmp_path / "part", tmp_path / "c")
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == ["new"]


def test_a_folder_is_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoExchange:
        def renameat2(self, *args: object) -> int:
            return -1

    monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: NoExchange())
    for name in ("c", "part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    publish_folder(tmp_path / "part", tmp_path / "c")
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == ["part"]
