"""What a run writes down: of each job, and of each WPG for charts."""

from dataclasses import dataclass

from plexrl_slurm.core.grouping import Why
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Activity
from plexrl_slurm.sim.job import SimJob


@dataclass(slots=True, kw_only=True)
class Stretch:
    """What one WPG did for a while; for charts."""

    wpg: WpgId
    gpus: int
    activity: Activity
    job: JobId | None
    start_us: int
    stop_us: int


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of one job."""

    job: SimJob
    submit_us: int
    start_us: int = -1
    end_us: int = -1
    #: GPU-microseconds that were held for it alone: its rollout WPG.
    own_gpu_us: int = 0
    group: int = -1
    why: Why | None = None
