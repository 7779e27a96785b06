"""Options of a training WPG's layout that exclude one another."""

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.zero import layout_of, problem


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "zero2"),
        ({"zero_stage": 1, "offload_optimizer": "cpu"}, "zero1-optimizer"),
        ({"zero_stage": 3, "offload_optimizer": "none"}, "zero3"),
        (
            {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
            "zero3-optimizer-param",
        ),
        ({"zero_stage": 3, "offload_optimizer": "nvme"}, "zero3-swapped"),
        ({"decay_vectors": False}, "zero2-matrices"),
    ],
    ids=str,
)
def test_layouts_whose_images_do_not_fit_have_different_names(
    options: dict[str, object], name: str
) -> None:
    assert problem(options) is None
    assert layout_of(options).name == name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"zero_stage": 0}, "zero_stage: it is 0, and this engine has 1, 2 and 3"),
        ({"offload_optimizer": "disk"}, "offload_optimizer: it is 'disk', .* 'cpu' or 'nvme' or"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer: 'nvme' needs zero_stage 3.*stage 2"),
        ({"zero_stage": 3, "offload_param": "nvme"}, "offload_param: .* tear the only copy"),
        ({"zero_stage": 3, "offload_param": "disk"}, "offload_param: it is 'disk'"),
        ({"offload_param": "cpu"}, "offload_param: it needs zero_stage 3.* at zero_stage 2"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_sentence(
    options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        layout_of(options)
