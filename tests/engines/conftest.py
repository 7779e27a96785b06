"""The tiny model, made once; it needs no download."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from plexrl_slurm.core.catalogue import ModelSpec
from tests.engines.training import tiny_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loadable Hugging Face folder: 2 layers, 312,448 parameters, 64 characters, float32."""
    found = spec_from_file_location("make_models", EXAMPLES / "make_models.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    module.make(folder, "tiny")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> ModelSpec:
    """Its catalogue entry."""
    return tiny_spec(tiny_folder)
