"""Checkpoints of another number of ranks or ZeRO stage go on as if they had never moved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory import checkpoint
from plexrl_slurm.memory.checkpoint import Manifest
from tests.engines.gang import LAYOUTS
from tests.engines.test_deepspeed_gang import run_gang
from tests.engines.training import CREATE, adam, rank_spec, supervised

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

#: Name of a checkpoint: ranks, layout, and the one it was made of ("": two steps of learning).
MADE: dict[str, tuple[int, str, str]] = {
    "two": (2, "2", ""),
    "three": (2, "3", ""),
    "matrices": (2, "2-matrices", ""),
    "two on 4": (4, "2", "two"),
    "three on 4, stage 1": (4, "1", "three"),
    "two on 4, stage 3": (4, "3-optimizer-param", "two"),
    "two on 1": (1, "2", "two"),
    "three on 1": (1, "3", "three"),
    "matrices on 1": (1, "3", "matrices"),
    "matrices again": (2, "2-matrices", "matrices on 1"),
    "two again from 4": (2, "2", "two on 4"),
    "two again from 1": (2, "2", "two on 1"),
    "two again from 4, stage 3": (2, "2", "two on 4, stage 3"),
    "three again from stage 1": (2, "3", "three on 4, stage 1"),
    "three again from 1": (2, "3", "three on 1"),
}
#: One gang after another: what a gang loads was saved by an earlier one.
GANGS = [
    # DeepSpeed changes torch's linear() for the whole process when it builds stage 3, so that is
    # last where a gang builds several.
    (2, ["two", "matrices", "three"]),
    (4, ["two on 4", "three on 4, stage 1", "two on 4, stage 3"]),
    (1, ["two on 1", "three on 1", "matrices on 1"]),
    (2, [name for name in MADE if " again" in name]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dealing")


@pytest.fixture(scope="module")
def reports(tiny_folder: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each rank said of each checkpoint."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, (world, names) in enumerate(GANGS):
        steps = []
        for name in names:
            _, layout, source = MADE[name]
            load = {"load": str(folder / source)} if source else {}
            steps.append({"layout": layout, "save": str(folder / name), **load})
        (folder / f"steps-{number}.json").write_text(json.dumps(steps))
        ranks = run_gang(
            tiny_folder,
            folder / f"gang-{number}",
            world,
            module="tests.engines.dealing",
            steps=folder / f"steps-{number}.json",
            timeout_s=400,
        )
        for index, name in enumerate(names):
            found[name] = [rank[index] for rank in ranks]  # type: ignore[index]
    return found


@pytest.mark.parametrize("name", [name for name in MADE if MADE[name][2]])
def test_the_weights_are_the_same(
    reports: dict[str, list[dict[str, Any]]], folder: Path, name: str
) -> None:
    assert len(reports[name]) == MADE[name][0]
    weights = [load_file(folder / f"{each}.safetensors") for each in (name.split(" ")[0], name)]
    assert weights[0].keys() == weights[1].keys()
    for key in weights[0]:
        assert torch.equal(weights[0][key], weights[1][key])


@pytest.mark.parametrize("name", [name for name in MADE if " again" in name])
def test_what_comes_back_is_bit_by_bit_what_never_moved(
    reports: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert reports[name] == reports[name.split(" ")[0]]


def test_one_rank_does_with_another_stage_what_it_does_with_its_own(
    tiny_model: ModelSpec, tmp_path: Path
) -> None:
    """Of those that round alike: at ZeRO-3 gradients differ in their last bits."""
    trained = set()
    for layout in ("1", "2"):
        engine = DeepSpeedEngine(rank_spec(tiny_model, **LAYOUTS[layout]))
        engine.create("a", CREATE)
        engine.forward_backward(supervised(1, 8))
        engine.optim_step(adam())
        engine.save_state(wire.SaveState(path=str(tmp_path / layout), uri="u"))
    engine = DeepSpeedEngine(rank_spec(tiny_model, **LAYOUTS["2"]))
    engine.create("b", CREATE)
    for layout in ("1", "2"):
        path = str(tmp_path / layout)
        engine.load_state(wire.LoadState(path=path, uri="u", optimizer=True))
        engine.forward_backward(supervised(2, 8))
        told = engine.optim_step(adam())
        assert told.metrics["step"] == 2.0
        trained.add(engine.digest())
    assert len(trained) == 1


def test_without_its_moments_it_starts_anew(tiny_model: ModelSpec, tmp_path: Path) -> None:
    digests = set()
    for layout in ("2", "3"):
        engine = DeepSpeedEngine(rank_spec(tiny_model, **LAYOUTS[layout]))
        engine.create("a", CREATE)
        if layout == "2":
            engine.forward_backward(supervised(1, 8))
            engine.optim_step(adam())
            engine.save_state(wire.SaveState(path=str(tmp_path / "run"), uri="u"))
        engine.load_state(wire.LoadState(path=str(tmp_path / "run"), uri="u", optimizer=False))
        digests.add(engine.digest())
        engine.forward_backward(supervised(1, 8))
        assert engine.optim_step(adam()).metrics["step"] == 1.0
    assert len(digests) == 1


def test_what_cannot_be_dealt_is_refused_with_both_shapes(
    tiny_model: ModelSpec, tmp_path: Path
) -> None:
    engine = DeepSpeedEngine(rank_spec(tiny_model, **LAYOUTS["3"]))
    engine.create("a", CREATE)
    path = tmp_path / "run"
    engine.save_state(wire.SaveState(path=str(path), uri="u"))
    manifest = checkpoint.read_manifest(path, "u")
    before = engine.digest()
    for harm, reason in (
        ({"groups": (("a",),)}, "it has other parameters"),
        ({"world": 2, "files": manifest.files * 2}, "elements where"),
    ):
        changed = Manifest(**{**_fields(manifest), **harm})
        (path / checkpoint.MANIFEST).write_bytes(checkpoint.encoded(changed))
        sentence = rf"saved by \d ranks at zero_stage 3 and this WPG has 1 at .*{reason}"
        with pytest.raises(BadInput, match=sentence):
            engine.load_state(wire.LoadState(path=str(path), uri="u", optimizer=True))
        assert engine.digest() == before


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}
