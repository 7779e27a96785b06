"""docs/cli.md is what the commands say; starting the program imports nothing heavy."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.cli import show
from plexrl_slurm.cli.docs import exit_codes, render

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "deepspeed", "tinker", "pydantic", "fastapi", "sqlalchemy", "matplotlib")


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == render(), "run: python -m plexrl_slurm.cli.docs > docs/cli.md"


def test_every_exit_code_is_documented_once() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for code, words in exit_codes().items():
        assert page.count(f"| {code} | {words} |") == 1


@pytest.mark.parametrize("words", [("--help",), ("squeue",)], ids=" ".join)
def test_start_up_imports_nothing_heavy(home: Path, words: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from plexrl_slurm.cli.main import main\n"
        "try:\n"
        f"    main({list(words)!r})\n"
        "finally:\n"
        f"    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["squeu"], "unknown command 'squeu'; did you mean squeue?", id="command"),
        pytest.param(["squeue", "--alll"], "No such option '--alll'", id="option"),
        pytest.param(["scancel"], "Missing argument 'JOBID...'", id="argument"),
        pytest.param(["squeue", "-t", "XX"], "unknown job state 'XX'; known are PD", id="state"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_sentence(
    plexrl: Callable[..., Result], words: list[str], sentence: str
) -> None:
    done = plexrl(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("plexrl: error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "squeues", "saccts"),
    [(0, "0:00", "00:00:00"), (3661, "1:01:01", "01:01:01"), (90_061, "1-01:01:01", "1-01:01:01")],
)
def test_times_look_like_slurms(seconds: int, squeues: str, saccts: str) -> None:
    assert show.duration(seconds * 1_000_000) == squeues
    assert show.elapsed(seconds * 1_000_000) == saccts
