"""Scripts that PlexRL submits."""

import subprocess
from pathlib import Path

import pytest

from plexrl_slurm.slurm.templates import render

GOLDEN = Path(__file__).parents[1] / "golden" / "agent.sh"
VALUES = {
    "hold": "h1",
    "partition": "rlvr",
    "python": "/opt/plexrl/bin/python",
    "config": "/var/lib/plexrl/a folder/h1.json",
}


def test_the_script_of_a_hold_is_the_golden_one(request: pytest.FixtureRequest) -> None:
    text = render("agent.sh.j2", **VALUES)
    if request.config.getoption("--bless"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_agent_is_started_again_until_it_ends_with_0(tmp_path: Path) -> None:
    agent = tmp_path / "python"
    agent.write_text("#!/bin/sh\necho run >> runs\n[ $(wc -l < runs) -lt 3 ] && exit 9\nexit 0\n")
    agent.chmod(0o755)
    script = tmp_path / "hold.sh"
    script.write_text(render("agent.sh.j2", **(VALUES | {"python": str(agent)})))
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, timeout=20, capture_output=True)
    assert done.returncode == 0
    assert (tmp_path / "runs").read_text().count("run") == 3


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(Exception, match="config"):
        render("agent.sh.j2", hold="h1", partition="rlvr", python="python")
