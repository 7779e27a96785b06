"""Two and four ranks learn what one learns; a fresh process goes on where another one stopped."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.sizes import WIDTHS, image_size
from plexrl_slurm.core.zero import layout_of
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory.slab import read_header
from tests.engines.gang import LAYOUTS, PROGRAMS, SMALLEST_SWAPPED
from tests.engines.training import CREATE, PARAMETERS, adam, rank_spec, supervised

pytestmark = [pytest.mark.engines, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_gang(
    model: Path,
    out: Path,
    world: int,
    *,
    module: str = "tests.engines.gang",
    steps: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    codes: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """What each rank reports; none where one ends with another code than 0, as ``codes`` say."""
    wanted = list(codes or [0] * world)
    out.mkdir()
    if steps is not None:
        shutil.copy(steps, out / "steps.json")
    port = str(free_port())
    arguments = [sys.executable, "-m", module, str(model), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = []
    for rank in range(world):
        with (out / f"log.{rank}").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [*arguments, str(rank), str(world), port],
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                )
            )
    try:
        found = [process.wait(timeout_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join((out / f"log.{rank}").read_text()[-3000:] for rank in range(world))
    assert found == wanted, logs
    if any(wanted):
        return []
    return [json.loads((out / f"report.{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gangs")


@pytest.fixture(scope="module")
def one(tiny_folder: Path, folder: Path) -> dict[str, Any]:
    return run_gang(tiny_folder, folder / "one", 1)[0]


@pytest.fixture(scope="module")
def two(tiny_folder: Path, folder: Path) -> list[dict[str, Any]]:
    return run_gang(tiny_folder, folder / "two", 2)


@pytest.fixture(scope="module")
def four(tiny_folder: Path, folder: Path) -> list[dict[str, Any]]:
    return run_gang(tiny_folder, folder / "four", 4)


@pytest.fixture
def gang(request: pytest.FixtureRequest, world: int) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = request.getfixturevalue({2: "two", 4: "four"}[world])
    return ranks


CASES = [pytest.param(n, name, id=f"{n} ranks-{name}") for n in (2, 4) for name in PROGRAMS[n]]
FLOAT32 = [case for case in CASES if "float32" in str(case.id)]
every_case = pytest.mark.parametrize(("world", "layout"), CASES)


@every_case
def test_all_ranks_tell_the_same(gang: list[dict[str, Any]], layout: str) -> None:
    for what in ("logprobs", "metrics", "saved_bytes", "bad"):
        for other in gang[1:]:
            assert other[layout][what] == gang[0][layout][what]


@pytest.mark.parametrize(("world", "layout"), FLOAT32)
def test_several_ranks_learn_what_one_learns(
    one: dict[str, Any], gang: list[dict[str, Any]], folder: Path, world: int, layout: str
) -> None:
    alone, together = one[layout], gang[0][layout]
    for wanted, found in zip(alone["metrics"], together["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for wanted, found in zip(alone["logprobs"], together["logprobs"], strict=True):
        for row, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(torch.tensor(other), torch.tensor(row), atol=1e-5, rtol=0.0)
    names = ("one", {2: "two", 4: "four"}[world])
    weights = [load_file(folder / name / layout / "weights.safetensors") for name in names]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("layout", [name for name in PROGRAMS[1] if not name.startswith("2-float")])
def test_all_layouts_learn_the_same(one: dict[str, Any], folder: Path, layout: str) -> None:
    for wanted, found in zip(one["2-float32"]["metrics"], one[layout]["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    weights = [
        load_file(folder / "one" / name / "weights.safetensors") for name in ("2-float32", layout)
    ]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("layout", PROGRAMS[1])
def test_one_rank_multiplexes_bit_identically(one: dict[str, Any], layout: str) -> None:
    assert one[layout]["by_turns"] == one[layout]["digest"]


@pytest.mark.parametrize("layout", [name for name in PROGRAMS[2] if "bfloat16" in name])
def test_two_ranks_learn_nearly_what_one_learns_in_bf16(
    one: dict[str, Any], two: list[dict[str, Any]], layout: str
) -> None:
    exact = one[layout.replace("bfloat16", "float32")]["metrics"]
    for wanted, found in zip(exact, two[0][layout]["metrics"], strict=True):
        for key in ("loss:sum", "grad_norm"):
            if key in wanted:
                assert found[key] == pytest.approx(wanted[key], rel=0.05, abs=0.2)


@every_case
def test_a_gang_multiplexes_bit_identically(gang: list[dict[str, Any]], layout: str) -> None:
    for rank in gang:
        assert rank[layout]["by_turns"] == rank[layout]["digest"]


@every_case
def test_a_gang_restores_its_checkpoint(gang: list[dict[str, Any]], layout: str) -> None:
    for rank in gang:
        assert rank[layout]["restored"] == rank[layout]["digest"]


@every_case
def test_what_overflows_on_one_rank_fails_on_all_and_changes_nothing(
    gang: list[dict[str, Any]], layout: str
) -> None:
    for rank in gang:
        assert "is not finite" in rank[layout]["bad"]
        assert rank[layout]["unchanged"] is True


def test_an_image_of_another_process_goes_on_as_if_nothing_had_happened(
    tiny_folder: Path, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    """A rank dies with an open step in its slab; its successor ends the step."""
    script = f"""
