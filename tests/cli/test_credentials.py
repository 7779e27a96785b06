"""plexrl credentials: lines for a shell or for Slurm's TaskProlog; never in a task's way."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from plexrl_slurm.cli import credentials
from tests.cli.conftest import FakeDaemon

Plexrl = Callable[..., Result]
EXCHANGE = "POST /slurm-jobs/42/credentials"
ANSWER = {"job_id": 7, "token": "tml-x", "env": {"TINKER_API_KEY": "tml-x", "ODD": "a b$c='d'"}}


@pytest.fixture(autouse=True)
def in_a_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")


def test_a_shell_reads_what_it_is_given(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.answers[EXCHANGE] = ANSWER
    done = plexrl("credentials")
    assert (done.exit_code, done.stderr) == (0, "")
    script = done.stdout + 'printf %s "$TINKER_API_KEY|$ODD"'
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout == "tml-x|a b$c='d'"
    assert plexrl("credentials", "--json").stdout.count("tml-x") == 1


def test_a_task_prolog_gets_slurms_form(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.answers[EXCHANGE] = ANSWER
    done = plexrl("credentials", "--task-prolog")
    assert done.stdout == "export TINKER_API_KEY=tml-x\nexport ODD=a b$c='d'\n"
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize("form", ["--shell", "--task-prolog"])
def test_a_job_that_is_none_of_ours_gets_nothing(
    plexrl: Plexrl, daemon: FakeDaemon, form: str
) -> None:
    daemon.answers[EXCHANGE] = (404, {"error": "no job '42' that you may see", "exit_code": 66})
    done = plexrl("credentials", form)
    assert (done.exit_code, done.output) == (0, "")


@pytest.mark.parametrize(
    ("answer", "code", "sentence"),
    [
        pytest.param(
            (409, {"error": "job 42 is not admitted yet: full", "exit_code": 75}),
            75,
            "job 42 is not admitted yet: full",
            id="waits",
        ),
        pytest.param(
            (503, {"error": "two\n  lines", "exit_code": 75}), 75, "two", id="database down"
        ),
        pytest.param((500, b"<html>"), 70, "without an explanation", id="a bug"),
        pytest.param({"job_id": 7}, None, "KeyError: 'env'", id="an answer of another version"),
    ],
)
def test_what_is_wrong_is_an_error_in_a_shell_and_a_remark_in_a_task(
    plexrl: Plexrl, daemon: FakeDaemon, answer: Any, code: int | None, sentence: str
) -> None:
    daemon.answers[EXCHANGE] = answer
    if code is not None:
        failed = plexrl("credentials")
        assert (failed.exit_code, failed.stdout) == (code, "")
        assert sentence in failed.stderr
    done = plexrl("credentials", "--task-prolog")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("print plexrl: ")
    assert done.stdout.count("\n") == 1
    assert sentence in done.stdout


def test_without_a_daemon_or_settings_a_task_goes_on(plexrl: Plexrl, home: Path) -> None:
    assert plexrl("credentials").exit_code == 69
    done = plexrl("credentials", "--task-prolog")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("print plexrl: the daemon of partition 'rlvr' does not answer")
    (home / "plexrl.toml").unlink()
    assert plexrl("credentials", "--task-prolog").exit_code == 0


def test_outside_a_slurm_job_there_is_nothing_to_ask(
    plexrl: Plexrl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    done = plexrl("credentials")
    assert (done.exit_code, "SLURM_JOB_ID is not set" in done.stderr) == (65, True)
    assert daemon.routes() == []


def test_a_daemon_that_hangs_holds_no_task_up(home: Path) -> None:
    path = home / "state" / "api.sock"
    path.parent.mkdir(exist_ok=True)
    code = (
        "from plexrl_slurm.cli import credentials, main\n"
        "credentials._PROLOG_ANSWER_S = {answer}\n"
        "credentials._PROLOG_S = {whole}\n"
        "main.main(['credentials', '--task-prolog'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        for answer, whole, sentence in (
            (0.2, 20.0, b"print plexrl: the daemon of partition 'rlvr' does not answer"),
            (20.0, 0.2, b"print plexrl: no credentials: no answer within 0.2 s\n"),
        ):
            begin = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-c", code.format(answer=answer, whole=whole)],
                cwd=home,
                env=environment,
                capture_output=True,
                check=True,
                timeout=60,
            )
            assert done.stdout.startswith(sentence)
            assert done.stderr == b""
            assert time.monotonic() - begin < 10
    assert credentials._PROLOG_ANSWER_S < credentials._PROLOG_S < 5
