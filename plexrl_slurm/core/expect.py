"""Who is expected next on a training WPG, so that its image can be brought near meanwhile."""

from collections.abc import Callable, Sequence
from typing import Final

from plexrl_slurm.core.estimates import Estimates
from plexrl_slurm.core.ids import DeploymentId
from plexrl_slurm.core.lane import Lane, Tenant
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.tiers import next_use_us

#: Of those that do not wait yet, another must come so much sooner to be expected instead: this
#: part of the time until then.
MARGIN: Final = 8


def expected(
    lane: Lane, estimates: Estimates, best: Callable[[Sequence[Tenant]], Tenant]
) -> DeploymentId | None:
    """Whoever waits, by ``best``; if nobody does, whoever comes back first, as far as one can
    tell. ``None`` if there is nobody else, or nothing to bring."""
    if lane.wpg is None or lane.wpg.pool is not Pool.TRAIN or not lane.up or lane.draining:
        return None
    waiting = [tenant for tenant in lane.waiting.values() if _comes(lane, tenant)]
    if lane.owed in waiting and lane.owed is not None:
        return lane.owed.name
    if waiting:
        return (best(waiting) if len(waiting) > 1 else waiting[0]).name
    absent = [tenant for tenant in lane.tenants.values() if _comes(lane, tenant)]
    comes_us = {tenant.name: _back_us(lane, tenant, estimates) for tenant in absent}
    if not comes_us:
        return None
    first = min(comes_us, key=lambda name: (comes_us[name], name))
    kept = lane.expected
    if kept is not None and kept in comes_us:
        margin_us = (comes_us[kept] - lane.now_us) // MARGIN
        return first if comes_us[first] < comes_us[kept] - margin_us else kept
    return first


def _comes(lane: Lane, tenant: Tenant) -> bool:
    program = tenant.program
    return (
        program is not None
        and program.image is not None
        and not program.broken
        and not tenant.gone
        and tenant is not lane.resident
        and (lane.move is None or tenant is not lane.move.incoming)
    )


def _back_us(lane: Lane, tenant: Tenant, estimates: Estimates) -> int:
    phase = lane.phases.get(("", tenant.last_job))
    if phase is None or phase.last_end_us is None or phase.last_kind is None:
        return next_use_us(last_us=0, gap_us=None, now_us=lane.now_us)
    gap_us = estimates.gap_us(tenant.last_job, phase.last_kind)
    return next_use_us(last_us=phase.last_end_us, gap_us=gap_us, now_us=lane.now_us)
