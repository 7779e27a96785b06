"""plexrl state size: by name, by folder, by number; what settings say; and the page's tables."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.cli.state_tables import tables
from tests.model_folders import PARAMETERS, make_model_folder
from tests.tree import ROOT

Plexrl = Callable[..., Result]


def test_a_number_of_parameters_needs_no_settings(
    plexrl: Plexrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLEXRL_CONFIG", raising=False)
    options = ["--gpus=8", "--zero-stage=2", "--host=1.2TB", "--nvme=15TB", "--json"]
    found = json.loads(plexrl("state", "size", "7B", *options).stdout)
    assert found["parameters"] == 7_000_000_000
    assert (found["dtype"], found["layout"]) == ("bfloat16", "zero2")
    assert found["bytes_per_parameter"] == 30
    assert found["image_bytes"] == 8 * found["image_bytes_per_gpu"] == 210 * 10**9
    assert found["snapshot_bytes"] == 14 * 10**9
    # A disk for 71 images, and memory for the two that a switch needs and 55 snapshots.
    assert found["deployments"] == 55
    assert found["switch_seconds"] == pytest.approx(26.25 / 50)


def test_settings_say_what_is_not_given(plexrl: Plexrl, home: Path) -> None:
    found = json.loads(plexrl("state", "size", "tiny", "--json").stdout)
    assert found["parameters"] == PARAMETERS and found["dtype"] == "float32"
    assert found["image_bytes"] == 20 * PARAMETERS
    assert found["host_bytes"] == 2**30 and found["nvme_bytes"] is None
    # Each has an image and a snapshot in memory, and there is one image to spare.
    assert found["deployments"] == (2**30 - 20 * PARAMETERS) // (24 * PARAMETERS)
    other = json.loads(plexrl("state", "size", "tiny", "--dtype=bfloat16", "--json").stdout)
    assert other["image_bytes"] == 16 * PARAMETERS


def test_several_models_are_a_table_and_a_folder_is_read(plexrl: Plexrl, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "other")
    done = plexrl("state", "size", str(folder), "312448", "--zero-stage=3")
    assert done.exit_code == 0
    heads, first, second = done.stdout.splitlines()
    assert heads.split()[:4] == ["MODEL", "LAYOUT", "B/PARAM", "IMAGE"]
    assert first.startswith(str(folder)) and " 20 " in first
    assert second.startswith("312448") and " 16 " in second


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "nothing is no model of the catalogue (tiny), no folder and no number"),
        (["0B"], "write a name, a path, or a number such as 7B"),
        (["7B", "--host=much"], "--host: 'much' is not a size"),
        (["7B", "--gpus=6", "--nodes=4"], "6 GPUs cannot be shared out to 4 nodes evenly"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(
    plexrl: Plexrl, home: Path, arguments: list[str], sentence: str
) -> None:
    done = plexrl("state", "size", *arguments)
    assert done.exit_code == 65
    assert sentence in done.stderr


def test_settings_that_were_named_must_be_there(plexrl: Plexrl, tmp_path: Path) -> None:
    done = plexrl("state", "size", "7B", "--config", str(tmp_path / "none.toml"))
    assert done.exit_code == 78


def test_settings_with_mistakes_are_said_and_not_used(plexrl: Plexrl, home: Path) -> None:
    config = home / "plexrl.toml"
    config.write_text(config.read_text().replace("host_bytes", "hostbytes"))
    done = plexrl("state", "size", "7B")
    assert done.exit_code == 0 and " 16 " in done.stdout
    assert "plexrl.toml has mistakes and is not used" in done.stderr


def test_the_page_about_state_has_the_tables_that_the_code_computes(
    request: pytest.FixtureRequest,
) -> None:
    page = ROOT / "docs" / "state.md"
    text = page.read_text(encoding="utf-8")
    place = re.compile(r"(?<=<!-- computed -->\n\n).*?(?=\n\n<!-- /computed -->)", re.DOTALL)
    assert len(place.findall(text)) == 1
    if request.config.getoption("--bless"):
        text = place.sub(lambda _: tables(), text)
        page.write_text(text, encoding="utf-8")
    assert tables() in text, "the sizes changed: make bless"
