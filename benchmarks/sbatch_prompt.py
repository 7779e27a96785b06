"""How long does a user wait for the prompt after `plexrl sbatch`, beside Slurm's own sbatch?

Needs a partition on a real Slurm whose daemon runs:
`python benchmarks/sbatch_prompt.py --config plexrl.toml [--runs 20]`. The three commands take
turns, so that what else the machine does meets all of them. The jobs are held, so that none of
them starts meanwhile, and cancelled in the end.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from plexrl_slurm.settings import read_site

#: What `plexrl sbatch` may take beyond sbatch and the start of a Python that imports click.
ALLOWED_S = 0.060
SCRIPT = "#!/bin/sh\n#SBATCH --job-name=prompt --time=1\n#PLEXRL --seed=1\ntrue\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and exit with 1 if it took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the partition's settings")
    parser.add_argument("--runs", type=int, default=20)
    given = parser.parse_args(arguments)
    site = read_site(given.config)
    if site.slurm is None:
        parser.error(f"{given.config}: [hold] backend is not slurm")
    environment = dict(os.environ)
    if site.slurm.conf is not None:
        environment["SLURM_CONF"] = str(site.slurm.conf)
    partition = site.slurm.controller_partition
    with tempfile.TemporaryDirectory() as folder:
        # As installed: compiled, also where this tree is not to be written to.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
        script = Path(folder) / "prompt.sh"
        script.write_text(SCRIPT)
        commands = {
            "sbatch": ["sbatch", "--parsable", "--hold", *_on(partition), str(script)],
            "python -c 'import click'": [sys.executable, "-c", "import click"],
            "plexrl sbatch": [
                *(sys.executable, "-m", "plexrl_slurm.cli.main", "sbatch", "--parsable"),
                *("--hold", "--config", str(given.config), str(script)),
            ],
        }
        spent: dict[str, list[float]] = {name: [] for name in commands}
        jobs: list[str] = []
        try:
            for turn in range(-1, given.runs):  # the first one only compiles
                for name, words in commands.items():
                    seconds, said = _timed(words, environment)
                    jobs += said.split()
                    if turn >= 0:
                        spent[name].append(seconds)
        finally:
            if jobs:
                subprocess.run(["scancel", *jobs], env=environment, check=True, timeout=60)
    return _report(spent)


def _on(partition: str) -> list[str]:
    return [f"--partition={partition}"] if partition else []


def _timed(words: Sequence[str], environment: Mapping[str, str]) -> tuple[float, str]:
    begin = time.perf_counter()
    done = subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return time.perf_counter() - begin, done.stdout


def _report(spent: Mapping[str, Sequence[float]]) -> int:
    print(f"{'milliseconds':26} {'median':>7} {'min':>7} {'max':>7}")
    for name, values in spent.items():
        row = (median(values), min(values), max(values))
        print(f"{name:26} " + " ".join(f"{value * 1000:7.1f}" for value in row))
    sbatch, click, ours = (median(values) for values in spent.values())
    extra = ours - sbatch - click
    verdict = "ok" if extra <= ALLOWED_S else "too much"
    print(
        f"plexrl sbatch - sbatch - click = {extra * 1000:.1f} ms "
        f"(allowed {ALLOWED_S * 1000:.0f}): {verdict}"
    )
    return 0 if extra <= ALLOWED_S else 1


if __name__ == "__main__":
    sys.exit(main())
