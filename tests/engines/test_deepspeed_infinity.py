"""ZeRO-Infinity: a swap folder for each deployment, and what a crash leaves of it."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadImage, BadInput, StepSkipped, StorageFull
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory import disk as disk_module
from plexrl_slurm.memory import swap, swap_manifest
from plexrl_slurm.memory.disk import Disk
from plexrl_slurm.memory.slab import read_header
from tests.engines.gang import LAYOUTS
from tests.engines.test_deepspeed_gang import ROOT, TIMEOUT_S
from tests.engines.training import (
    CREATE,
    PARAMETERS,
    adam,
    exploding,
    rank_spec,
    supervised,
    tiny_spec,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(swap.SWAP_DIR, str(tmp_path / "swap"))
    return tmp_path / "swap"


def swap_from(smallest: int, patch: pytest.MonkeyPatch) -> None:
    """Have DeepSpeed move tensors of so many bytes or more."""
    from deepspeed.runtime.swap_tensor import aio_config, optimizer_utils

    patch.setitem(aio_config.AIO_DEFAULT_DICT, "block_size", smallest)
    patch.setattr(optimizer_utils, "MIN_AIO_BYTES", smallest)


def engine_of(model: ModelSpec, layout: str = "3-swapped") -> DeepSpeedEngine:
    return DeepSpeedEngine(rank_spec(model, **LAYOUTS[layout]))


def train(engine: DeepSpeedEngine, *seeds: int) -> None:
    for seed in seeds:
        engine.forward_backward(supervised(seed, 8))
        engine.optim_step(adam(weight_decay=0.1))


def digest_of(model: ModelSpec, *seeds: int, layout: str = "3-swapped") -> str:
    """Of a deployment that learned undisturbed."""
    engine = engine_of(model, layout)
    engine.create("undisturbed", CREATE)
    train(engine, *seeds)
    return engine.digest()


def versions(disk: Path, deployment: str = "a") -> list[Path]:
    return sorted(disk.glob(f"train-0/{deployment}/rank-0-of-1/*"))


@pytest.mark.parametrize("smallest", [1 << 20, 1 << 16, 1 << 12])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_bit_by_bit_what_it_learns_in_host_memory(
    tiny_folder: Path, dtype: str, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 4 KiB gradients lie behind biases of 256 bytes, where no disk puts them."""
    swap_from(smallest, monkeypatch)
    model = tiny_spec(tiny_folder, dtype)
    layouts = ("3-optimizer-param", "3-swapped", "3-swapped-param")
    assert len({digest_of(model, 1, 2, 3, layout=layout) for layout in layouts}) == 1


