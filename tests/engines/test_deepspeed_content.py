"""Frozen weights of several deployments are one file; what has learned is its own."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from plexrl_slurm import wire
from plexrl_slurm.core import content
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory import contents
from tests.engines.training import CREATE, adam, rank_spec, supervised

pytestmark = pytest.mark.engines


def publish(engine: DeepSpeedEngine, path: Path, durable: str = "") -> str:
    told = engine.publish(wire.Publish(snapshot=path.stem, path=durable), path)
    assert told.bytes == path.stat().st_size
    return told.content


def test_frozen_weights_are_one_file_whoever_publishes_them(
    tiny_model: ModelSpec, tmp_path: Path
) -> None:
    engine = DeepSpeedEngine(rank_spec(tiny_model))
    names: dict[str, str] = {}
    path = {
        name: tmp_path / f"{name}.safetensors" for name in ("a0", "b0", "a1", "again", "c", "d")
    }
    for deployment in "ab":
        engine.create(deployment, CREATE)
        names[f"{deployment}0"] = publish(engine, path[f"{deployment}0"])
    assert names["a0"] == names["b0"] == content.text(content.of_base("tiny"))
    assert path["a0"].samefile(path["b0"])
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 8))
    assert publish(engine, path["b0"]) == names["b0"]  # an open step changes no weights
    engine.optim_step(adam())
    names["a1"] = publish(engine, path["a1"])
    engine.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    saved = tmp_path / "run"
    engine.save_state(wire.SaveState(path=str(saved), uri="u"))
    engine.create("b", CREATE)
    engine.load_image(tmp_path / "slab", deployment="a")
    names["again"] = publish(engine, path["again"], durable=str(tmp_path / "folder"))
    assert names["again"] == names["a1"] != names["a0"]
    assert path["again"].samefile(path["a1"])
    # The reference policy of two jobs, from one checkpoint.
    for name in "cd":
        engine.create(name, CREATE)
        engine.load_state(wire.LoadState(path=str(saved), uri="u", optimizer=False))
        names[name] = publish(engine, path[name])
    assert names["c"] == names["d"] and path["c"].samefile(path["d"])
    for key, tensor in load_file(path["c"]).items():
        assert tensor.equal(load_file(path["a1"])[key])
        assert tensor.equal(load_file(tmp_path / "folder" / "model.safetensors")[key])
    assert contents.bytes_of(path.values()) == 3 * path["a0"].stat().st_size


def test_two_steps_never_have_one_name(tiny_model: ModelSpec, tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        engine = DeepSpeedEngine(rank_spec(tiny_model))
        engine.create("a", CREATE)
        engine.forward_backward(supervised(1, 8))
        engine.optim_step(adam())
        names.add(publish(engine, tmp_path / "a.safetensors"))
    assert len(names) == 2
