"""Scripts that PlexRL submits."""

import subprocess
from pathlib import Path

import pytest

from plexrl_slurm.slurm.site_files import task_prolog
from plexrl_slurm.slurm.templates import lua_string, render, systemd_word

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


MARKED = {"PLEXRL_PARTITION": "rlvr", "PLEXRL_NATIVE": "1", "SLURM_JOB_ID": "7"}


def prolog(folder: Path, environment: dict[str, str], answer: str) -> list[str]:
    """Its lines, but for those that take GPU requests back; ``answer`` is plexrl's own script."""
    plexrl = folder / "plexrl"
    plexrl.write_text(f"#!/bin/sh\n{answer}\n")
    plexrl.chmod(0o755)
    script = folder / "prolog.sh"
    script.write_text(task_prolog({"rlvr": Path("/etc/plexrl/a b.toml")}, plexrl=plexrl))
    done = subprocess.run(
        ["sh", str(script)], env={"PATH": "/usr/bin:/bin", **environment}, timeout=20,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.splitlines() if not line.startswith("unset SLURM_")]


def test_a_marked_job_gets_its_credentials(tmp_path: Path) -> None:
    answer = 'echo "print $*"; echo export TINKER_API_KEY=tml-1'
    assert prolog(tmp_path, MARKED, answer) == [
        "print credentials --task-prolog --config /etc/plexrl/a b.toml",
        "export TINKER_API_KEY=tml-1",
        "export PLEXRL_CREDENTIALS_OF=7",
    ]


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"SLURM_JOB_ID": "7"}, id="not ours"),
        pytest.param({"PLEXRL_PARTITION": "rlvr", "SLURM_JOB_ID": "7"}, id="a login's variable"),
        pytest.param(MARKED | {"PLEXRL_PARTITION": "other"}, id="unknown partition"),
        pytest.param(MARKED | {"PLEXRL_CREDENTIALS_OF": "7"}, id="a step of a job that has them"),
        pytest.param(
            MARKED | {"TINKER_API_KEY": "tml-1", "PLEXRL_JOB_ID": "3"}, id="from plexrl sbatch"
        ),
    ],
)
def test_nobody_is_asked_for_other_jobs(tmp_path: Path, environment: dict[str, str]) -> None:
    assert prolog(tmp_path, environment, "echo asked") == []


def test_an_array_does_not_use_the_credentials_of_who_submitted_it(tmp_path: Path) -> None:
    inherited = {"TINKER_API_KEY": "tml-1", "PLEXRL_JOB_ID": "3", "SLURM_ARRAY_JOB_ID": "6"}
    assert prolog(tmp_path, MARKED | inherited, "echo print nothing") == ["print nothing"]


@pytest.mark.parametrize("answer", ["echo oh >&2; exit 1", "exec sleep 30"])
def test_a_task_never_fails_because_there_are_no_credentials(tmp_path: Path, answer: str) -> None:
    (said,) = prolog(tmp_path, MARKED, answer)
    assert said.startswith("print plexrl: no credentials from ")


def test_literals_of_other_languages() -> None:
    assert lua_string('a"b\\\n\u00e9') == '"a\\034b\\092\\010\\195\\169"'
    assert systemd_word("/opt/a b/100%") == '"/opt/a b/100%%"'
    assert systemd_word("/opt/plexrl") == "/opt/plexrl"
