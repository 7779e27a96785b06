"""``plexrl sim compare``: the runs that ``sim run`` makes, side by side."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from plexrl_slurm.cli import app
from plexrl_slurm.sim import world
from tests.sim.traces import LINE, written

Plexrl = Callable[..., Result]
SIZE = ("--gpus", "64", "--guess-sigma", "0")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [{**LINE, "id": name, "steps": 4, "seed": seed} for seed, name in enumerate("abc")]
    return str(written(tmp_path / "t.jsonl", *lines))


def figures(done: Result) -> Any:
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def bare(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "wall_seconds"}


def test_each_row_is_what_one_run_of_it_says(plexrl: Plexrl, trace: str) -> None:
    options = ("--policies", "atc_h,fifo", "--placements", "isolated,pack", *SIZE)
    rows = figures(plexrl("sim", "compare", trace, *options, "--json"))
    pairs = [(row["placement"], row["policy"]) for row in rows]
    # Alone on its WPG no job is ordered: one policy is enough.
    assert pairs == [("isolated", "atc_h"), ("pack", "atc_h"), ("pack", "fifo")]
    for row in rows:
        one = ("--placement", row["placement"], "--policy", row["policy"], *SIZE)
        assert bare(figures(plexrl("sim", "run", trace, *one, "--json"))) == bare(row)
    assert rows[0]["efficiency"] == 1.0 < rows[1]["efficiency"]
    assert rows[1]["switch_percent"] < rows[2]["switch_percent"]
    table = plexrl("sim", "compare", trace, *options).stdout.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [list(pair) for pair in pairs]


def test_what_is_named_twice_is_run_once(plexrl: Plexrl, trace: str) -> None:
    twice = ("--policies=fifo, fifo", "--placements=fit,fit", *SIZE)
    rows = figures(plexrl("sim", "compare", trace, *twice, "--json"))
    assert [(row["placement"], row["policy"]) for row in rows] == [("fit", "fifo")]


def test_pictures_go_where_they_are_asked_to(plexrl: Plexrl, trace: str, tmp_path: Path) -> None:
    folder = tmp_path / "plots"
    options = ("--policies", "atc_h", "--placements", "pack", "--plots", str(folder), *SIZE)
    done = plexrl("sim", "compare", trace, *options)
    assert done.exit_code == 0, done.stderr
    names = ["gantt-pack-atc_h", "savings", "slowdowns", "use", "utilisation"]
    assert sorted(file.stem for file in folder.iterdir()) == names
    assert all(f"plexrl: wrote {file}" in done.stderr for file in folder.iterdir())


def test_how_many_share_a_wpg_and_how_fast_moves_are_is_given(plexrl: Plexrl, trace: str) -> None:
    def run(*more: str) -> Any:
        return figures(plexrl("sim", "run", trace, "--placement", "pack", *SIZE, *more, "--json"))

    alone, two, three = (run("--most", most) for most in ("1", "2", "6"))
    assert alone["efficiency"] == 1.0 < two["efficiency"] < three["efficiency"]
    assert run("--bandwidth", "1")["switch_percent"] > three["switch_percent"]


def test_work_is_also_told_for_its_price(plexrl: Plexrl, trace: str) -> None:
    def run(placement: str, *more: str) -> Any:
        return figures(
            plexrl("sim", "run", trace, f"--placement={placement}", *SIZE, *more, "--json")
        )

    same, dear = run("pack"), run("pack", "--prices", "3:1")
    assert same["cost_efficiency"] == same["efficiency"] == dear["efficiency"]
    # Each job has 8 and 8 GPUs.
    alone, train = dear["gpu_hours_isolated"], dear["train_gpu_hours_held"]
    rollout = dear["gpu_hours_held"] - train
    paid = 3 * alone / 2 + alone / 2
    assert dear["cost_efficiency"] == pytest.approx(paid / (3 * train + rollout), abs=1e-4)
    assert dear["cost_efficiency"] > dear["efficiency"]
    assert run("isolated", "--prices", "3:1")["cost_efficiency"] == 1.0
    packed = ("--placements=pack", "--policies=fifo", *SIZE)
    assert "WORK/PRICE" not in plexrl("sim", "compare", trace, *packed).stdout
    table = plexrl("sim", "compare", trace, *packed, "--prices", "3:1").stdout
    assert "WORK/PRICE" in table
    row = plexrl("sim", "run", trace, "--placement=pack", *SIZE, "--prices=3:1").stdout
    assert f"{dear['cost_efficiency']:.3f} x isolated (3 and 1 a GPU-hour)" in row


@pytest.mark.parametrize("ratio", ["3", "a:1", "1:0", "nan:1", "1:inf", "-1:1", "1:2:3"])
def test_prices_that_are_none_are_refused(plexrl: Plexrl, trace: str, ratio: str) -> None:
    done = plexrl("sim", "run", trace, *SIZE, f"--prices={ratio}")
    assert done.exit_code == 65
    assert f"--prices {ratio}: give two numbers from 0.001 to a million" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--policies", "best"), "there is no policy 'best': choose one of atc_h, hrrs"),
        (("--placements", "best"), "there is no placement 'best': choose one of isolated"),
        (("--plots", "/dev/null/x"), "--plots /dev/null/x: cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    plexrl: Plexrl, trace: str, words: tuple[str, ...], sentence: str
) -> None:
    few = () if "--policies" in words or "--placements" in words else ("--placements", "isolated")
    done = plexrl("sim", "compare", trace, *SIZE, *few, *words)
    assert done.exit_code == 65
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_long_run_tells_how_far_it_is(
    plexrl: Plexrl, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "PATIENCE_S", 0.0)
    monkeypatch.setattr(world, "PROGRESS_EVERY", 10)
    done = plexrl("sim", "run", trace, *SIZE, "--json")
    told = re.findall(r"fit \+ atc_h \(1 of 1\): hour 0, (\d) of 3 jobs have ended", done.stderr)
    assert figures(done)["jobs"] == 3
    assert told == sorted(told) and set(told) >= {"0", "2"}
