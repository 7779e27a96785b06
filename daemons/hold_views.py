"""Holds for people, for JSON and for the decision about them."""

from collections.abc import Sequence
from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.holding import Fault, HoldPhase, HoldRules, Renewal, excluded
from plexrl_slurm.daemons.added_wpgs import why_lacking
from plexrl_slurm.daemons.held_wpgs import LiveHold
from plexrl_slurm.slurm_settings import HoldSettings


def view_of(hold: LiveHold, backend: str, slots: int) -> dict[str, Any]:
    """One hold; ``slots``: WPGs that the settings want of each."""
    return {
        "id": hold.id,
        "backend": backend,
        "slurm_id": hold.slurm_id,
        "state": _word(hold),
        "nodes": sorted({place.node for place in hold.places}),
        "wpgs": sorted(hold.wpgs),
        "since_us": hold.running_us or hold.submitted_us,
        "limit_end_us": hold.limit_end_us,
        "replaces": hold.replaces,
        "lost_nodes": hold.lost_nodes,
        "reason": hold.reason,
        "trouble": why_lacking(hold.id, hold.missing, local=backend == "local")
        or _lacks(hold, slots),
    }


def _lacks(hold: LiveHold, slots: int) -> str:
    """What a hold was made without; "" if it has all WPGs that the settings want."""
    if hold.phase is not HoldPhase.RUNNING or len(hold.wpgs) >= slots:
        return ""
    return (
        f"hold {hold.id} has {len(hold.wpgs)} of the {slots} WPGs in the settings: it has lost "
        f"nodes, or was made when [[wpg]] was another; the next hold has all of them, and `plexrl "
        f"partition down` and `up` begin one now"
    )


def _word(hold: LiveHold) -> str:
    if hold.phase is not HoldPhase.RUNNING:
        return str(hold.phase)
    if hold.draining:
        return "draining"
    return "up" if hold.came_up else "starting"


def excluded_views(faults: Sequence[Fault], rules: HoldSettings) -> list[dict[str, Any]]:
    """Nodes that are left out for a while."""
    out = excluded(now_us(), faults, rules.exclude_after, rules.exclude_us)
    return [
        {
            "node": node,
            "until_us": until_us,
            "reason": [fault.reason for fault in faults if fault.node == node][-1],
        }
        for node, until_us in sorted(out.items())
    ]


def rules_of(rules: HoldSettings) -> HoldRules:
    """The site's wishes as the decision takes them; a local hold has no time limit."""
    return HoldRules(
        min=rules.min,
        max=rules.max,
        renew_before_us=rules.renew_before_us,
        renewal=Renewal(rules.renewal),
        time_limit_us=None if rules.backend == "local" else rules.time_limit_us,
        scale_up_after_us=rules.scale_up_after_us,
        idle_release_us=rules.idle_release_us,
    )
