"""Which files make sampler weights a model folder."""

from pathlib import Path

import pytest

from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.memory.checkpoint import MANIFEST
from plexrl_slurm.memory.saved import model_files
from tests.model_folders import make_model_folder


def names(folder: Path, catalogue: Path | None) -> list[str]:
    return [file.name for file in model_files(folder, catalogue, "u")]


def test_config_and_tokenizer_come_from_the_catalogue_where_the_weights_have_none(
    tmp_path: Path,
) -> None:
    catalogue, folder = make_model_folder(tmp_path / "tiny"), tmp_path / "saved"
    (catalogue / "pytorch_model.bin").write_bytes(b"old")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"new")
    (folder / MANIFEST).write_text("{}")
    assert names(folder, catalogue) == ["config.json", "model.safetensors", "tokenizer.json"]
    found = {file.name: file.path.parent for file in model_files(folder, catalogue, "u")}
    assert found["model.safetensors"] == folder and found["config.json"] == catalogue
    assert names(folder, None) == ["model.safetensors"]


def test_weights_with_a_config_of_their_own_take_nothing_from_the_catalogue(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes(b"{}")
    assert names(folder, make_model_folder(tmp_path / "tiny")) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("there", [True, False], ids=["empty", "gone"])
def test_a_folder_without_weights_is_no_model(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "saved"
    if there:
        folder.mkdir()
    with pytest.raises(NotFound):
        model_files(folder, make_model_folder(tmp_path / "tiny"), "u")
