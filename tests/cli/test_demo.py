"""The demo's arithmetic, its screen, and what it asks the daemon for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.api.jobs import SubmitJob
from plexrl_slurm.cli import demo, demo_figures
from plexrl_slurm.cli.demo_figures import JobRun, SharedRun
from plexrl_slurm.cli.demo_screen import Screen, read_lines, sparkline
from plexrl_slurm.cli.submit import Request, Submitted
from plexrl_slurm.settings import Site

S = 1_000_000


def job(name: str, start_s: int, end_s: int, *, loop_s: float, weights: str = "w") -> JobRun:
    line = {"loss": "0x1p-1", "samples": "s", "reward": 0.5, "elapsed_seconds": loop_s}
    return JobRun(
        name=name,
        started_us=start_s * S,
        ended_us=end_s * S,
        steps=10,
        lines=[line],
        weights=weights,
    )


def stretch(wpg: str, activity: str, start_s: int, stop_s: int) -> Mapping[str, Any]:
    length = (stop_s - start_s) * S
    times = {"start_us": start_s * S, "stop_us": stop_s * S, "gpu_us": length}
    return {"wpg": wpg, "activity": activity, **times}


POOLS = {"train-0": "train", "rollout-0": "rollout"}


def shared(*jobs: JobRun) -> SharedRun:
    stretches = [
        stretch("train-0", "idle", 0, 20),
        stretch("train-0", "busy", 20, 50),
        stretch("train-0", "switch", 50, 54),
        stretch("train-0", "idle", 54, 200),
        stretch("rollout-0", "busy", 10, 60),
        stretch("rollout-0", "idle", 60, 110),
    ]
    return SharedRun(jobs=jobs, stretches=stretches)


def test_the_saving_is_held_time_per_step_shared_against_dedicated() -> None:
    together = shared(job("a", 10, 110, loop_s=90.0), job("b", 10, 100, loop_s=81.0))
    alone = [job("a", 200, 290, loop_s=75.0), job("b", 300, 390, loop_s=81.0)]
    row = demo_figures.compare(together, alone, gpus=2, pools=POOLS)
    assert row["gpu_seconds_per_step"] == {"shared": 10.0, "dedicated": 18.0}
    assert row["saving_percent"] == pytest.approx(100 * 8 / 18)
    assert row["bound_percent"] == 50.0
    assert row["slowdown"] == {"mean": pytest.approx(1.1), "max": pytest.approx(1.2)}
    # Of the 200 GPU-seconds between 10 s and 110 s.
    assert row["switch_percent"] == pytest.approx(2.0)
    assert row["pool_busy_percent"] == {"rollout": 50.0, "train": 30.0}
    assert row["learning_identical"] is True


def test_one_bit_of_difference_is_seen() -> None:
    together = shared(job("a", 0, 10, loop_s=9.0, weights="x"), job("b", 0, 10, loop_s=9.0))
    alone = [job("a", 20, 30, loop_s=9.0), job("b", 30, 40, loop_s=9.0)]
    row = demo_figures.compare(together, alone, gpus=2, pools=POOLS)
    assert row["learning_identical"] is False
    assert [each["learning_identical"] for each in row["jobs"]] == [False, True]
    heads, cells = demo_figures.table({"2": row})
    assert dict(zip(heads, cells[0], strict=True))["LEARNING IDENTICAL"] == "NO"


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    assert read_lines(file) == []
    file.write_text(json.dumps({"step": 0, "reward": 0.1}) + "\n" + '{"step": 1, "rew')
    assert read_lines(file) == [{"step": 0, "reward": 0.1}]


def test_rewards_are_drawn_from_0_to_1() -> None:
    assert sparkline([-0.5, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"


def test_names_on_the_screen_are_shown_as_they_are() -> None:
    from rich.console import Console

    wpg = {"id": "train-0", "pool": "train", "state": "busy", "resident": "s1-1:train:0"}
    screen = Screen("shared", steps=5)
    table = screen._table({"wpgs": [wpg | {"waiting": 2}]}, {"count-1": [{"reward": 0.25}]})
    console = Console(width=100, emoji=False, markup=False)
    with console.capture() as shown:
        console.print(table)
    assert "s1-1:train:0" in shown.get()
    assert "1/5" in shown.get()


def test_the_api_takes_what_the_demo_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []

    def submit(_client: object, _slurm: object, request: Request) -> Submitted:
        asked.append(request)
        return Submitted(job_id=1, slurm_id="1")

    monkeypatch.setattr(demo, "submit", submit)
    plan = demo.Plan(
        out=tmp_path,
        jobs=3,
        steps=5,
        tool_multiple=2.0,
        tool_seconds=None,
        seed=1,
        policy="hrrs",
        examples=tmp_path,
    )
    site = Site(
        partition="demo",
        state_dir=tmp_path,
        database_url="sqlite:///x.db",
        backend="local",
        path=tmp_path / "p.toml",
    )
    demo._submit(plan, site, None, tmp_path, "count-2", 1, 1.5)  # type: ignore[arg-type]
    (request,) = asked
    body = {
        "partition": request.partition,
        "name": request.name,
        "account": request.account,
        "models": list(request.models),
        "priority": request.priority,
        "seed": request.seed,
        "script": request.shown,
        "options": dict(request.options),
    }
    assert msgspec.convert(body, SubmitJob).seed == 2
    assert "--seed 2 --tool-seconds 1.5" in request.script
