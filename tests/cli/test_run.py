"""plexrl run: the local adapter runs the command; inside a Slurm job it becomes the command."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.local import LocalSlurm
from plexrl_slurm.slurm.port import ENDED
from tests.cli.conftest import FakeDaemon, make_job

Plexrl = Callable[..., Result]


def play_intake(daemon: FakeDaemon, home: Path) -> LocalSlurm:
    """Release what is bound, and answer with the adapter's state."""
    slurm = LocalSlurm(home / "state" / "local")

    def bind() -> dict[str, Any]:
        slurm.release(SlurmId("1"))
        return {}

    def jobs() -> dict[str, Any]:
        status = slurm.states([SlurmId("1")])[SlurmId("1")]
        state = status.state.lower() if status.state in ENDED else "running"
        return {"jobs": [make_job(7, slurm_id="1", state=state, exit_code=status.exit_code)]}

    def cancel() -> dict[str, Any]:
        slurm.cancel(SlurmId("1"))
        return {}

    daemon.answers["POST /jobs/7/bind"] = bind
    daemon.answers["POST /jobs/7/cancel"] = cancel
    daemon.answers["GET /jobs"] = jobs
    return slurm


def test_output_is_streamed_and_the_exit_code_is_the_commands(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    play_intake(daemon, home)
    command = "echo $TINKER_API_KEY; echo oops >&2; exit 4"
    done = plexrl("run", "--model=tiny", "--", "sh", "-c", command)
    assert done.exit_code == 4
    assert done.stdout == "tml-x\n"
    assert "oops" in done.stderr
    assert daemon.body("POST /jobs")["name"] == "sh"


def test_an_interrupt_cancels_the_job(daemon: FakeDaemon, home: Path) -> None:
    slurm = play_intake(daemon, home)
    words = [sys.executable, "-m", "plexrl_slurm.cli.main", "run", "--", "sleep", "60"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(words, cwd=home, env=environment, stderr=subprocess.PIPE) as process:
        while "GET /jobs" not in daemon.routes():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"cancelling job 1" in said
    assert "POST /jobs/7/cancel" in daemon.routes()
    while slurm.states([SlurmId("1")])[SlurmId("1")].state not in ENDED:
        time.sleep(0.01)


# ---- inside a Slurm job ----------------------------------------------------------------------

ANSWER = {"job_id": 7, "token": "tml-x", "env": {"TINKER_API_KEY": "tml-x", "PLEXRL_JOB_ID": "7"}}
EXCHANGE = "POST /slurm-jobs/42/credentials"


@pytest.fixture
def on_slurm(home: Path) -> Path:
    """The home of a partition on Slurm."""
    with (home / "plexrl.toml").open("a") as settings:
        settings.write('\n[hold]\nbackend = "slurm"\n')
    return home


def start(
    home: Path, *words: str, job: dict[str, str] | None = None, **more: Any
) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **({"SLURM_JOB_ID": "42"} if job is None else job),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "plexrl_slurm.cli.main", "run", *words],
        cwd=home,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def waits(reason: str) -> tuple[int, dict[str, Any]]:
    sentence = f"job 42 is not admitted yet: {reason}"
    return 409, {"error": sentence, "exit_code": 75}


def test_a_job_of_the_services_becomes_the_command(daemon: FakeDaemon, on_slurm: Path) -> None:
    daemon.answers[EXCHANGE] = ANSWER
    show = "echo $TINKER_API_KEY $PLEXRL_JOB_ID $SLURM_JOB_ID $$; cat; exit 4"
    with start(on_slurm, "--", "sh", "-c", show, stdin=subprocess.PIPE) as process:
        out, err = process.communicate("in\n", timeout=20)
    assert (process.returncode, err) == (4, "")
    assert out == f"tml-x 7 42 {process.pid}\nin\n"
    assert daemon.routes() == [EXCHANGE]


def test_a_signal_ends_the_command_as_if_it_ran_alone(daemon: FakeDaemon, on_slurm: Path) -> None:
    daemon.answers[EXCHANGE] = ANSWER
    with start(on_slurm, "--", "sh", "-c", "yes | head -1; kill -TERM $$") as process:
        out, err = process.communicate(timeout=20)
    # With SIGPIPE ignored, yes would complain.
    assert (process.returncode, out, err) == (-signal.SIGTERM, "y\n", "")


def test_an_array_task_and_a_het_job_are_known_by_their_own_names(
    daemon: FakeDaemon, on_slurm: Path
) -> None:
    for job, name in (
        (
            {"SLURM_JOB_ID": "45", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "3"},
            "42_3",
        ),
        ({"SLURM_JOB_ID": "43", "SLURM_JOB_ID_HET_GROUP_0": "42"}, "42"),
    ):
        daemon.answers[f"POST /slurm-jobs/{name}/credentials"] = ANSWER
        with start(on_slurm, "--", "true", job=job) as process:
            process.communicate(timeout=20)
        assert process.returncode == 0
        assert daemon.routes()[-1] == f"POST /slurm-jobs/{name}/credentials"


def test_any_other_job_is_queued_and_waits_for_its_turn(daemon: FakeDaemon, on_slurm: Path) -> None:
    turns = iter(
        [
            (503, {"error": "the daemon restarts", "exit_code": 69}),
            (404, {"error": "no job", "exit_code": 66}),
            waits("both train WPGs are full"),
            (503, {"error": "the database is locked", "exit_code": 75}),
            waits("one train WPG is full"),
            ANSWER,
        ]
    )
    daemon.answers[EXCHANGE] = lambda: next(turns)
    words = (
        "--model=tiny",
        "--seed=3",
        "--max-slowdown=2",
        "--",
        "sh",
        "-c",
        "echo $TINKER_API_KEY",
    )
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "night", "SLURM_JOB_ACCOUNT": "physics"}
    with start(on_slurm, *words, job=job) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "tml-x\n")
    assert daemon.body("POST /jobs") == {
        "partition": "rlvr",
        "name": "night",
        "account": "physics",
        "models": ["tiny"],
        "priority": 1,
        "seed": 3,
        "script": "sh -c 'echo $TINKER_API_KEY'",
        "options": {"max_slowdown": "2.0"},
    }
    assert daemon.body("POST /jobs/7/bind") == {"slurm_id": "42"}
    assert "POST /jobs/7/cancel" not in daemon.routes()
    assert "job 42 is not admitted yet: one train WPG is full" in err


