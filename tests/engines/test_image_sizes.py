"""An image of the tiny model is as large as the sizing says, byte for byte."""

from pathlib import Path

import pytest

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.sizes import image_size
from plexrl_slurm.core.zero import layout_of
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory.slab import read_header, used_bytes
from plexrl_slurm.model_folder import read_model_folder
from tests.engines.gang import LAYOUTS
from tests.engines.training import CREATE, adam, rank_spec, supervised, tiny_spec

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_with_an_open_step_has_as_many_bytes_as_the_model_folder_promises(
    tiny_model: ModelSpec, tmp_path: Path, layout: str, dtype: str
) -> None:
    model = tiny_spec(Path(tiny_model.path), dtype)
    engine = DeepSpeedEngine(rank_spec(model, **LAYOUTS[layout]))
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 8))
    engine.optim_step(adam())
    engine.forward_backward(supervised(2, 8))
    slab = tmp_path / "slab"
    moved = engine.save_image(slab, deployment="a", progress=(3, 0))
    parameters = read_model_folder(Path(model.path), dtype=dtype).parameters
    said = image_size(parameters, dtype=dtype, layout=layout_of(LAYOUTS[layout]), ranks=1)
    header = read_header(slab)
    assert moved == header.bytes == said.total == model.train_bytes
    # The file has a header of its own, and each tensor begins on a page.
    pages = 4096 * (len(header.tensors) + 2)
    assert said.total <= used_bytes(slab) == slab.stat().st_size <= said.total + pages
