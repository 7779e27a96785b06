"""ZeRO-3 and state in host memory: what differs from ZeRO-1 and 2 on the device."""

from dataclasses import replace
from pathlib import Path

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadImage, StepSkipped
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from tests.engines.gang import LAYOUTS
from tests.engines.training import CREATE, adam, exploding, rank_spec, supervised, tiny_spec

pytestmark = pytest.mark.engines


def train(engine: DeepSpeedEngine, seed: int) -> None:
    engine.forward_backward(supervised(seed, 8))
    engine.optim_step(adam(weight_decay=0.1))


@pytest.mark.parametrize("layout", ["2-optimizer", "3-optimizer-param"])
def test_a_new_optimizer_in_c_goes_on_bit_by_bit(
    tiny_model: ModelSpec, tmp_path: Path, layout: str
) -> None:
    """As after the restart of a rank: nothing may depend on what C++ remembers."""
    spec = rank_spec(tiny_model, **LAYOUTS[layout])
    first = DeepSpeedEngine(spec)
    first.create("a", CREATE)
    for seed in range(6):
        train(first, seed)
    first.forward_backward(supervised(50, 8))
    first.save_image(tmp_path / "slab", deployment="a", progress=(13, 0))
    second = DeepSpeedEngine(spec)
    second.load_image(tmp_path / "slab", deployment="a")
    for engine in (first, second):
        engine.optim_step(adam(weight_decay=0.1))
        train(engine, 7)
    assert first.digest() == second.digest()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("1-optimizer", "bfloat16"), ("3-optimizer-param", "bfloat16"), ("3", "float32")],
)
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_dropped(
    tiny_folder: Path, layout: str, dtype: str
) -> None:
    engine = DeepSpeedEngine(rank_spec(tiny_spec(tiny_folder, dtype), **LAYOUTS[layout]))
    engine.create("a", CREATE)
    train(engine, 1)
    before = engine.digest()
    engine.forward_backward(exploding())
    with pytest.raises(StepSkipped, match="gradient is not finite"):
        engine.optim_step(adam())
    assert engine.digest() == before
    train(engine, 2)
    after = engine.digest()
    engine.create("b", CREATE)
    train(engine, 1)
    train(engine, 2)
    assert engine.digest() == after


def test_two_architectures_take_turns_at_stage_3(tiny_folder: Path, tmp_path: Path) -> None:
    models = [tiny_spec(tiny_folder), replace(tiny_spec(tiny_folder, "bfloat16"), name="half")]
    spec = rank_spec(models[0], **LAYOUTS["3-optimizer-param"])
    engine = DeepSpeedEngine(replace(spec, models={model.name: model for model in models}))
    digests = {}
    for model in models:
        engine.create(model.name, wire.Create(base_model=model.name))
        engine.forward_backward(supervised(1, 10))
        engine.save_image(tmp_path / model.name, deployment=model.name, progress=(2, 0))
        engine.optim_step(adam())
        digests[model.name] = engine.digest()
    for model in models:
        engine.load_image(tmp_path / model.name, deployment=model.name)
        engine.optim_step(adam())
        assert engine.digest() == digests[model.name]


@pytest.mark.parametrize(("there", "here"), [("2", "3"), ("3", "2")])
def test_images_of_another_stage_are_refused(
    tiny_model: ModelSpec, tmp_path: Path, there: str, here: str
) -> None:
    other = DeepSpeedEngine(rank_spec(tiny_model, **LAYOUTS[there]))
    other.create("a", CREATE)
    other.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    engine = DeepSpeedEngine(rank_spec(tiny_model, **LAYOUTS[here]))
    engine.create("a", CREATE)
    with pytest.raises(BadImage, match=f"zero{there}"):
        engine.load_image(tmp_path / "slab", deployment="a")


def test_a_checkpoint_moves_between_host_and_device(tiny_model: ModelSpec, tmp_path: Path) -> None:
    digests: list[str] = []
    for layout in ("3-optimizer-param", "3"):
        engine = DeepSpeedEngine(rank_spec(tiny_model, **LAYOUTS[layout]))
        engine.create("a", CREATE)
        if not digests:
            train(engine, 1)
            engine.save_state(wire.SaveState(path=str(tmp_path / "run"), uri="u"))
        else:
            path = str(tmp_path / "run")
            engine.load_state(wire.LoadState(path=path, uri="u", optimizer=True))
        digests.append(engine.digest())
    assert digests[0] == digests[1]