def test_a_job_that_was_released_early_waits_and_its_options_do_not_count(
    daemon: FakeDaemon, on_slurm: Path
) -> None:
    turns = iter([waits("its turn has not come"), ANSWER])
    daemon.answers[EXCHANGE] = lambda: next(turns)
    with start(on_slurm, "--model=tiny", "--", "true") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "what was said there counts" in err
    assert daemon.routes() == [EXCHANGE, EXCHANGE]


def test_who_gives_up_waiting_leaves_the_queue_and_keeps_the_slurm_job(
    daemon: FakeDaemon, on_slurm: Path
) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 130)):
        daemon.asked.clear()
        daemon.answers[EXCHANGE] = lambda: (
            (404, {"error": "no job", "exit_code": 66})
            if "POST /jobs" not in daemon.routes()
            else waits("both train WPGs are full")
        )
        with start(on_slurm, "--", "true") as process:
            while daemon.routes().count(EXCHANGE) < 2:
                time.sleep(0.01)
            process.send_signal(number)
            process.communicate(timeout=20)
        assert process.returncode == code
        cancelled = daemon.body("POST /jobs/7/cancel")
        assert cancelled["keep_slurm_job"] is True


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        pytest.param(
            {"POST /jobs/7/bind": (404, {"error": "no Slurm job '42'", "exit_code": 66})},
            66,
            "no Slurm job '42'",
            id="Slurm does not know it",
        ),
        pytest.param({}, 66, "no queued job '42'", id="cancelled while it waits"),
    ],
)
def test_what_fails_is_taken_back(
    daemon: FakeDaemon, on_slurm: Path, changes: dict[str, Any], code: int, sentence: str
) -> None:
    daemon.answers |= changes
    with start(on_slurm, "--", "true") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert sentence in err
    assert daemon.body("POST /jobs/7/cancel")["keep_slurm_job"] is True


def test_a_command_that_cannot_be_run_is_never_queued(daemon: FakeDaemon, on_slurm: Path) -> None:
    with start(on_slurm, "--", "nonesuch") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 65
    assert "there is no program nonesuch here" in err
    assert daemon.routes() == []


def test_a_program_of_another_machine_is_taken_back(daemon: FakeDaemon, on_slurm: Path) -> None:
    turns = iter([(404, {"error": "no job", "exit_code": 66}), ANSWER])
    daemon.answers[EXCHANGE] = lambda: next(turns)
    (on_slurm / "foreign").write_bytes(b"\x7fELF nonsense")
    (on_slurm / "foreign").chmod(0o755)
    with start(on_slurm, "--", "./foreign") as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 65
    assert "./foreign cannot be run here: Exec format error" in err
    assert "POST /jobs/7/cancel" in daemon.routes()
