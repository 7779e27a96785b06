"""What is left of each job's promise, from what it has taken so far."""

from collections import defaultdict
from dataclasses import replace
from typing import Final

from plexrl_slurm.core.grouping import Group, allowance, kept
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.sim.job import SimJob

#: Looked at again after so many steps.
EVERY: Final = 8


class Promises:
    """Adds up the steps of jobs, as they would have been alone."""

    def __init__(self) -> None:
        self._done_us: dict[JobId, int] = defaultdict(int)

    def stepped(self, job: SimJob, steps: int, taken_us: int, group: Group) -> bool:
        """It has taken so many steps, in ``taken_us``; whether its group now asks too much."""
        done_us = self._done_us[job.number] = self._done_us[job.number] + job.step_us(steps - 1)
        if steps % EVERY:
            return False
        group.members[job.number] = member = replace(
            group.members[job.number],
            allowed=allowance(
                job.trace.slo.max_slowdown,
                done_us=done_us + job.create_us,
                taken_us=taken_us,
                left_us=(job.trace.steps - steps) * done_us / steps,
            ),
        )
        return member.allowed < member.max_slowdown and not kept(
            list(group.members.values()), 1.0, group.gpus
        )
