"""An image of the tiny model is as large as the sizing says, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.sizes import image_size
from plexrl_slurm.core.zero import layout_of
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory.slab import read_header, used_bytes
from plexrl_slurm.memory.swap import SWAP_DIR
from plexrl_slurm.model_folder import read_model_folder
from tests.engines.gang import LAYOUTS
from tests.engines.training import CREATE, adam, rank_spec, supervised, tiny_spec

pytestmark = pytest.mark.engines


def vectors(folder: Path) -> int:
    """Elements of a model's tensors of one dimension."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    return sum(shape[0] for shape in shapes if len(shape) == 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_with_an_open_step_has_as_many_bytes_as_the_model_folder_promises(
    tiny_model: ModelSpec,
    tmp_path: Path,
    layout: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWAP_DIR, str(tmp_path / "swap"))
    model = tiny_spec(Path(tiny_model.path), dtype)
    engine = DeepSpeedEngine(rank_spec(model, **LAYOUTS[layout]))
    engine.create("a", CREATE)
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: engine.forward_backward(supervised(1, 8)),
        lambda: engine.optim_step(adam()),
        lambda: engine.forward_backward(supervised(2, 8)),
    ]
    for number, step in enumerate(steps):
        step()
        promised, new = engine.slab_bytes("a"), tmp_path / str(number)
        engine.save_image(new, deployment="a", progress=(number, 0))
        assert promised - 4096 <= new.stat().st_size <= promised
    slab = tmp_path / "slab"
    moved = engine.save_image(slab, deployment="a", progress=(3, 0))
    parameters = read_model_folder(Path(model.path), dtype=dtype).parameters
    said = image_size(parameters, dtype=dtype, layout=layout_of(LAYOUTS[layout]), ranks=1)
    header = read_header(slab)
    # Norms and biases are a group of their own, too small to be swapped.
    kept = 12 * vectors(Path(model.path)) if layout == "3-swapped-matrices" else 0
    assert moved == header.bytes == said.total + kept
    # What lies in swap folders is in no image.
    assert (said.total == model.train_bytes) == ("swapped" not in layout)
    # The file has a header of its own, and each tensor begins on a page.
    pages = 4096 * (len(header.tensors) + 2)
    assert said.total <= used_bytes(slab) == slab.stat().st_size <= said.total + kept + pages
