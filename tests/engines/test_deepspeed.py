"""Deployments that take turns in one skeleton learn what they would learn alone, bit by bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadImage, StorageFull
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory.slab import read_header
from tests.engines.gang import LAYOUTS
from tests.engines.training import (
    CREATE,
    PARAMETERS,
    adam,
    assert_close,
    grpo,
    rank_spec,
    supervised,
    tiny_spec,
)

pytestmark = pytest.mark.engines

#: Who runs what between two switches: f(orward_backward), o(ptim_step). Steps stay open.
TURNS = [
    ("a", "ff"),
    ("b", "fo"),
    ("a", "fo"),
    ("b", "ff"),
    ("a", "f"),
    ("b", "fo"),
    ("a", "ffo"),
    ("b", "f"),
    ("a", "fo"),
    ("b", "o"),
]
RATES = {"a": 1e-3, "b": 3e-3}
SEEDS = {"a": 1, "b": 1000}


class Job:
    """Calls of one deployment, and what it was told."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0
        self.told: list[object] = []

    def run(self, engine: DeepSpeedEngine, operations: str) -> None:
        for operation in operations:
            self.calls += 1
            if operation == "f":
                body = supervised(SEEDS[self.name] + self.calls, 5, 9, 20)
                output = engine.forward_backward(body)
                self.told += [output.metrics, [array.data for array in output.logprobs]]
            else:
                rate = RATES[self.name]
                step = adam(learning_rate=rate, grad_clip_norm=1.0, weight_decay=0.1)
                self.told.append(engine.optim_step(step).metrics)


def run_alone(spec: RankSpec, name: str) -> tuple[list[object], str]:
    engine, job = DeepSpeedEngine(spec), Job(name)
    engine.create(name, CREATE)
    for who, operations in TURNS:
        if who == name:
            job.run(engine, operations)
    return job.told, engine.digest()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, dtype) for layout in "123" for dtype in ("float32", "bfloat16")),
        ("3-optimizer-param", "bfloat16"),
    ],
)
def test_multiplexed_learning_is_bit_identical(
    tiny_folder: Path, tmp_path: Path, dtype: str, layout: str
) -> None:
    # Small micro-batches: several backward passes per call.
    spec = rank_spec(tiny_spec(tiny_folder, dtype), max_tokens_per_microbatch=24, **LAYOUTS[layout])
    engine = DeepSpeedEngine(spec)
    jobs = {name: Job(name) for name in RATES}
    for name in jobs:
        engine.create(name, CREATE)
        engine.save_image(tmp_path / name, deployment=name, progress=(1, 0))
    slabs = {name: tmp_path / name for name in (*jobs, "spare")}
    resident = "b"
    for who, operations in TURNS:
        if who != resident:
            moved = engine.swap_images(
                slabs["spare"],
                slabs[who],
                outgoing=resident,
                progress=(jobs[resident].calls, 0),
                incoming=who,
            )
            assert moved == sum(read_header(slabs[name]).bytes for name in ("spare", who))
            slabs[resident], slabs["spare"] = slabs["spare"], slabs[resident]
            resident = who
        jobs[who].run(engine, operations)
    engine.save_image(slabs[resident], deployment=resident, progress=(9, 9))
    for name, job in jobs.items():
        engine.load_image(slabs[name], deployment=name)
        assert (job.told, engine.digest()) == run_alone(spec, name)


def test_who_comes_without_moments_does_not_get_those_of_who_leaves(
    engine: DeepSpeedEngine, tmp_path: Path
) -> None:
    engine.create("fresh", CREATE)
    fresh = engine.digest()
    engine.save_image(tmp_path / "fresh", deployment="fresh", progress=(1, 0))
    engine.create("old", CREATE)
    engine.forward_backward(supervised(1, 10))
    engine.optim_step(adam())
    engine.forward_backward(supervised(2, 10))
    old = engine.digest()
    engine.swap_images(
        tmp_path / "old", tmp_path / "fresh", outgoing="old", progress=(4, 0), incoming="fresh"
    )
    assert engine.digest() == fresh
    engine.load_image(tmp_path / "old", deployment="old")
    assert engine.digest() == old
    engine.optim_step(adam())  # its step is still open


