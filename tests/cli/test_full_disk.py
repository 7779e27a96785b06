"""Where the answer goes is full."""

import os
import subprocess
import sys
from pathlib import Path


def test_an_answer_that_cannot_be_written_is_said_in_one_sentence() -> None:
    code = "import sys; from plexrl_slurm.cli.main import main; main(sys.argv[1:])"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        74,
        "plexrl: error: the answer cannot be written (No space left on device): make room there\n",
    )
