"""``scripts/beside.sh``: several commands at the same time, as ``make test`` runs its halves."""

import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "beside.sh"

#: Says when it is ready, and what it does once it is interrupted.
PATIENT = """
import sys, time
try:
    with open(sys.argv[1], "w") as ready:
        ready.write("ready")
    time.sleep(60)
except KeyboardInterrupt:
    with open(sys.argv[1], "w") as ready:
        ready.write("cleaned up")
"""


def run(*commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *commands], capture_output=True, text=True, timeout=60)


def test_what_each_says_comes_in_one_piece_and_in_their_order(tmp_path: Path) -> None:
    first = f"until [ -e {tmp_path}/second ]; do sleep 0.01; done; echo one"
    done = run(first, f"echo two; touch {tmp_path}/second")
    assert done.returncode == 0
    said = done.stdout.splitlines()
    assert said[0] == "one"
    assert said[-1] == "two"
    assert said[2].startswith("---- echo two")


def test_any_that_fails_makes_all_fail_and_the_others_go_on() -> None:
    for commands in (("exit 3", "echo second"), ("echo first", "echo second; exit 3")):
        done = run(*commands)
        assert done.returncode == 1
        assert "second" in done.stdout.splitlines()
        assert "exit 3" in done.stderr


def test_an_interrupt_reaches_all_and_waits_until_they_have_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / "patient.py").write_text(PATIENT)
    ready = [tmp_path / "first", tmp_path / "second"]
    commands = [f"exec {sys.executable} {tmp_path}/patient.py {path}" for path in ready]
    with subprocess.Popen([SCRIPT, *commands], stdout=subprocess.PIPE) as running:
        while not all(path.exists() and path.read_text() for path in ready):
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 130
    assert [path.read_text() for path in ready] == ["cleaned up", "cleaned up"]


def test_nothing_to_run_is_refused() -> None:
    done = run()
    assert done.returncode == 64
    assert done.stderr.startswith("usage: ")
