"""Wait for a job's end. A restart of the daemon meanwhile is only a pause."""

import time
from collections.abc import Callable
from typing import Any

from plexrl_slurm.cli.app import waiting
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.show import ENDED
from plexrl_slurm.core.errors import DaemonUnavailable, DatabaseUnavailable, PlexError

#: Between two questions.
STEP_S = 0.5
#: Exit codes of what may pass by itself.
_PASSING = frozenset({DaemonUnavailable.exit_code, DatabaseUnavailable.exit_code})
#: A daemon that is away for longer is not coming back by itself.
PATIENCE_S = 600.0


def wait_for_end(
    client: Client,
    slurm_id: str,
    *,
    between: Callable[[], None] = lambda: None,
    quiet: bool = False,
) -> dict[str, Any]:
    """The job's row when it has ended; ``between`` is called before every pause."""
    asked_until = time.monotonic() + PATIENCE_S
    if quiet:
        return _wait(client, slurm_id, between, lambda _: None, asked_until)
    with waiting(f"job {slurm_id} is queued") as show:
        return _wait(client, slurm_id, between, show, asked_until)


def _wait(
    client: Client,
    slurm_id: str,
    between: Callable[[], None],
    show: Callable[[str], None],
    asked_until: float,
) -> dict[str, Any]:
    while True:
        try:
            job = client.job(slurm_id)
            asked_until = time.monotonic() + PATIENCE_S
            if job["state"] in ENDED:
                return job
            show(_words(job))
        except PlexError as error:
            if error.exit_code not in _PASSING or time.monotonic() > asked_until:
                raise
            show(f"job {slurm_id}: still trying, because {error}")
        between()
        time.sleep(STEP_S)


def _words(job: dict[str, Any]) -> str:
    reason = f": {job['reason']}" if job.get("reason") else ""
    return f"job {job['slurm_id']} is {job['state']}{reason}, {job['steps']} steps"
