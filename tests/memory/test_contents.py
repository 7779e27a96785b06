"""Equal weights are one file, counted once, and gone with their last name."""

import errno
import os
from pathlib import Path

import pytest

from plexrl_slurm.core import content
from plexrl_slurm.memory import contents


def test_equal_weights_are_one_file_counted_once(tmp_path: Path) -> None:
    first, second = tmp_path / "a.v1.safetensors", tmp_path / "b.v1.safetensors"
    weights = content.of_base("tiny")
    assert not contents.link(first, weights)
    first.write_bytes(b"12345678")
    contents.remember(first, weights)
    contents.remember(first, weights)
    assert contents.link(second, weights)
    assert contents.link(second, weights)
    assert second.read_bytes() == b"12345678" and second.samefile(first)
    assert contents.bytes_of([first, second, tmp_path / "gone"]) == 8
    assert not contents.link(tmp_path / "c.safetensors", content.of_base("other"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [contents.FOLDER, first.name, second.name]


def test_a_file_goes_with_its_last_name(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    weights = content.of_step("x")
    paths[0].write_bytes(b"1")
    contents.remember(paths[0], weights)
    contents.link(paths[1], weights)
    paths[0].unlink()
    contents.forget(tmp_path)
    assert contents.link(paths[0], weights)
    for path in paths:
        path.unlink()
    contents.forget(tmp_path)
    assert not contents.link(paths[0], weights)
    assert not list((tmp_path / contents.FOLDER).iterdir())


def test_a_file_system_without_links_costs_only_the_sharing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"1")
    contents.remember(path, 1)
    assert not contents.link(path, 1)
    assert path.read_bytes() == b"1"


def test_names_of_contents_differ_by_what_they_are_of() -> None:
    numbers = [content.of_base("a"), content.of_files("a"), content.of_step("a")]
    assert len(set(numbers)) == 3 and max(numbers) < 2**56
    assert content.of_base("a") == numbers[0] != content.of_base("a", "another fingerprint")
    assert content.text(255) == "weights 000000000000ff"
