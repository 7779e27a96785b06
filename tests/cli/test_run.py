"""plexrl run: the local adapter really runs the command; the fake daemon releases it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
