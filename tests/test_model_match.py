"""Weights from outside fit a model of the catalogue, or one sentence says why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.model_folder import config_of, tensors_of
from plexrl_slurm.model_match import check_match
from tests.model_folders import SHAPES, make_model_folder

F32 = {name: ("F32", tuple(shape)) for name, shape in SHAPES.items()}


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        path=str(make_model_folder(tmp_path / "tiny")),
        dtype="float32",
        max_context_length=128,
        vocab_size=64,
        parameters=1032,
        architecture="a",
    )


def test_a_models_own_folder_fits(model: ModelSpec) -> None:
    folder = Path(model.path)
    check_match(config_of(folder), dict(tensors_of(folder)), model)


def test_fields_of_one_side_only_and_those_that_shape_nothing_do_not_matter(
    model: ModelSpec,
) -> None:
    config = {"vocab_size": 64, "transformers_version": "9", "dtype": "bfloat16", "new_field": 1}
    check_match(config, F32, model)


def test_a_tied_head_may_be_there_or_not(model: ModelSpec, tmp_path: Path) -> None:
    tied = make_model_folder(tmp_path / "tied", tie_word_embeddings=True)
    model = replace(model, path=str(tied))
    without = {name: entry for name, entry in F32.items() if name != "lm_head.weight"}
    for tensors in (F32, without):
        check_match({"tie_word_embeddings": True}, tensors, model)


@pytest.mark.parametrize(
    ("config", "tensors", "sentence"),
    [
        ({"hidden_size": 16}, F32, r"hidden_size = 16 and that of model tiny 8"),
        ({}, {"lm_head.weight": ("F32", (64, 8))}, r"lack model.embed_tokens.weight and 1 more"),
        ({}, {**F32, "x.lora_A": ("F32", (1,))}, r"have x.lora_A, which model tiny has not"),
        ({}, {**F32, "model.norm.weight": ("F32", (9,))}, r"shape 9 and model tiny needs 8"),
        ({}, {**F32, "lm_head.weight": ("F32", (8, 64))}, r"shape 8 x 64 .* needs 64 x 8"),
        ({}, {**F32, "model.norm.weight": ("F16", (8,))}, r"is float16 and model tiny is trained"),
        ({}, {**F32, "model.norm.weight": ("F8_E4M3", (8,))}, r"is F8_E4M3 and model tiny"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(
    model: ModelSpec, config: dict[str, Any], tensors: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        check_match(config, tensors, model)
