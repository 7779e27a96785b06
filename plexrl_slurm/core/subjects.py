"""What messages are about: WPGs, deployments, calls, and what a WPG does."""

from enum import StrEnum

from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.records import dataclass


class Pool(StrEnum):
    """Which part of a hold a WPG lives in."""

    TRAIN = "train"
    ROLLOUT = "rollout"


class FunctionKind(StrEnum):
    """The LLM functions a job may call."""

    CREATE = "create"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_STATE = "save_state"
    LOAD_STATE = "load_state"
    #: ``save_weights_for_sampler``: the training side's half of a weight sync.
    PUBLISH = "publish"
    SAMPLE = "sample"


#: Functions that leave the deployment's state as it was. Reads of one deployment may share.
READS = frozenset(
    {FunctionKind.FORWARD, FunctionKind.SAMPLE, FunctionKind.SAVE_STATE, FunctionKind.PUBLISH}
)
#: Functions that change the image: after them it is dirty and must be saved when it leaves.
WRITES = frozenset(FunctionKind) - READS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wpg:
    """A worker process group: GPUs that always work on the same function."""

    id: WpgId
    pool: Pool
    #: GPUs (or what counts as one) it occupies; every microsecond of it counts this often.
    gpus: int
    #: It has none of its own, and takes turns on those of this WPG, which is on the same nodes.
    shares: WpgId | None = None
    #: Its memory was budgeted for a second engine, in which a tail may run on beside another's.
    second_slot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A training deployment, or a snapshot that is sampled: what can be resident on a WPG."""

    id: DeploymentId
    job: JobId
    pool: Pool
    #: Its home; only :class:`DeploymentMoved` changes it.
    wpg: WpgId
    #: Bytes that a switch moves when it is clean (in) or dirty (in and out).
    image_bytes: int
    #: Deployments of equal content share residency (the same base model sampled by two jobs).
    content: str
    #: Scheduling weight of the job.
    priority: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One accepted call. ``(deployment, seq)`` is its identity; a sample's seq is arrival order.

    A training deployment's calls take effect in the order of ``seq``, from 0 (create) on
    without holes, whatever order they arrive in.
    """

    id: CallId
    deployment: DeploymentId
    job: JobId
    kind: FunctionKind
    seq: int
    #: Tokens it touches, for estimates and for splitting shared busy time.
    tokens: int = 0
    #: The server splits a long call into so many parts; each is run, and scheduled, by itself.
    parts: int = 1
    #: A call that is known to fail (bad input). It waits for its turn, then fails without
    #: occupying a GPU, so that its seq is consumed.
    doomed: bool = False


class Activity(StrEnum):
    """What a held GPU-microsecond was spent on. held = the sum of these."""

    BUSY = "busy"
    SWITCH = "switch"
    #: The WPG waits for the resident's next call (anticipatory hold).
    KEPT = "kept"
    IDLE = "idle"
    DOWN = "down"
