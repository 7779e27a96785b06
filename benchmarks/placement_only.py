"""What would another rule of placement save? In a minute instead of half an hour.

``python -m benchmarks.placement_only TRACES``: jobs do not run function by function here; they
progress as fast as the prediction says (give or take its error), and only what placement sees
happens: submissions, profiles learned, ends, moves. The groups, the queue and the regroupings are
those of the core. It came to 1.598 and 1.396 where the simulator found 1.590 and 1.390 (quarter
and week, before anything below was changed); slowdowns come out a little low.
"""

import argparse
import heapq
import math
import random
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from plexrl_slurm.core.backlog import HOUR_US, Backlog, Waiting
from plexrl_slurm.core.grouping import (
    Group,
    Home,
    Member,
    Placement,
    Pools,
    Rules,
    Why,
    allowance,
    place,
)
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.predict import Profile, slowdowns
from plexrl_slurm.core.regroup import Regrouping, merge, relieve
from plexrl_slurm.sim.cluster import Cluster, Plan, split
from plexrl_slurm.sim.job import SimJob
from plexrl_slurm.sim.profiles import Profiles
from plexrl_slurm.sim.trace import TraceJob, compressed, read_trace

#: Standard deviation of the logarithm of a job's real loss over the predicted.
ERROR = 0.22
#: A group stands still so long when one of its jobs moves, copying not counted.
DRAIN_US = 30_000_000


@dataclass(slots=True, eq=False)
class Job:
    """Its progress, in microseconds of its time alone."""

    sim: SimJob
    alone_us: int
    true: Profile
    left_us: float
    at_us: int = 0
    rate: float = 1.0
    start_us: int = -1
    end_us: int = -1
    moved_us: int = -1
    group: int = -1
    #: Of its next event; older ones do not count.
    turn: int = 0
    learned: bool = False


