"""A user's controller for the live tests: steps of training and sampling, and what came of it.

``python -m tests.slurm_live.controller STEPS [PAUSE_S]`` prints one line of JSON at its end. It
knows the service by its environment only.
"""

import json
import sys
from typing import Any

from tests.scenarios.controller import train


class Me:
    """What ``train`` needs of a job."""

    @staticmethod
    def service() -> Any:
        import tinker

        return tinker.ServiceClient()


def note(step: int) -> None:
    """Progress, for tests that wait for it."""
    if step < 100:
        print(f"step {step}", file=sys.stderr, flush=True)


def main(steps: int, pause_s: float) -> None:
    """Nothing in it knows of Slurm."""
    me: Any = Me()
    seen = train(me, steps=steps, between=note, pause_s=pause_s)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
