"""Model folders that are none: refused in a sentence, without waiting and without a traceback."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.model_folder import config_of, weight_files
from tests.model_folders import make_model_folder

DEEP = "[" * 100_000


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "harm", "sentence"),
    [
        ("config.json", pipe, "is no file"),
        ("config.json", lambda path: path.write_text(DEEP), "is not JSON"),
        ("model.safetensors", pipe, "no weights"),
        ("model.safetensors.index.json", lambda path: path.write_text(DEEP), "no weight_map"),
        (
            "model.safetensors.index.json",
            lambda path: path.write_text('{"weight_map": {"a": 3}}'),
            "no weight_map",
        ),
    ],
)
def test_what_no_model_has_is_refused(
    tmp_path: Path, name: str, harm: Callable[[Path], object], sentence: str
) -> None:
    folder = make_model_folder(tmp_path / "tiny")
    harm(folder / name)
    with pytest.raises(BadInput, match=sentence):
        (config_of(folder), weight_files(folder))
