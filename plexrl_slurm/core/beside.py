"""A tail that runs on in the second engine slot of a WPG, beside the resident.

The resident *steps aside*: its running samples go on, none is admitted any more, and who waited is
switched in and becomes the resident. Others may follow that one. The slot is free when the last
sample of the tail has ended. If its own next samples are to run before that, it becomes the
resident again, by a switch that moves nothing. At most two are on the device: one of each.
"""

from plexrl_slurm.core.books import Books
from plexrl_slurm.core.ids import CauseId, DeploymentId
from plexrl_slurm.core.lane import Lane, Tenant
from plexrl_slurm.core.messages import WpgUp
from plexrl_slurm.core.residency import Residency
from plexrl_slurm.core.tails import TailRules

# -- decisions --------------------------------------------------------------------------------


def may(lane: Lane, rules: TailRules) -> bool:
    """Whether the resident of ``lane`` may step aside: there is a slot, and it is free.

    A sample that has died with its ranks stays alone, so that others are not blamed for it.
    """
    return (
        rules.co_resident
        and lane.wpg is not None
        and lane.wpg.second_slot
        and lane.beside is None
        and lane.group is None
        and lane.resident is not None
        and lane.resident.program is None
        and not lane.pausing
        and all(run.entry is not None and not run.entry.deaths for run in lane.running.values())
    )


def begin(lane: Lane) -> None:
    """The resident steps aside."""
    lane.beside, lane.resident = lane.resident, None
    lane.leaving, lane.most = False, 0


def leave(lane: Lane, cause: CauseId) -> None:
    """The slot is free once its tail has ended."""
    tenant, move = lane.beside, lane.move
    if tenant is None or (move is not None and move.incoming is tenant):
        return
    if not any(run.tenant is tenant or run.entry is None for run in lane.running.values()):
        lane.beside = None
        tenant.lose(cause)


def loads(lane: Lane, tenant: Tenant, cause: CauseId) -> None:
    """``tenant`` is switched in; in the second slot it is on the device already."""
    if tenant is not lane.beside:
        tenant.step(Residency.LOADING, cause)


def whose(lane: Lane, incoming: Tenant) -> DeploymentId | None:
    """Of whom a tail runs on while ``incoming`` is switched in, and after that."""
    return None if lane.beside in (None, incoming) else _name(lane.beside)


def _name(tenant: Tenant | None) -> DeploymentId | None:
    return None if tenant is None else tenant.name


# -- facts ------------------------------------------------------------------------------------


def came(lane: Lane, incoming: Tenant, cause: CauseId) -> None:
    """``incoming`` is the resident now."""
    if lane.beside is incoming:
        lane.beside = None
    else:
        incoming.step(Residency.RESIDENT, cause)


def found(books: Books, lane: Lane, event: WpgUp, resident: Tenant | None) -> None:
    """What a WPG says it has in its second slot, after a restart of the daemon."""
    home = None if event.beside is None else books.homes.get(event.beside)
    if home is None or home[0] is not lane or home[1] is resident or not event.running:
        return
    if home[1].program is None and lane.wpg is not None and lane.wpg.second_slot:
        lane.beside = home[1]
        home[1].step(Residency.RESIDENT, event.cause)


def recognised(lane: Lane, tenant: Tenant, cause: CauseId) -> None:
    """A call of ``tenant`` runs: so it is on the device, in one of the slots."""
    if tenant in (lane.resident, lane.beside):
        return
    if lane.resident is None:
        lane.resident = tenant
    elif lane.beside is None and lane.wpg is not None and lane.wpg.second_slot:
        lane.beside = tenant
    else:
        return
    if tenant.where.at is not Residency.RESIDENT:
        tenant.step(Residency.RESIDENT, cause)