class Partition:
    """One run."""

    #: Whether what jobs have lost so far counts.
    allows = True
    #: Whether thin groups are merged.
    merges = True

    def __init__(self, trace: list[TraceJob], cluster: Cluster, plan: Plan) -> None:
        self.plan, self.cluster, self.now_us, self.moves = plan, cluster, 0, 0
        self.pools = Pools(
            train_free=cluster.train_gpus, rollout_free=cluster.rollout_gpus,
            node_gpus=cluster.node_gpus, node_bytes=cluster.node_bytes,
        )  # fmt: skip
        self.backlog = Backlog(guard_us=plan.guard_us, depth=plan.depth, joins_first=True)
        self.profiles = Profiles(cluster, plan, (job.train.gpus for job in trace))
        self.jobs: dict[JobId, Job] = {}
        self.held_us = 0.0
        self._used = 0
        self._doubtful: set[int] = set()
        self._numbers, self._order = count(1), count()
        self._heap: list[tuple[int, int, JobId, int]] = []
        for number, each in enumerate(trace, 1):
            sim = SimJob.of(number, each)
            switch_us = 2 * cluster.move_us(each.model.image_bytes, each.train.gpus)
            alone_us = sim.alone_us()
            self.jobs[JobId(number)] = Job(sim, alone_us, sim.declared(switch_us), float(alone_us))
            heapq.heappush(self._heap, (each.submit_us, next(self._order), JobId(number), 0))

    def run(self) -> str:
        """A row of the table."""
        while self._heap:
            at_us, look = self._heap[0][0], False
            self.held_us += self._used * (at_us - self.now_us)
            self.now_us = at_us
            while self._heap and self._heap[0][0] == at_us:
                _, _, number, turn = heapq.heappop(self._heap)
                if turn == self.jobs[number].turn:
                    self._happens(number)
                    look = True
            if look:
                self.backlog.run(at_us, self._place, self._take)
                self._regroup()
        return self._row()

    def _happens(self, number: JobId) -> None:
        job = self.jobs[number]
        trace = job.sim.trace
        if job.start_us < 0:
            job.turn = -1
            member = self.profiles.member(job.sim)
            self.backlog.arrive(
                Waiting(member=member, priority=trace.priority, since_us=self.now_us)
            )
            return
        group = self.pools.groups[job.group]
        self._settle(job)
        if not job.learned and job.left_us > 1:
            job.learned = True
            group.members[number] = replace(
                group.members[number], profile=self.profiles.learn(job.sim)
            )
            self._doubtful.add(group.number)
            self._next(number, job)
            return
        job.end_us = self.now_us
        del group.members[number]
        self.pools.rollout_free += trace.rollout.gpus
        self._used -= trace.rollout.gpus
        self._rate(group)

    def _place(self, member: Member) -> Home | Why:
        return place(member, self.pools, self.plan.rules)

    def _take(self, member: Member, home: Home) -> None:
        job = self.jobs[member.job]
        job.start_us = job.at_us = self.now_us
        self.pools.rollout_free -= member.rollout_gpus
        self._used += member.rollout_gpus
        group = self._new(member) if home.group is None else self.pools.groups[home.group]
        group.members[member.job] = member
        job.group = group.number
        self._rate(group)

    def _new(self, member: Member) -> Group:
        gpus = member.train_gpus
        group = Group(number=next(self._numbers), gpus=gpus, host_bytes=self.pools.host_bytes(gpus))
        self.pools.groups[group.number] = group
        self.pools.train_free -= gpus
        self._used += gpus
        return group

    def _rate(self, group: Group) -> None:
        """Who lives there has changed."""
        if not group.members:
            del self.pools.groups[group.number]
            self.pools.train_free += group.gpus
            self._used -= group.gpus
            return
        there = [
            replace(member, profile=self.jobs[number].true).on(group.gpus) or member.profile
            for number, member in group.members.items()
        ]
        key = sorted(group.members)
        for (number, profile), slow in zip(
            zip(group.members, there, strict=True), slowdowns(there), strict=True
        ):
            job = self.jobs[number]
            self._settle(job)
            luck = math.exp(random.Random(f"{key}/{number}").gauss(0, ERROR))
            job.rate = job.true.step_us / profile.step_us / (1 + (slow - 1) * luck)
            self._next(number, job)

    def _settle(self, job: Job) -> None:
        job.left_us -= (self.now_us - job.at_us) * job.rate
        job.at_us = self.now_us

    def _next(self, number: JobId, job: Job) -> None:
        job.turn += 1
        length, learn = job.sim.trace.length, self.plan.learn_steps
        until = 0.0
        if not job.learned and length > learn:
            until = job.alone_us * (1 - learn / length)
        else:
            job.learned = True
        wait_us = max(1, math.ceil((job.left_us - until) / job.rate))
        heapq.heappush(self._heap, (self.now_us + wait_us, next(self._order), number, job.turn))

    def _regroup(self) -> None:
        plan = self.plan
        self._allow()
        for number in sorted(self._doubtful):
            group = self.pools.groups.get(number)
            found = group and relieve(group, self.pools, plan.rules, self._may_move)
            if found:
                self._move(found)
        self._doubtful.clear()
        while self.merges and (found := merge(self.pools, plan.rules, self._may_move)) is not None:
            self._move(found)

    def _allow(self) -> None:
        """What is left of promises."""
        for group in self.pools.groups.values():
            for number, member in group.members.items():
                job = self.jobs[number]
                if job.learned and self.allows:
                    left_us = job.left_us - (self.now_us - job.at_us) * job.rate
                    taken_us, done_us = self.now_us - job.start_us, job.alone_us - left_us
                    allowed = allowance(
                        member.max_slowdown, done_us=done_us, taken_us=taken_us, left_us=left_us
                    )
                    group.members[number] = replace(member, allowed=allowed)
                    if allowed < member.max_slowdown:
                        self._doubtful.add(group.number)

    def _may_move(self, number: JobId) -> bool:
        job, least_us = self.jobs[number], self.plan.regroup_us
        left_us = job.left_us - (self.now_us - job.at_us) * job.rate
        since_us = max(job.start_us, job.moved_us)
        return job.learned and left_us >= least_us and self.now_us - since_us >= least_us

    def _move(self, found: Regrouping) -> None:
        self.moves += 1
        old = self.pools.groups[found.group]
        changed = {old.number: old}
        for number, home in found.homes:
            member, job = old.members.pop(number), self.jobs[number]
            group = self._new(member) if home is None else self.pools.groups[home]
            group.members[number] = member
            job.group, job.moved_us = group.number, self.now_us
            self._settle(job)
            nodes = old.gpus // self.cluster.node_gpus
            rate = self.cluster.shared_bytes_per_s * nodes
            job.left_us += DRAIN_US + 2_000_000 * member.image_bytes // rate
            changed[group.number] = group
        for group in changed.values():
            self._rate(group)

    def _row(self) -> str:
        jobs = list(self.jobs.values())
        ratios = sorted((job.end_us - job.start_us) / job.alone_us for job in jobs)
        alone = sum(
            job.alone_us * (job.sim.trace.train.gpus + job.sim.trace.rollout.gpus) for job in jobs
        )
        missed = sum(
            (job.end_us - job.start_us) / job.alone_us > job.sim.trace.slo.max_slowdown
            for job in jobs
        )
        makespan = max(job.end_us for job in jobs) - min(job.sim.trace.submit_us for job in jobs)
        return (
            f"{alone / self.held_us:.3f} | {sum(ratios) / len(ratios):.3f} | "
            f"{ratios[math.ceil(0.95 * len(ratios)) - 1]:.3f} | {100 * missed / len(jobs):.1f} % | "
            f"{self.moves} | {makespan / HOUR_US:,.0f} h"
        )