from pathlib import Path
from tests.engines.training import *
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
engine = DeepSpeedEngine(rank_spec(tiny_spec(Path({str(tiny_folder)!r})), port={free_port()}))
engine.create("a", CREATE)
engine.forward_backward(supervised(1, 9, 14))
engine.optim_step(adam())
engine.forward_backward(supervised(2, 9, 14))
engine.save_image(Path({str(tmp_path / "slab")!r}), deployment="a", progress=(4, 0))
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == -9
    engine = DeepSpeedEngine(rank_spec(tiny_model))
    engine.load_image(tmp_path / "slab", deployment="a")
    told = engine.optim_step(adam())
    engine.forward_backward(supervised(3, 9))
    engine.optim_step(adam())
    successor = engine.digest()
    undisturbed = DeepSpeedEngine(rank_spec(tiny_model))
    undisturbed.create("a", CREATE)
    undisturbed.forward_backward(supervised(1, 9, 14))
    undisturbed.optim_step(adam())
    undisturbed.forward_backward(supervised(2, 9, 14))
    assert undisturbed.optim_step(adam()) == told
    undisturbed.forward_backward(supervised(3, 9))
    undisturbed.optim_step(adam())
    assert undisturbed.digest() == successor


@every_case
def test_the_slabs_of_a_gang_have_as_many_bytes_as_the_sizing_says(
    gang: list[dict[str, Any]], folder: Path, world: int, layout: str
) -> None:
    """One deployment stopped between two steps, the other in its first one."""
    name, _, dtype = layout.rpartition("-")
    stage = layout_of(LAYOUTS[name])
    said = image_size(PARAMETERS, dtype=dtype, layout=stage, ranks=len(gang))
    found: Counter[str] = Counter()
    for slab in (folder / {2: "two", 4: "four"}[world] / layout).glob("[ab].[0-9]"):
        for tensor in read_header(slab).tensors:
            kind = tensor.name.split(".")[0]
            found[kind if slab.stem == "a" or kind == "grad" else "other"] += tensor.bytes
    assert found["weights"] == said.weights
    # A sub-group of less than that stays in memory.
    small = 1 + SMALLEST_SWAPPED * world * stage.swap_optimizer
    assert 0 <= found["master"] - said.masters < small
    assert 0 <= found["exp_avg"] + found["exp_avg_sq"] - said.moments < 2 * small - 1
    # At ZeRO-2 a parameter on the border of two ranks has its gradient on both.
    twice = found["grad"] - said.gradients
    largest = 128 * 256 * WIDTHS[dtype]
    assert 0 < twice <= (world - 1) * largest if stage.stage == 2 else twice == 0
