"""The demo's arithmetic, its screen, and what it asks the daemon for."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.api.jobs import SubmitJob
from plexrl_slurm.cli import demo, demo_figures, demo_runs
from plexrl_slurm.cli.demo_figures import JobRun, SharedRun
from plexrl_slurm.cli.demo_runs import DemoFailed, Submission
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


def test_what_several_holds_held_is_what_the_ledger_says() -> None:
    together = SharedRun(
        jobs=[job("a", 10, 110, loop_s=90.0), job("b", 10, 100, loop_s=81.0)],
        stretches=[
            stretch("train-0", "busy", 0, 60),
            stretch("train-1", "idle", 50, 200),
            stretch("rollout-0", "busy", 10, 110),
        ],
        several_holds=True,
    )
    alone = [job("a", 200, 290, loop_s=75.0), job("b", 300, 390, loop_s=81.0)]
    pools = POOLS | {"train-1": "train"}
    row = demo_figures.compare(together, alone, gpus=2, shared_gpus=3, pools=pools)
    # 50 s, 60 s and 100 s lie between 10 s and 110 s; two jobs took 20 steps.
    assert row["gpu_seconds_per_step"] == {"shared": 10.5, "dedicated": 18.0}
    assert row["bound_percent"] == 25.0


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


class Jobs:
    """A client that tells of the next states each time."""

    def __init__(self, *states: tuple[str, str]) -> None:
        self._states = list(states)

    def jobs(self, *, ended: bool) -> list[dict[str, Any]]:
        assert ended
        now = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        return [{"slurm_id": str(n + 7), "state": state} for n, state in enumerate(now)]

    def nodes(self) -> dict[str, Any]:
        return {"wpgs": []}


def submissions(folder: Path) -> list[Submission]:
    return [
        Submission(
            name=name,
            slurm_id=str(number),
            lines=folder / f"{name}.jsonl",
            output=folder / f"{name}.out",
        )
        for number, name in ((7, "a"), (8, "b"))
    ]


def test_jobs_are_watched_until_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_runs, "_LOOK_S", 0.0)
    client: Any = Jobs(("running", "pending"), ("completed", "running"), ("completed",) * 2)
    looks: list[int] = []
    with Screen("shared", steps=2) as screen:
        rows = demo_runs.watch(client, screen, submissions(tmp_path), lambda: looks.append(1))
    assert {name: row["state"] for name, row in rows.items()} == {
        "a": "completed",
        "b": "completed",
    }
    assert len(looks) == 3


def test_a_job_that_fails_ends_the_demo_at_once(tmp_path: Path) -> None:
    client: Any = Jobs(("running", "failed"))
    with pytest.raises(DemoFailed) as failed, Screen("shared", steps=2) as screen:
        demo_runs.watch(client, screen, submissions(tmp_path))
    assert failed.value.explain() == (
        f"job b of the demo ended as failed: see {tmp_path / 'b.out'}"
    )


def test_a_job_without_final_weights_has_learned_nothing(tmp_path: Path) -> None:
    site: Any = type("Site", (), {"state_dir": tmp_path})
    first, _ = submissions(tmp_path)
    row = {"slurm_id": "3", "started_us": 1, "ended_us": 2, "steps": 1}
    with pytest.raises(DemoFailed, match="completed with 0 final weights"):
        demo_runs.collect(site, first, row)
    folder = tmp_path / "checkpoints" / "job3-1" / "sampler_weights" / "final"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    learned = demo_runs.collect(site, first, row)
    assert learned.weights == hashlib.sha256(b"weights").hexdigest()


def test_rewards_are_drawn_from_0_to_1() -> None:
    assert sparkline([-0.5, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"


def test_names_on_the_screen_are_shown_as_they_are() -> None:
    from rich.console import Console

    wpg = {"id": "train-0", "pool": "train", "state": "busy", "resident": "job1-1:train:0"}
    screen = Screen("shared", steps=5)
    table = screen._table({"wpgs": [wpg | {"waiting": 2}]}, {"count-1": [{"reward": 0.25}]})
    console = Console(width=100, emoji=False, markup=False)
    with console.capture() as shown:
        console.print(table)
    assert "job1-1:train:0" in shown.get()
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
