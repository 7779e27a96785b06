"""A training engine gives its device memory back and learns on as if nothing had been."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory.swap import SWAP_DIR
from tests.engines.gang import LAYOUTS
from tests.engines.training import CREATE, adam, grpo, rank_spec, supervised, tiny_spec

pytestmark = pytest.mark.engines


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWAP_DIR, str(tmp_path / "swap"))


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_an_engine_that_sleeps_takes_no_memory_and_goes_on_from_its_image(
    tiny_model: ModelSpec, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = DeepSpeedEngine(rank_spec(tiny_model, **options))

    def learn(*, sleeps: bool) -> str:
        engine.create("a", CREATE)
        for seed in range(3):
            engine.forward_backward(supervised(seed, 9, 14))
            engine.forward_backward(grpo(seed, group=3))
            if sleeps:  # in the middle of a step
                engine.save_image(tmp_path / "a", deployment="a", progress=(seed, 0))
                assert engine.sleep().used == 0
                assert engine.wake().used >= awake
                engine.load_image(tmp_path / "a", deployment="a")
            engine.optim_step(adam())
        return engine.digest()

    awake = engine.memory().used
    assert awake >= tiny_model.parameters * (4 + 4 + 8)
    alone = learn(sleeps=False)
    assert learn(sleeps=True) == alone
    engine.sleep()
    with pytest.raises(RuntimeError, match="no deployment is resident"):
        engine.optim_step(adam())
    engine.create("a", CREATE)  # wakes it
    assert learn(sleeps=False) == alone


@pytest.mark.parametrize("options", [{}, {"zero_stage": 3}], ids=["2", "3"])
def test_two_models_take_turns_in_open_steps_and_learn_as_they_do_alone(
    tiny_folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    half = replace(tiny_spec(tiny_folder, "bfloat16"), name="half")
    models = {model.name: model for model in (tiny_spec(tiny_folder), half)}
    calls = [supervised(1, 5, 9), grpo(2, group=4), supervised(3, 12), grpo(4, group=3)]

    def step(engine: DeepSpeedEngine, number: int) -> None:
        engine.forward_backward(calls[number])
        if number % 2:
            engine.optim_step(adam(grad_clip_norm=5.0))

    spec = replace(rank_spec(models["tiny"], **options), models=models)
    engine, alone = DeepSpeedEngine(spec), {}
    for name in models:
        engine.create(name, wire.Create(base_model=name))
        for number in range(len(calls)):
            step(engine, number)
        alone[name] = engine.digest()
    used = engine.memory().used
    for name in models:
        engine.create(name, wire.Create(base_model=name))
        engine.save_image(tmp_path / name, deployment=name, progress=(0, 0))
    skeletons = dict(engine._skeletons)
    for number in range(len(calls)):
        for name in models:
            engine.load_image(tmp_path / name, deployment=name)
            step(engine, number)
            engine.save_image(tmp_path / name, deployment=name, progress=(number, 0))
    for name in models:
        engine.load_image(tmp_path / name, deployment=name)
        assert engine.digest() == alone[name]
    assert engine._skeletons == skeletons  # none was built twice
    assert engine.memory().used <= used
