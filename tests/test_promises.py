"""What a machine lacks is skipped; what was promised is not (tests/conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.tree import ROOT, texts


def run(folder: Path, body: str, *, promised: str = "") -> tuple[int, str]:
    """Exit status and output of pytest on one test, with our conftest as a plugin."""
    (folder / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.postgres\ndef test_it(golden):\n    {body}\n",
        encoding="utf-8",
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = postgres\n", encoding="utf-8")
    plugins = ("-p", "no:asyncio", "-p", "no:cacheprovider", "-p", "tests.conftest")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "test_it.py"],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "PLEXRL_TESTS_MUST_RUN": promised,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SKIP = "pytest.skip('the server did not start')"


@pytest.mark.parametrize(
    ("promised", "status", "said"),
    [
        pytest.param("", 0, "1 skipped", id="nothing promised"),
        pytest.param("engines", 0, "1 skipped", id="something else promised"),
        pytest.param("postgres,engines", 1, "postgres was promised", id="promised"),
        pytest.param("postgresql", 4, "the markers are", id="a promise of nothing we know"),
    ],
)
def test_a_test_that_skips_itself_fails_where_it_was_promised(
    tmp_path: Path, promised: str, status: int, said: str
) -> None:
    found, output = run(tmp_path, SKIP, promised=promised)
    if "no postgres here" in output:
        pytest.fail("this machine lacks PostgreSQL: make setup installs it")
    assert (found, said in output) == (status, True), output


def test_files_that_are_said_to_take_longest_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_what_needs_a_real_slurm_is_where_make_live_looks_for_it() -> None:
    mark = ".".join(("pytest", "mark", "slurm"))
    marked = [path for path, text in texts() if path.endswith(".py") and mark in text]
    assert marked
    assert [path for path in marked if not path.startswith("tests/slurm_live/")] == []


def test_a_golden_text_that_is_not_there_fails_and_says_how_to_write_it(tmp_path: Path) -> None:
    status, output = run(tmp_path, "golden('no-such-file', 'text')")
    assert (status, "make bless" in output) == (1, True), output
