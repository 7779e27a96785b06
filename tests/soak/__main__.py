"""``python -m tests.soak``: eight jobs, memory for two, random ``kill -9``; nothing may differ.

Runs as many rounds as fit into ``--minutes`` while ranks, agents and the daemon are killed, and
the same rounds once more undisturbed; exits with 1 and says what differed, and with which seed.
"""

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.soak import runs
from tests.soak.controllers import Seen, differences

#: Of the time that was asked for; the undisturbed run takes the rest or less.
_DISTURBED = 0.7


def main() -> int:
    """The exit status."""
    asked = _arguments()
    began = time.monotonic()
    logging.getLogger("tinker").setLevel(logging.ERROR)  # it tells of each call that waits
    folder = Path(tempfile.mkdtemp(prefix="plexrl-soak-"))
    kind = runs.KINDS[asked.engine]
    say(f"{asked.jobs} jobs, {asked.engine} engines, {asked.minutes:g} minutes, seed {asked.seed}")
    report: dict[str, Any] = {
        "seed": asked.seed,
        "engine": asked.engine,
        "jobs": asked.jobs,
        "minutes": asked.minutes,
        "folder": str(folder),
    }
    stall_s = 2 * kind.patience_s
    try:
        outcome = runs.disturbed(
            folder / "disturbed",
            kind,
            jobs=asked.jobs,
            seed=asked.seed,
            seconds=60 * asked.minutes * _DISTURBED,
            stall_s=stall_s,
            say=lambda text: say(f"disturbed, {text}"),
        )
        rounds = [len(seen.rounds) for seen in outcome.seen]
        others: list[Seen] = []
        wrong = [f"the books have a flaw: {flaw}" for flaw in outcome.flaws]
        if outcome.most_bytes > outcome.host_bytes and not kind.snapshots:
            wrong.append(
                f"images took {outcome.most_bytes} bytes in memory; host_bytes is "
                f"{outcome.host_bytes}"
            )
        if not outcome.moves.back:
            wrong.append("no image came back from the disk: nothing of it was tried")
        say(f"{len(outcome.kills)} kills, rounds {rounds}; now the same rounds undisturbed")
        others = runs.undisturbed(
            folder / "undisturbed",
            kind,
            rounds=rounds,
            seed=asked.seed,
            stall_s=stall_s,
            say=lambda text: say(f"undisturbed, {text}"),
        )
        wrong = differences(outcome.seen, others) + wrong + runs.left_running(folder)
        report |= {
            "kills": outcome.kills,
            "rounds": rounds,
            "weights": [seen.weights for seen in outcome.seen],
            "nvme": outcome.moves.row(),
            "most_host_bytes": outcome.most_bytes,
            "host_bytes": outcome.host_bytes,
        }
    except Exception as problem:
        traceback.print_exc()
        wrong = [f"{type(problem).__name__}: {problem}"]
    report |= {"differences": wrong, "seconds": round(time.monotonic() - began, 1)}
    if asked.report is not None:
        asked.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for sentence in wrong:
        say(sentence)
    if wrong:
        say(f"NOT identical: seed {asked.seed}; logs and books are in {folder}")
        return 1
    say(f"identical: {asked.jobs} jobs, {sum(rounds)} rounds, {len(outcome.kills)} kills")
    if not asked.keep:
        shutil.rmtree(folder)
    return 0


def say(text: str) -> None:
    """A line of progress."""
    print(f"soak: {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", 20)))
    parser.add_argument("--engine", choices=sorted(runs.KINDS), default="fake")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--report", type=Path, help="a JSON file for everything that it found")
    parser.add_argument("--keep", action="store_true", help="leave logs and books")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the SDK's native threads may abort an interpreter that is being torn down
