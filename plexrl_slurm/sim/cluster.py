"""The simulated partition: its pools, its speeds, and its configuration."""

from dataclasses import dataclass, field

from plexrl_slurm.core.backlog import HOUR_US
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.grouping import Placement, Pools, Rules
from plexrl_slurm.core.placements import PLACEMENTS as PLACEMENTS
from plexrl_slurm.core.tails import TailRules

GB = 10**9
NODE_GPUS = 8
#: More in one partition are a mistake.
MOST_GPUS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hardware: two pools of GPUs in nodes."""

    train_gpus: int
    rollout_gpus: int
    node_gpus: int = NODE_GPUS
    #: Host memory of a node.
    node_bytes: int = 1500 * GB
    #: Between one GPU and host memory, one way, pinned.
    gpu_bytes_per_s: int = 50 * GB
    #: Disks of a node for images that host memory has no room for, and how fast those come back.
    nvme_bytes: int = 0
    nvme_bytes_per_s: int = 6 * GB
    #: Between one node and the shared file system, one way.
    shared_bytes_per_s: int = 5 * GB
    #: Of an hour of one GPU, in any currency: pools need not have the same GPUs.
    train_price: float = 1.0
    rollout_price: float = 1.0

    def move_us(self, image_bytes: int, gpus: int) -> int:
        """An image from host memory to ``gpus`` GPUs, or back."""
        return image_bytes * 1_000_000 // (self.gpu_bytes_per_s * gpus)

    def pools(self) -> Pools:
        """As placement sees it while nobody is there."""
        return Pools(
            train_free=self.train_gpus,
            rollout_free=self.rollout_gpus,
            node_gpus=self.node_gpus,
            node_bytes=self.node_bytes,
            nvme_bytes=self.nvme_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the partition is run."""

    policy: str = "atc_h"
    #: Of :class:`Placement`, or ``spread_backfill``.
    rules: Rules = field(default_factory=Rules)
    backfill: bool = True
    guard_us: int = 72 * HOUR_US
    depth: int = 64
    hold_us: int = 2_000_000
    hysteresis: float = 4.0
    #: Steps after which a job's own measured profile replaces what was guessed; 0: the guess
    #: is exact from the start.
    learn_steps: int = 5
    #: Standard deviation of the logarithm of guess over truth, where there is no history.
    guess_sigma: float = 0.5
    #: A job may train on a WPG up to so many times as large as it asked; 1: only on its own shape.
    widest: float = 2.0
    #: Share of a phase that gets shorter in proportion to the GPUs of a larger WPG.
    scaling: float = 0.8
    #: A job moves to another group if that is expected to be worth it for so long, and not again
    #: before; 0: nobody moves.
    regroup_us: int = HOUR_US // 2
    #: Mean time between two losses of a node; 0: none is lost.
    node_loss_hours: float = 0.0
    #: From the loss of a node to its WPG with a new one.
    restart_us: int = 300_000_000
    #: What becomes of tails of rollouts that others wait for, where WPGs are held and shared;
    #: ``None``: a rollout is one call, and has none.
    tails: TailRules | None = None
    #: Two rollouts at once take so many percent longer each; a paused call, so much.
    slowdown: int = 20
    prefill_us: int = 500_000
    #: Time limit of a hold, which ends then and begins again on the same nodes; 0: none has one.
    hold_limit_us: int = 0
    #: From the end of a hold to its engines' start in the next one.
    renew_us: int = 300_000_000
    seed: int = 1


def find(name: str) -> tuple[Placement, bool]:
    """A placement by name. Raises ``BadInput``."""
    try:
        return PLACEMENTS[name]
    except KeyError:
        known = ", ".join(PLACEMENTS)
        raise BadInput(f"there is no placement {name!r}: choose one of {known}") from None


def prices(ratio: str) -> tuple[float, float]:
    """Of a GPU-hour of training and of rollout, from ``T:R``. Raises ``BadInput``."""
    try:
        train, rollout = (float(part) for part in ratio.split(":"))
    except ValueError:
        train = rollout = 0.0
    if not (0.001 <= train <= 1e6 and 0.001 <= rollout <= 1e6):
        raise BadInput(
            f"--prices {ratio}: give two numbers from 0.001 to a million, such as 2.85:1"
        )
    return train, rollout


def split(gpus: int, ratio: str) -> Cluster:
    """``gpus`` GPUs divided ``T:R``, in whole nodes. Raises ``BadInput``."""
    parts = ratio.split(":")
    if len(parts) != 2 or not all(
        part.isdecimal() and len(part) < 10 and int(part) > 0 for part in parts
    ):
        raise BadInput(f"--split {ratio}: give two positive numbers, such as 2:1")
    train, rollout = map(int, parts)
    node = NODE_GPUS
    nodes = gpus // node
    if gpus < 2 * node or gpus % node or gpus > MOST_GPUS:
        raise BadInput(
            f"--gpus {gpus}: give a multiple of {node}, at least {2 * node} and at most {MOST_GPUS}"
        )
    train_nodes = min(nodes - 1, max(1, round(nodes * train / (train + rollout))))
    return Cluster(train_gpus=train_nodes * node, rollout_gpus=(nodes - train_nodes) * node)
