"""A partition as it is held: its WPGs stay for the whole run, and jobs share both pools.

The other worlds hold what placement asks for, as on a large cluster. This one answers what a
small site asks: these WPGs, these jobs; how long are they held?
"""

from collections.abc import Sequence
from dataclasses import replace

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.grouping import Group
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.job import SimJob
from plexrl_slurm.sim.records import Record
from plexrl_slurm.sim.trace import TraceJob
from plexrl_slurm.sim.world import World, train_wpg


class HeldWorld(World):
    """Jobs begin when they are submitted, on the WPG of each pool with the fewest."""

    keeps_empty = True

    def __init__(
        self,
        trace: list[TraceJob],
        wpgs: Sequence[Wpg],
        cluster: Cluster,
        plan: Plan,
        *,
        chart: bool = False,
    ) -> None:
        """``cluster`` says how fast and how large it is. Raises ``BadInput`` for a job that fits
        none of ``wpgs``."""
        super().__init__(trace, cluster, replace(plan, regroup_us=0), chart=chart)
        self._rollouts: dict[WpgId, set[JobId]] = {}
        self._sampled_on: dict[JobId, WpgId] = {}
        self._gpus = {wpg.id: wpg.gpus for wpg in wpgs}
        pools = [[wpg for wpg in wpgs if wpg.pool is pool] for pool in Pool]
        for job in trace:
            for has, pool, gpus in zip(
                pools, Pool, (job.train.gpus, job.rollout.gpus), strict=True
            ):
                if all(wpg.gpus != gpus for wpg in has):
                    held = ", ".join(f"{wpg.id} with {wpg.gpus}" for wpg in has) or "none"
                    raise BadInput(
                        f"job {job.id} needs a {pool} WPG of {gpus} GPUs, and held are {held}: "
                        f"change {pool}.gpus in the trace, or the partition's [[wpg]] tables"
                    )
        self.now_us = min((job.submit_us for job in trace), default=0)
        for number, wpg in enumerate(pools[0]):
            group = Group(number=number, gpus=wpg.gpus, host_bytes=0)
            self.pools.groups[number] = group
            self.hold(train_wpg(number), Pool.TRAIN, wpg.gpus)
        for wpg in pools[1]:
            self._rollouts[wpg.id] = set()
            self.hold(wpg.id, Pool.ROLLOUT, wpg.gpus)
            self._devices[wpg.id].group = len(pools[0]) + len(self._rollouts)

    def _submitted(self, number: JobId) -> None:
        record = self.records[number]
        member = self.profiles.member(record.job)
        groups = [g for g in self.pools.groups.values() if g.gpus == member.train_gpus]
        group = min(groups, key=lambda each: (len(each.members), each.number))
        group.members[number] = member
        rollouts = [w for w in self._rollouts if self._gpus[w] == member.rollout_gpus]
        rollout = min(rollouts, key=lambda each: (len(self._rollouts[each]), each))
        self._rollouts[rollout].add(number)
        self._sampled_on[number] = rollout
        record.start_us, record.group = self.now_us, group.number
        self.begin(member, rollout)

    def rollout_bytes(self, job: SimJob) -> int:
        model = job.trace.model
        return int(model.params * model.rollout_bytes_per_param)

    def _leave(self, record: Record, group: Group) -> None:
        self._rollouts[self._sampled_on.pop(record.job.number)].discard(record.job.number)
        if all(each.end_us >= 0 for each in self.records.values()):
            for number in list(self.pools.groups):
                self.give_back(number)
            for wpg in self._rollouts:
                number = self._devices[wpg].group
                self._group_us[number] = self.release(wpg)
