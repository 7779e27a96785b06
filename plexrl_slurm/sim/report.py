"""What a run shows, as figures: the same names in JSON, tables and plots."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from plexrl_slurm.core.messages import Activity, Pool
from plexrl_slurm.sim.world import World

_HOUR_US = 3_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdowns:
    """Time of a job from its start to its end, over the same alone."""

    mean: float
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """One job."""

    id: str
    user: str
    model: str
    mode: str
    steps: int
    train_wpg: str
    submit_us: int
    start_us: int
    end_us: int
    alone_us: int
    slowdown: float
    max_slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run."""

    policy: str
    placement: str
    train_gpus: int
    rollout_gpus: int
    seed: int
    jobs: int
    steps: int
    #: Work per held GPU-hour, against every job alone on WPGs of its own.
    efficiency: float
    #: The same for each price of a GPU-hour: of the two pools, ``Cluster.train_price`` and
    #: ``rollout_price``. Equal to ``efficiency`` where those are equal.
    cost_efficiency: float
    train_price: float
    rollout_price: float
    gpu_hours_held: float
    #: Of these, of the training pool.
    train_gpu_hours_held: float
    gpu_hours_isolated: float
    gpu_hours_per_step_saving_percent: float
    slowdown: Slowdowns
    promises_missed_percent: float
    #: Of held GPU time, both pools.
    busy_percent: float
    switch_percent: float
    kept_percent: float
    idle_percent: float
    down_percent: float
    #: Of the cluster's GPUs between the first submission and the last end.
    held_percent: float
    makespan_us: int
    mean_completion_us: int
    mean_queued_us: int
    #: Holds that ended at their time limit and began again.
    renewals: int
    decisions: int
    events: int
    wall_seconds: float

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def figures(world: World, placement: str, wall_seconds: float) -> Figures:
    """Figures of a run that has ended."""
    jobs = per_job(world)
    gpus = {
        record.job.trace.id: (record.job.trace.train.gpus, record.job.trace.rollout.gpus)
        for record in world.records.values()
    }
    alone_train_us = sum(job.alone_us * gpus[job.id][0] for job in jobs)
    alone_rollout_us = sum(job.alone_us * gpus[job.id][1] for job in jobs)
    alone_gpu_us = alone_train_us + alone_rollout_us
    held_us = sum(world.gpu_us.values())
    held_train_us = sum(us for (pool, _), us in world.gpu_us.items() if pool is Pool.TRAIN)
    shares = {
        activity: sum(us for (_, what), us in world.gpu_us.items() if what is activity)
        for activity in Activity
    }
    slow = sorted(job.slowdown for job in jobs)
    missed = sum(job.slowdown > job.max_slowdown for job in jobs)
    first_us = min((job.submit_us for job in jobs), default=0)
    last_us = max((job.end_us for job in jobs), default=0)
    cluster = world.cluster

    def cost(train_us: float, rollout_us: float) -> float:
        return train_us * cluster.train_price + rollout_us * cluster.rollout_price

    held_cost = cost(held_train_us, held_us - held_train_us)
    everything_us = (cluster.train_gpus + cluster.rollout_gpus) * (last_us - first_us)

    def percent(part: float, whole: float) -> float:
        return round(100 * part / whole, 3) if whole else 0.0

    count = max(1, len(jobs))
    return Figures(
        policy=world.plan.policy,
        placement=placement,
        train_gpus=cluster.train_gpus,
        rollout_gpus=cluster.rollout_gpus,
        seed=world.plan.seed,
        jobs=len(jobs),
        steps=sum(job.steps for job in jobs),
        efficiency=round(alone_gpu_us / held_us, 4) if held_us else 0.0,
        cost_efficiency=(
            round(cost(alone_train_us, alone_rollout_us) / held_cost, 4) if held_us else 0.0
        ),
        train_price=cluster.train_price,
        rollout_price=cluster.rollout_price,
        gpu_hours_held=round(held_us / _HOUR_US, 6),
        train_gpu_hours_held=round(held_train_us / _HOUR_US, 6),
        gpu_hours_isolated=round(alone_gpu_us / _HOUR_US, 6),
        gpu_hours_per_step_saving_percent=percent(alone_gpu_us - held_us, alone_gpu_us),
        slowdown=Slowdowns(
            mean=round(sum(slow) / count, 5),
            p50=quantile(slow, 0.5),
            p95=quantile(slow, 0.95),
            max=quantile(slow, 1.0),
        ),
        promises_missed_percent=percent(missed, count),
        busy_percent=percent(shares[Activity.BUSY], held_us),
        switch_percent=percent(shares[Activity.SWITCH], held_us),
        kept_percent=percent(shares[Activity.KEPT], held_us),
        idle_percent=percent(shares[Activity.IDLE], held_us),
        down_percent=percent(shares[Activity.DOWN], held_us),
        held_percent=percent(held_us, everything_us),
        makespan_us=last_us - first_us,
        mean_completion_us=sum(job.end_us - job.submit_us for job in jobs) // count,
        mean_queued_us=sum(job.start_us - job.submit_us for job in jobs) // count,
        renewals=world.lifetimes.renewed,
        decisions=world.decisions,
        events=world.events,
        wall_seconds=round(wall_seconds, 3),
    )


def per_job(world: World) -> list[JobFigures]:
    """Every job that has ended, in the order of its number."""
    found = []
    for record in world.records.values():
        if record.end_us < 0:
            continue
        trace, alone_us = record.job.trace, record.job.alone_us()
        found.append(
            JobFigures(
                id=trace.id,
                user=trace.user,
                model=trace.model.name,
                mode=trace.mode,
                steps=trace.length,
                train_wpg=f"train-{record.group}",
                submit_us=record.submit_us,
                start_us=record.start_us,
                end_us=record.end_us,
                alone_us=alone_us,
                slowdown=round((record.end_us - record.start_us) / alone_us, 6),
                max_slowdown=trace.slo.max_slowdown,
            )
        )
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
