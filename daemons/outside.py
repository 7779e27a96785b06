"""What keeps a waiting job from a place though it is its turn, because it could not start."""

from collections.abc import Mapping

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.core.limits import Held, HeldKind
from plexrl_slurm.daemons.job_views import USER_HOLD
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.slurm.eligible import held_by_slurm
from plexrl_slurm.slurm.port import JobStatus, SlurmState


def held_outside(row: JobRow, slurm: Mapping[SlurmId, JobStatus], at_us: int) -> Held | None:
    """Why Slurm would not start a waiting job, or its owner does not let it; ``slurm``: what Slurm
    said last."""
    if row.slurm_id is None:
        return None
    name = SlurmId(row.slurm_id)
    status = slurm.get(name)
    waits = status is None or status.state is SlurmState.PENDING
    if waits and row.options.get(USER_HOLD) == "user":
        return Held(kind=HeldKind.OWNER, sentence=f"its owner holds it: scontrol release {name}")
    return held_by_slurm(name, slurm, at_us)
