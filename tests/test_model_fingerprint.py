"""A model's folder that changes is noticed."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.model_fingerprint import check_config, check_weights, fingerprint
from plexrl_slurm.model_folder import read_model_folder
from tests.model_folders import make_hollow_folder, make_model_folder


def spec_of(folder: Path) -> ModelSpec:
    facts = read_model_folder(folder)
    return ModelSpec(
        name="tiny",
        path=str(folder),
        dtype=facts.dtype,
        max_context_length=128,
        vocab_size=facts.vocab_size,
        parameters=facts.parameters,
        architecture=facts.architecture,
    )


def harm(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x07")


def test_other_weights_are_noticed_and_a_copy_of_the_same_is_not(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "tiny")
    model, before = spec_of(folder), fingerprint(folder)
    check_weights(model, before)
    shutil.copytree(folder, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    check_weights(replace(model, path=str(tmp_path / "copy")), before)
    check_weights(model, "")
    harm(folder / "model.safetensors", -1 % (folder / "model.safetensors").stat().st_size)
    with pytest.raises(BadInput, match=r"weights of model tiny .* were changed since"):
        check_weights(model, before)


def test_of_large_weights_all_regions_are_looked_at(tmp_path: Path) -> None:
    folder = make_hollow_folder(tmp_path / "large", parameters=100 << 20)
    path = folder / "model.safetensors"
    seen = {fingerprint(folder)}
    size = path.stat().st_size
    for at in (4096, size // 2, size - 1):
        with path.open("r+b") as file:
            file.seek(max(0, at - (2 << 20)))
            file.write(os.urandom(4 << 20)[: size - file.tell()])
        seen.add(fingerprint(folder))
    assert len(seen) == 4


def test_a_folder_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert fingerprint(tmp_path / "nowhere") == ""


def test_a_config_that_computes_something_else_is_noticed(tmp_path: Path) -> None:
    model = spec_of(make_model_folder(tmp_path / "tiny"))
    check_config(model)
    make_model_folder(tmp_path / "tiny", transformers_version="99", use_cache=False)
    check_config(model)
    make_model_folder(tmp_path / "tiny", rope_theta=5.0)
    with pytest.raises(BadInput, match=r"config.json of model tiny .* was changed since"):
        check_config(model)
