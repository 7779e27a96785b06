"""A rank is killed in the middle of a backward pass: the next gang learns what this one would."""

import json
import signal
from pathlib import Path

import pytest

from tests.engines.dying import LEFT_ALONE
from tests.engines.test_deepspeed_gang import run_gang

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "layout", ["2-float32", "3-swapped-param-bfloat16", "3-swapped-matrices-float32"]
)
def test_replay_after_a_death_in_a_backward_pass_is_bit_identical(
    tiny_folder: Path, tmp_path: Path, layout: str
) -> None:
    reports = []
    for name, dies, codes in (
        ("lost", True, [LEFT_ALONE, -signal.SIGKILL]),
        ("next", False, [0, 0]),
    ):
        plan = {"layout": layout, "die": dies, "images": str(tmp_path)}
        (tmp_path / f"{name}.json").write_text(json.dumps(plan))
        reports = run_gang(
            tiny_folder,
            tmp_path / name,
            2,
            module="tests.engines.dying",
            steps=tmp_path / f"{name}.json",
            timeout_s=400,
            codes=codes,
        )
    assert len(reports) == 2
    for report in reports:
        assert report["replayed"] == report["undisturbed"]