@pytest.mark.parametrize("what", ["gradient", "master"])
def test_a_disk_that_fails_in_a_step_is_an_error_and_never_another_step(
    tiny_model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    swap_from(1 << 12, monkeypatch)

    class Broken(Disk):
        def open(self, path: Path, flags: int) -> int:
            if what in path.name:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return super().open(path, flags)

    engine = engine_of(tiny_model)
    engine.create("a", CREATE)
    train(engine, 1)
    engine.forward_backward(supervised(2, 8))
    engine.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    with monkeypatch.context() as patch:
        patch.setattr(disk_module, "disk", Broken())
        with pytest.raises(OSError, match=what):
            engine.optim_step(adam(weight_decay=0.1))
    engine = engine_of(tiny_model)
    engine.load_image(tmp_path / "slab", deployment="a")
    engine.optim_step(adam(weight_decay=0.1))
    assert engine.digest() == digest_of(tiny_model, 1, 2)


def test_a_switch_moves_only_what_is_not_on_the_disk(tiny_model: ModelSpec, tmp_path: Path) -> None:
    engine = engine_of(tiny_model)
    for name, seeds in (("a", (1, 2)), ("b", (3, 4, 5))):
        engine.create(name, CREATE)
        train(engine, *seeds)
        engine.forward_backward(supervised(6, 8))
        moved = engine.save_image(tmp_path / name, deployment=name, progress=(1, 0))
        assert moved == 2 * 4 * PARAMETERS  # weights and gradients, of 20 bytes a parameter
    digests = {}
    for name in "ab":
        assert engine.load_image(tmp_path / name, deployment=name) == 2 * 4 * PARAMETERS
        engine.optim_step(adam(weight_decay=0.1))
        digests[name] = engine.digest()
    assert digests["a"] == digest_of(tiny_model, 1, 2, 6)
    assert digests["b"] == digest_of(tiny_model, 3, 4, 5, 6)


def test_an_image_stays_what_it_was_however_many_steps_follow(
    tiny_model: ModelSpec, tmp_path: Path, disk: Path
) -> None:
    engine = engine_of(tiny_model)
    engine.create("a", CREATE)
    train(engine, 1)
    saved = engine.digest()
    engine.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    train(engine, 2, 3, 4, 5)
    assert len(versions(disk)) <= 4
    # Another rank's disk is full: this image was never the deployment's newest one.
    engine.save_image(tmp_path / "other", deployment="a", progress=(9, 0))
    train(engine, 6, 7)
    engine.load_image(tmp_path / "slab", deployment="a")
    assert engine.digest() == saved
    train(engine, 2)
    assert engine.digest() == digest_of(tiny_model, 1, 2)


def test_a_rank_that_dies_in_the_middle_of_a_step_loses_nothing(
    tiny_folder: Path, tiny_model: ModelSpec, tmp_path: Path, disk: Path
) -> None:
    script = f"""
import os, signal, sys
from pathlib import Path
from tests.engines import gang
from tests.engines.training import *
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
model = tiny_spec(Path({str(tiny_folder)!r}))
engine = DeepSpeedEngine(rank_spec(model, **gang.LAYOUTS["3-swapped"]))
engine.create("a", CREATE)
for seed in (1, 2):
    engine.forward_backward(supervised(seed, 8))
    engine.optim_step(adam(weight_decay=0.1))
engine.forward_backward(supervised(3, 8))
engine.save_image(Path({str(tmp_path / "slab")!r}), deployment="a", progress=(5, 0))
swapper = engine._skeleton._zero.optimizer_swapper
write = swapper.swap_out_optimizer_state
def write_and_die(parameter, async_swap=False):
    write(parameter, async_swap)
    os.kill(os.getpid(), signal.SIGKILL)
swapper.swap_out_optimizer_state = write_and_die
engine.optim_step(adam(weight_decay=0.1))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=TIMEOUT_S, check=False)
    assert done.returncode == -9
    engine = engine_of(tiny_model)
    engine.load_image(tmp_path / "slab", deployment="a")
    engine.optim_step(adam(weight_decay=0.1))
    train(engine, 4)
    assert engine.digest() == digest_of(tiny_model, 1, 2, 3, 4)


def test_a_step_that_is_skipped_leaves_the_version_as_it_was(tiny_folder: Path, disk: Path) -> None:
    model = tiny_spec(tiny_folder, "bfloat16")
    engine = engine_of(model)
    engine.create("a", CREATE)
    train(engine, 1)
    before, there = engine.digest(), versions(disk)
    engine.forward_backward(exploding())
    with pytest.raises(StepSkipped, match="gradient is not finite"):
        engine.optim_step(adam())
    assert engine.digest() == before
    assert set(versions(disk)) <= set(there)
    train(engine, 2)
    assert engine.digest() == digest_of(model, 1, 2)


def test_a_checkpoint_is_a_copy_of_what_is_on_the_disk(
    tiny_model: ModelSpec, tmp_path: Path
) -> None:
    engine = engine_of(tiny_model)
    engine.create("a", CREATE)
    train(engine, 1, 2)
    path = str(tmp_path / "run")
    engine.save_state(wire.SaveState(path=path, uri="u"))
    engine.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    wanted = engine.digest()
    train(engine, 3)
    engine.load_state(wire.LoadState(path=path, uri="u", optimizer=True))
    assert engine.digest() == wanted
    engine.load_state(wire.LoadState(path=path, uri="u", optimizer=False))
    assert engine.digest() != wanted
    engine.load_image(tmp_path / "slab", deployment="a")
    assert engine.digest() == wanted
    memory = engine_of(tiny_model, "3-optimizer-param")
    memory.create("b", CREATE)
    memory.load_state(wire.LoadState(path=path, uri="u", optimizer=True))
    assert memory.digest() == wanted


@pytest.mark.parametrize("smallest", [1 << 20, 1 << 12])
def test_a_version_has_checksums_however_it_came_to_be(
    tiny_model: ModelSpec,
    tmp_path: Path,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    smallest: int,
) -> None:
    swap_from(smallest, monkeypatch)
    engine = engine_of(tiny_model)

    def newest_is_whole() -> None:
        found = swap_manifest.read(versions(disk)[-1])
        assert {"master.0.swp", "exp_avg.0.swp", "exp_avg_sq.0.swp"} <= found.files.keys()
        swap_manifest.check(versions(disk)[-1], found)

    engine.create("a", CREATE)
    newest_is_whole()
    path = str(tmp_path / "run")
    engine.save_state(wire.SaveState(path=path, uri="u"))
    for _ in range(3):
        train(engine, 1)
        newest_is_whole()
    engine.load_state(wire.LoadState(path=path, uri="u", optimizer=True))
    newest_is_whole()


def test_an_image_whose_swap_folder_is_gone_or_cut_off_is_refused(
    tiny_model: ModelSpec, tmp_path: Path, disk: Path
) -> None:
    engine = engine_of(tiny_model)
    engine.create("a", CREATE)
    train(engine, 1)
    engine.save_image(tmp_path / "slab", deployment="a", progress=(1, 0))
    version = read_header(tmp_path / "slab").state[swap.VERSION]
    file = disk / "train-0" / "a" / "rank-0-of-1" / str(version) / "exp_avg.0.swp"
    with file.open("r+b") as stream:
        stream.truncate(4096)
    with pytest.raises(BadImage, match=r"exp_avg\.0\.swp.* has 4096 bytes where"):
        engine.load_image(tmp_path / "slab", deployment="a")
    shutil.rmtree(file.parent)
    with pytest.raises(BadImage, match=r"lacks master\.0\.swp"):
        engine.load_image(tmp_path / "slab", deployment="a")
    engine.create("b", CREATE)
    train(engine, 1)
    assert engine.digest() == digest_of(tiny_model, 1)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20_000)
        (byte,) = file.read(1)
        file.seek(20_000)
        file.write(bytes([byte ^ 4]))


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def zero(path: Path) -> None:
    """As a file that was truncated, and is as large again."""
    size = path.stat().st_size
    os.truncate(path, 4096)
    os.truncate(path, size)


def remove_all(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (flip, "master.0.swp"),
        (flip, "exp_avg_sq.0.swp"),
        (zero, "exp_avg.0.swp"),
        (cut, "exp_avg.0.swp"),
        (Path.unlink, "master.0.swp"),
        (remove_all, "master.0.swp"),
    ],
)
def test_a_swap_folder_that_is_harmed_ends_the_rank_and_never_becomes_another_step(
    tiny_model: ModelSpec,
    tmp_path: Path,
    disk: Path,
    harm: Callable[[Path], None],
    what: str,
    away: bool,
) -> None:
    """While it is resident, or while another is; from the image before it learns the same."""
    engine = engine_of(tiny_model)
    engine.create("a", CREATE)
    train(engine, 1)
    engine.save_image(tmp_path / "older", deployment="a", progress=(1, 0))
    train(engine, 2)
    engine.save_image(tmp_path / "newer", deployment="a", progress=(2, 0))
    if away:
        engine.create("b", CREATE)
        train(engine, 5)
    version = read_header(tmp_path / "newer").state[swap.VERSION]
    harm(disk / "train-0" / "a" / "rank-0-of-1" / str(version) / what)

    def go_on() -> None:
        if away:
            engine.load_image(tmp_path / "newer", deployment="a")
        train(engine, 3)

    with pytest.raises((OSError, BadImage), match=r"rank-0-of-1"):
        go_on()
    engine = engine_of(tiny_model)
    engine.load_image(tmp_path / "older", deployment="a")
    train(engine, 2, 3)
    assert engine.digest() == digest_of(tiny_model, 1, 2, 3)


def test_a_checkpoint_is_not_made_of_what_was_harmed(
    tiny_model: ModelSpec, tmp_path: Path, disk: Path
) -> None:
    engine = engine_of(tiny_model)
    engine.create("a", CREATE)
    train(engine, 1)
    flip(versions(disk)[-1] / "exp_avg.0.swp")
    with pytest.raises(OSError, match=r"is damaged: .*exp_avg\.0\.swp"):
        engine.save_state(wire.SaveState(path=str(tmp_path / "run"), uri="u"))


def test_a_full_disk_refuses_the_step_and_leaves_it_open(
    tiny_model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_model)
    engine.create("a", CREATE)
    train(engine, 1)
    engine.forward_backward(supervised(2, 8))

    def full(path: Path, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(swap, "allocate", full)
        with pytest.raises(StorageFull):
            engine.optim_step(adam(weight_decay=0.1))
    engine.optim_step(adam(weight_decay=0.1))
    assert engine.digest() == digest_of(tiny_model, 1, 2)


def test_without_a_disk_the_rank_says_what_to_write(
    tiny_model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(swap.SWAP_DIR)
    with pytest.raises(BadInput, match="nvme_dir and nvme_bytes"):
        engine_of(tiny_model)
