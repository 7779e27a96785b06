"""The check that is made the day a GPU is there runs, and would notice what it is for."""

import argparse
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.engines.movers import Mover, Piece

pytestmark = [pytest.mark.engines, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
#: Rows that mean something on a CPU too.
HOLD = [
    "job a: losses as alone",
    "job a: final weights and moments as alone",
    "job b: losses as alone",
    "job b: final weights and moments as alone",
    "state taken again from its image",
    "DeepSpeed: computes on",
    "DeepSpeed: losses, logprobs and state of two jobs by turns as alone",
    "DeepSpeed: asleep, it keeps of the device (all of it, and since it was built)",
    "DeepSpeed: awake again, its state",
    "all of this",
]


def run(folder: Path, *words: str, before: str = "pass") -> tuple[dict[str, Any], Any]:
    """Its answer and its process; ``before``: Python that is run first."""
    answer = folder / "answer.json"
    module = "runpy.run_module('benchmarks.gpu_check', run_name='__main__')"
    start = f"import runpy, sys; {before}; {module}"
    done = subprocess.run(
        [sys.executable, "-c", start, "--small", "--rounds", "2", "--json", str(answer), *words],
        cwd=ROOT,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(answer.read_text()), done


def test_it_runs_without_a_gpu_and_says_what_it_could_not_judge(tmp_path: Path) -> None:
    found, done = run(tmp_path)
    verdicts = {row["what"]: row["verdict"] for row in found["rows"]}
    assert found["ok"] is True and found["device"] == "CPU" and found["small"] is True
    assert found["complete"] is True
    assert [what for what, verdict in verdicts.items() if verdict == "pass"] == HOLD
    assert "both directions at once against one direction" in verdicts
    assert all(verdict in ("pass", "not judged", "") for verdict in verdicts.values())
    assert all(what in done.stdout for what in verdicts)
    assert "by turns: 9 switches" in done.stderr


def test_it_fails_when_a_mover_forgets_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.gpu_check import Answer, flat_tensors
    from benchmarks.gpu_trainer import Device

    move = Mover.move

    def forgetful(self: Mover, *, out: Sequence[Piece] = (), into: Sequence[Piece] = ()) -> int:
        """It leaves open gradients where they are."""
        some = [piece for piece in into if piece is not into[-1] or len(into) < 5]
        return move(self, out=out, into=some)

    monkeypatch.setattr(Mover, "move", forgetful)
    asked: Any = argparse.Namespace(small=True, layers=1, rounds=1)
    answer = Answer("CPU", small=True, limit_s=1000.0, file=None)
    flat_tensors(answer, asked, Device(small=True))
    failed = {row.what for row in answer.rows if row.verdict == "FAIL"}
    assert "job a: final weights and moments as alone" in failed


#: Beyond torch and transformers, for anybody who tries to import them.
THEIRS = ["deepspeed", "msgspec", "crc32c", "vllm", "zmq", "sqlalchemy", "click", "tinker"]
WITHOUT = f"sys.modules.update(dict.fromkeys({THEIRS!r}))"


def test_it_needs_nothing_but_torch_and_transformers(tmp_path: Path) -> None:
    found, _ = run(tmp_path, before=WITHOUT)
    told = {row["what"]: row["measured"] for row in found["rows"]}
    assert told["the training engine itself (DeepSpeed)"].startswith(
        "skipped: deepspeed, msgspec, crc32c not here"
    )
    assert told["job a: losses as alone"] == "bit-identical"


def test_what_would_begin_too_late_is_left_out_and_said() -> None:
    from benchmarks.gpu_check import STARTED, Answer, flat_tensors
    from benchmarks.gpu_trainer import Device

    asked: Any = argparse.Namespace(small=True, layers=1, rounds=1)
    over_s = time.monotonic() - STARTED
    answer = Answer("CPU", small=True, limit_s=over_s + 55.0, file=None)
    flat_tensors(answer, asked, Device(small=True))
    told = {row.what: (row.measured, row.verdict) for row in answer.rows}
    assert told["switches"] == ("left out: no time", "not judged")
    assert told["job a: losses as alone"] == ("bit-identical", "pass")


def test_an_error_in_a_part_is_a_line_and_the_next_part_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu_check import Answer, Row

    file = tmp_path / "answer.json"
    answer = Answer("CPU", small=True, limit_s=1000.0, file=file)

    def broken() -> list[Row]:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    answer.part("one", broken)
    answer.part("two", lambda: [Row(what="two", measured="2", verdict="pass")])
    found = json.loads(file.read_text())
    assert [(row["what"], row["measured"], row["verdict"]) for row in found["rows"]] == [
        ("one", "RuntimeError: CUDA error: an illegal memory access", "FAIL"),
        ("two", "2", "pass"),
    ]
    assert (found["ok"], found["complete"]) == (False, False)
    assert "illegal memory access" in capsys.readouterr().out


def test_memory_that_grows_while_it_is_used_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_trainer as made

    monkeypatch.setattr(made, "STRIDE", 1 << 20)
    there = iter([0, 0, 2 << 30, 0, 2 << 30])
    monkeypatch.setattr(made, "available_memory", lambda: next(there))
    file = os.memfd_create("test")
    made.reserve(file, 2 << 20)
    assert os.fstat(file).st_size == 2 << 20 and next(there, None) is None
    monkeypatch.setattr(made, "available_memory", lambda: 5)
    with pytest.raises(made.NoRoom, match=r"0\.0 of 0\.0 GB; 0\.0 GB are free"):
        made.reserve(file, 1 << 20, patience_s=0.1)
    monkeypatch.setattr(made, "available_memory", lambda: 2 << 30)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(made.NoRoom, match="No space left"):
        made.reserve(file, 1 << 20)
    os.close(file)


def test_without_room_for_all_layers_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu_check, gpu_trainer

    most = gpu_trainer.image_bytes(gpu_check.parameters_of(5, small=False))
    made: list[int] = []

    def image(name: str, size: int) -> str:
        made.append(size)
        if size > most:
            raise gpu_trainer.NoRoom("full")
        return name

    monkeypatch.setattr(gpu_check, "HostImage", image)
    asked: Any = argparse.Namespace(small=False, layers=0)
    layers, slabs = gpu_check.room_for(asked)
    assert (layers, [str(slab) for slab in slabs]) == (4, ["a", "b", "spare"])
    assert len(made) == 5
    asked.layers = 16
    with pytest.raises(SystemExit, match="no host memory for 16 layers"):
        gpu_check.room_for(asked)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_slab_is_as_large_as_the_model_wants(layers: int) -> None:
    from benchmarks.gpu_check import parameters_of
    from benchmarks.gpu_trainer import Device, Trainer

    trainer = Trainer(Device(small=True), small=True, layers=layers)
    assert trainer.size == parameters_of(layers, small=True)
