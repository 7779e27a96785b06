"""What every WPG does, for ``plexrl sinfo``."""

from typing import Any, Final

from plexrl_slurm.core.explain import Asker, ReasonKind, WpgView
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.daemons.shell import Shell

#: What does not pass by itself when others have had their turn, if it is tried again.
_TROUBLES: Final = (ReasonKind.NO_ROOM, ReasonKind.SHARED, ReasonKind.DRAINING)


def wpg_views(shell: Shell, asker: Asker) -> list[dict[str, Any]]:
    """Every held WPG, as the core sees it."""
    homes = shell.deployments
    told = {each.wpg: shell.core.explain(each.wpg, asker) for each in shell.core.views()}
    owners = {name: home.job for name, home in homes.items()}
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
            "resident_job": owners.get(view.resident) if view.resident is not None else None,
            # Of those it works for now: what their users call them, and their rows.
            "slurm_ids": [asker.name(job) for job in view.jobs],
            "jobs": list(view.jobs),
            "since_us": view.since_us,
            "waiting": view.queue_length,
            "waiting_slurm_ids": [asker.name(job) for job in view.waiting_jobs],
            "waiting_jobs": list(view.waiting_jobs),
            "sentence": told[view.wpg].sentence,
            "trouble": [
                reason.sentence
                for reason in told[view.wpg].reasons
                if reason.kind in _TROUBLES and reason.until_us is not None
            ],
            "running": view.running,
            "deployments": sum(deployment.wpg == view.wpg for deployment in homes.values()),
        }
        for view in shell.core.views()
    ]


def _sleeps(view: WpgView) -> bool:
    return view.asleep and view.activity is Activity.IDLE