def test_a_swap_with_a_torn_image_leaves_the_other_where_it_is(
    engine: DeepSpeedEngine, tmp_path: Path
) -> None:
    engine.create("a", CREATE)
    before = engine.digest()
    (tmp_path / "torn").write_bytes(b"no image")
    with pytest.raises(BadImage, match="no PlexRL image"):
        engine.swap_images(
            tmp_path / "a", tmp_path / "torn", outgoing="a", progress=(4, 0), incoming="b"
        )
    assert engine.digest() == before
    engine.save_image(tmp_path / "a", deployment="a", progress=(4, 0))


@pytest.fixture(scope="module")
def engine(tiny_model: ModelSpec) -> DeepSpeedEngine:
    return DeepSpeedEngine(rank_spec(tiny_model))


def test_create_forgets_whoever_was_there(engine: DeepSpeedEngine) -> None:
    assert engine.create("a", CREATE) == wire.Created(parameters=PARAMETERS)
    fresh = engine.digest()
    engine.forward_backward(supervised(1, 10))
    engine.optim_step(adam())
    engine.forward_backward(supervised(2, 10))
    assert engine.digest() != fresh
    engine.create("b", CREATE)
    assert engine.digest() == fresh
    first = engine.forward_backward(supervised(1, 10))
    norm = engine.optim_step(adam()).metrics["grad_norm"]
    engine.create("a", CREATE)
    assert engine.forward_backward(supervised(1, 10)) == first
    assert engine.optim_step(adam()).metrics["grad_norm"] == norm


def test_an_image_moves_only_what_there_is(engine: DeepSpeedEngine, tmp_path: Path) -> None:
    engine.create("a", CREATE)
    path = tmp_path / "slab"
    weights = 4 * PARAMETERS
    assert engine.save_image(path, deployment="a", progress=(1, 0)) == 2 * weights
    engine.forward_backward(supervised(1, 10))
    assert engine.save_image(path, deployment="a", progress=(2, 0)) == 3 * weights
    engine.optim_step(adam())
    assert engine.save_image(path, deployment="a", progress=(3, 0)) == 4 * weights
    assert engine.load_image(path, deployment="a") == 4 * weights
    header = read_header(path)
    assert (header.deployment, header.progress, header.bytes) == ("a", (3, 0), 4 * weights)


def test_a_torn_image_is_refused_and_a_whole_one_loads_after_it(
    engine: DeepSpeedEngine, tmp_path: Path
) -> None:
    engine.create("a", CREATE)
    engine.save_image(tmp_path / "whole", deployment="a", progress=(1, 0))
    digest = engine.digest()
    torn = tmp_path / "torn"
    torn.write_bytes((tmp_path / "whole").read_bytes())
    with torn.open("r+b") as file:
        file.seek(24)
        file.write(bytes(8))  # the commit mark
    with pytest.raises(BadImage, match="torn"):
        engine.load_image(torn, deployment="a")
    engine.load_image(tmp_path / "whole", deployment="a")
    assert engine.digest() == digest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(lambda spec: replace(spec, rank=1, world=2), "rank 1 of 2", id="rank"),
        pytest.param(lambda spec: replace(spec, options={"zero_stage": 1}), "zero1", id="stage"),
    ],
)
def test_an_image_of_another_layout_is_refused(
    engine: DeepSpeedEngine,
    tiny_model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[RankSpec], RankSpec],
    reason: str,
) -> None:
    other = change(rank_spec(tiny_model))
    here = DeepSpeedEngine(replace(other, rank=0, world=1))
    here.create("a", CREATE)
    with monkeypatch.context() as patch:
        patch.setattr(here, "_spec", other)
        here.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    with pytest.raises(BadImage, match=reason):
        engine.load_image(tmp_path / "slab", deployment="a")


