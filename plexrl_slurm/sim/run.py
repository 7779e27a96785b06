"""One simulation from its words to its figures."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.grouping import MEMORY_SHARE
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.sim.cluster import Cluster, Plan, find
from plexrl_slurm.sim.held import HeldWorld
from plexrl_slurm.sim.report import Figures, figures
from plexrl_slurm.sim.tailed import TailedWorld
from plexrl_slurm.sim.trace import TraceJob
from plexrl_slurm.sim.world import World

#: New objects between two searches for garbage cycles. A world makes millions of small values and
#: next to no cycle, so that Python's 700 cost a sixth of a run.
_GARBAGE: Final = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run that has ended."""

    figures: Figures
    world: World


def simulate(
    trace: list[TraceJob],
    cluster: Cluster,
    *,
    placement: str,
    plan: Plan,
    chart: bool = False,
    progress: Callable[[World], None] | None = None,
) -> Ran:
    """Run ``trace``; ``placement`` is a name of ``cluster.PLACEMENTS``.

    Raises ``BadInput`` for a job that the cluster can never hold, and unknown names.
    """
    kind, backfill = find(placement)
    refuse_impossible(trace, cluster)
    plan = replace(plan, rules=replace(plan.rules, placement=kind), backfill=backfill)
    begin = perf_counter()
    with _seldom_collecting():
        world = World(trace, cluster, plan, chart=chart)
        world.run(progress)
    return Ran(figures=figures(world, placement, perf_counter() - begin), world=world)


def simulate_held(
    trace: list[TraceJob],
    wpgs: Sequence[Wpg],
    cluster: Cluster,
    *,
    plan: Plan,
    chart: bool = False,
    progress: Callable[[World], None] | None = None,
) -> Ran:
    """Run ``trace`` on ``wpgs``, which are held for all of it. Raises ``BadInput``."""
    sums = {pool: sum(wpg.gpus for wpg in wpgs if wpg.pool is pool) for pool in Pool}
    cluster = replace(cluster, train_gpus=sums[Pool.TRAIN], rollout_gpus=sums[Pool.ROLLOUT])
    begin = perf_counter()
    with _seldom_collecting():
        kind = HeldWorld if plan.tails is None else TailedWorld
        world = kind(trace, wpgs, cluster, plan, chart=chart)
        world.run(progress)
    return Ran(figures=figures(world, "held", perf_counter() - begin), world=world)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.set_threshold(_GARBAGE, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def refuse_impossible(trace: list[TraceJob], cluster: Cluster) -> None:
    """Raise ``BadInput`` for the first job that would wait for ever."""
    for job in trace:
        for pool, gpus, has in (
            ("training", job.train.gpus, cluster.train_gpus),
            ("rollout", job.rollout.gpus, cluster.rollout_gpus),
        ):
            if gpus > has:
                raise BadInput(
                    f"job {job.id} needs {gpus} {pool} GPUs and the cluster has {has}: "
                    "give more --gpus, or another --split"
                )
        need, room = job.model.image_bytes, cluster.pools().host_bytes(job.train.gpus)
        if need > room:
            raise BadInput(
                f"job {job.id}: the state of {job.model.name} takes {need / 1e9:,.0f} GB of host "
                f"memory, and the nodes of {job.train.gpus} training GPUs have {room / 1e9:,.0f} "
                f"GB for images, {MEMORY_SHARE:.0%} of their memory and all of their disks: give "
                "more --node-memory, --node-nvme, or train.gpus"
            )
