"""What the partition believes of a job: a guess, its like's history, its own first steps."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from plexrl_slurm.core.grouping import Member, Placement
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.job import SimJob
from plexrl_slurm.sim.trace import TraceJob


class Profiles:
    """Learns; guesses with the plan's error where it has learned nothing."""

    def __init__(self, cluster: Cluster, plan: Plan, sizes: Iterable[int] = ()) -> None:
        """``sizes``: of the training WPGs that the partition has."""
        self._cluster, self._plan = cluster, plan
        self._sizes = sorted(set(sizes))
        self._history: dict[tuple[str, str, str], Profile] = {}
        # Apart from the losses of nodes: those must not change what is believed.
        self._rng = np.random.default_rng((plan.seed, 1))

    def member(self, job: SimJob) -> Member:
        """The job as placement sees it at its submission."""
        trace = job.trace
        return Member(
            job=job.number,
            train_gpus=trace.train.gpus,
            rollout_gpus=trace.rollout.gpus,
            image_bytes=trace.model.image_bytes,
            profile=self._guess(job),
            max_slowdown=trace.slo.max_slowdown,
            shapes=self._shapes(trace.train.gpus),
        )

    def _shapes(self, gpus: int) -> tuple[tuple[int, float], ...]:
        """Larger WPGs that would do. A part of a phase does not get shorter with more GPUs."""
        if self._plan.rules.placement is not Placement.FIT:
            return ()  # the others are the paper's
        most = gpus * self._plan.widest
        return tuple(
            (size, 1 - self._plan.scaling * (1 - gpus / size))
            for size in self._sizes
            if gpus < size <= most
        )

    def learn(self, job: SimJob) -> Profile:
        """It has taken its first steps: what they were like, for it and for its like."""
        learned = job.measured(self._plan.learn_steps, self._switch_us(job))
        self._history[_alike(job.trace)] = learned
        return learned

    def _switch_us(self, job: SimJob) -> int:
        return 2 * self._cluster.move_us(job.trace.model.image_bytes, job.trace.train.gpus)

    def _guess(self, job: SimJob) -> Profile:
        known = self._history.get(_alike(job.trace))
        if known is not None:
            return replace(known, weight=job.weight)
        truth = job.declared(self._switch_us(job))
        if not self._plan.learn_steps or not self._plan.guess_sigma:
            return truth
        off = np.exp(self._plan.guess_sigma * self._rng.standard_normal(2))
        phase_us = max(1, int(truth.phase_us * off[0]))
        away_us = int((truth.step_us - (0 if truth.overlaps else truth.phase_us)) * off[1])
        step_us = max(away_us, phase_us) if truth.overlaps else away_us + phase_us
        return Profile(
            step_us=max(1, step_us),
            phase_us=phase_us,
            function_us=min(truth.function_us, phase_us),
            switch_us=truth.switch_us,
            overlaps=truth.overlaps,
            slack_us=max(0, away_us - phase_us) if truth.overlaps else 0,
            spread_us=truth.spread_us,
            weight=truth.weight,
        )


def _alike(trace: TraceJob) -> tuple[str, str, str]:
    """What jobs share that are alike: the user, the model, the mode."""
    return (trace.user, trace.model.name, trace.mode)
