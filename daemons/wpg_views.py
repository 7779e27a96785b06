"""What every WPG does, for ``plexrl sinfo``."""

from typing import Any

from plexrl_slurm.core.explain import WpgView
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.daemons.shell import Shell


def wpg_views(shell: Shell) -> list[dict[str, Any]]:
    """Every held WPG, as the core sees it."""
    homes = shell.deployments
    return [
        {
            "id": view.wpg,
            "pool": str(view.pool),
            "gpus": view.gpus,
            "state": "asleep" if _sleeps(view) else str(view.activity),
            # Whose GPUs it has, and with whom it takes turns on them.
            "shares": view.shares,
            "shares_with": list(view.shares_with),
            "asleep": view.asleep,
            "draining": view.draining,
            "resident": view.resident,
            "resident_job": (
                homes[view.resident].job
                if view.resident is not None and view.resident in homes
                else None
            ),
            # Whose tail runs on beside it.
            "beside": view.beside,
            "beside_jobs": list(view.beside_jobs),
            "jobs": list(view.jobs),
            "since_us": view.since_us,
            "waiting": view.queue_length,
            "waiting_jobs": list(view.waiting_jobs),
            "running": view.running,
            "deployments": sum(deployment.wpg == view.wpg for deployment in homes.values()),
        }
        for view in shell.core.views()
    ]


def _sleeps(view: WpgView) -> bool:
    return view.asleep and view.activity is Activity.IDLE