#: What is compared with the defaults.
FIT = Rules(placement=Placement.FIT)
VARIANTS: tuple[tuple[str, Plan], ...] = (
    ("as it is", Plan(rules=FIT)),
    ("only the shape that was asked", Plan(rules=FIT, widest=1.0)),
    ("shapes up to 4 times as large", Plan(rules=FIT, widest=4.0)),
    ("half of a phase scales", Plan(rules=FIT, scaling=0.5)),
    ("all of a phase scales", Plan(rules=FIT, scaling=1.0)),
    ("all of a promise may be predicted away", Plan(rules=replace(FIT, margin=1.0))),
    ("promises do not count", Plan(rules=replace(FIT, margin=100.0, full=1.2))),
    ("nobody moves", Plan(rules=FIT, regroup_us=1000 * HOUR_US)),
    ("they move after 2 h", Plan(rules=FIT, regroup_us=2 * HOUR_US)),
    ("no age guard", Plan(rules=FIT, guard_us=10_000 * HOUR_US)),
    ("up to 10 jobs a group", Plan(rules=replace(FIT, most=10))),
    ("profiles are exact", Plan(rules=FIT, guess_sigma=0.0)),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path)
    given = parser.parse_args()
    print("| trace | rule | work per GPU-hour | mean | p95 | missed | moves | makespan |")
    print("|---|---|---|---|---|---|---|---|")
    for name, gpus, factor in (("week", 1024, 1.0), ("quarter", 2048, 2.7)):
        trace = compressed(read_trace(given.traces / f"{name}.jsonl"), factor)
        for words, plan in VARIANTS:
            row = Partition(trace, split(gpus, "2:1"), plan).run()
            print(f"| {name} | {words} | {row} |", flush=True)
        blind = Partition(trace, split(gpus, "2:1"), VARIANTS[0][1])
        blind.allows = False
        print(f"| {name} | what a job has lost so far does not count | {blind.run()} |", flush=True)
        thin = Partition(trace, split(gpus, "2:1"), VARIANTS[0][1])
        thin.merges = False
        print(f"| {name} | they move only for promises | {thin.run()} |", flush=True)


if __name__ == "__main__":
    main()