def test_somebody_elses_image_is_refused(engine: DeepSpeedEngine, tmp_path: Path) -> None:
    engine.create("a", CREATE)
    engine.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    with pytest.raises(BadImage, match="holds a, not b"):
        engine.load_image(tmp_path / "slab", deployment="b")


def test_a_full_host_tier_leaves_the_resident_and_its_old_image(
    engine: DeepSpeedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    engine.create("a", CREATE)
    engine.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    engine.forward_backward(supervised(1, 10))
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(StorageFull):
            engine.save_image(tmp_path / "slab", deployment="a", progress=(2, 0))
    assert read_header(tmp_path / "slab").progress == (1, 0)
    engine.optim_step(adam())


def test_a_skeleton_that_makes_room_gives_its_memory_back(
    tiny_folder: Path, tiny_model: ModelSpec
) -> None:
    half = replace(tiny_spec(tiny_folder, "bfloat16"), name="half")
    engine = DeepSpeedEngine(
        replace(rank_spec(tiny_model), models={"tiny": tiny_model, "half": half})
    )
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 10))
    assert engine._skeleton is not None
    held = [tensor.untyped_storage() for tensor in engine._skeleton.image().values()]
    engine.create("b", wire.Create(base_model="half"))
    assert [storage.nbytes() for storage in held] == [0] * len(held)


def test_several_threads_learn_the_same_every_time(tiny_model: ModelSpec) -> None:
    digests = set()
    engine = DeepSpeedEngine(replace(rank_spec(tiny_model), cores=(0, 1)))
    try:
        for _ in range(4):
            engine.create("a", CREATE)
            for seed in (1, 2):
                engine.forward_backward(grpo(seed, group=24))
                engine.optim_step(adam())
            digests.add(engine.digest())
    finally:
        torch.set_num_threads(1)
    assert len(digests) == 1


def test_two_architectures_take_turns_in_one_process(tiny_folder: Path, tmp_path: Path) -> None:
    models = [tiny_spec(tiny_folder), replace(tiny_spec(tiny_folder, "bfloat16"), name="half")]
    spec = replace(rank_spec(models[0]), models={model.name: model for model in models})
    engine = DeepSpeedEngine(spec)
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


def test_gradients_of_several_calls_are_those_of_one(engine: DeepSpeedEngine) -> None:
    whole = supervised(5, 6, 11, 17, 23)
    engine.create("a", CREATE)
    at_once = engine.forward_backward(whole)
    norm_at_once = engine.optim_step(adam()).metrics["grad_norm"]
    engine.create("a", CREATE)
    parts = [
        engine.forward_backward(
            wire.ForwardBackward(data=whole.data[i : i + 2], loss_fn=whole.loss_fn)
        )
        for i in (0, 2)
    ]
    norm = engine.optim_step(adam()).metrics["grad_norm"]
    assert norm == pytest.approx(norm_at_once, rel=1e-5)
    assert sum(part.metrics["loss:sum"] for part in parts) == pytest.approx(
        at_once.metrics["loss:sum"], rel=1e-6
    )
    found = [array for part in parts for array in part.logprobs]
    for one, other in zip(found, at_once.logprobs, strict=True):
        assert_close(one, other)


def test_forward_only_leaves_no_trace(engine: DeepSpeedEngine, tmp_path: Path) -> None:
    body = supervised(3, 7, 12)
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 10))
    engine.save_image(tmp_path / "before", deployment="a", progress=(1, 0))
    looked = engine.forward_backward(
        wire.ForwardBackward(data=body.data, loss_fn=body.loss_fn, forward_only=True)
    )
    engine.save_image(tmp_path / "after", deployment="a", progress=(1, 0))
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()
    assert engine.forward_backward(body) == looked
