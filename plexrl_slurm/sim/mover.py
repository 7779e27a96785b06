"""Carries out regroupings in the simulated world: drain, copy, move, give back or resume."""

from typing import TYPE_CHECKING

from plexrl_slurm.core.ids import DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    Deployment,
    DeploymentMoved,
    Pool,
    WpgDraining,
    WpgResumed,
)
from plexrl_slurm.core.regroup import Regrouping, merge, relieve

if TYPE_CHECKING:
    from plexrl_slurm.sim.world import World


class Mover:
    """At most one regrouping of a group at a time."""

    def __init__(self, world: "World") -> None:
        self._world = world
        #: Under way, by the WPG that drains.
        self._under_way: dict[WpgId, Regrouping] = {}
        #: Groups that take part: who goes there is counted there already.
        self._busy: set[int] = set()
        self._moved_us: dict[JobId, int] = {}
        self.count = 0

    def look(self) -> None:
        """Decide what to regroup now."""
        world = self._world
        plan = world.plan
        if not plan.regroup_us or plan.rules.most < 2:
            return
        pools = world.pools
        for group in list(pools.groups.values()):
            if group.number in world.doubtful and group.number not in self._busy:
                world.doubtful.discard(group.number)
                found = relieve(group, pools, plan.rules, self._may_move)
                if found is not None:
                    self._begin(found)
        while (found := merge(pools, plan.rules, self._may_move)) is not None:
            self._begin(found)

    def _may_move(self, job: JobId) -> bool:
        world = self._world
        record = world.records[job]
        if record.group in self._busy or not world.settled(job):
            return False
        since_us = self._moved_us.get(job, record.start_us)
        return (
            world.now_us - since_us >= world.plan.regroup_us
            and world.left_us(job) >= world.plan.regroup_us
        )

    def _begin(self, found: Regrouping) -> None:
        world, pools = self._world, self._world.pools
        self.count += 1
        old = pools.groups[found.group]
        self._busy.add(found.group)
        wpg = WpgId(f"train-{found.group}")
        homes = []
        for job, number in found.homes:
            member = old.members.pop(job)
            target = world.new_group(member.train_gpus) if number is None else pools.groups[number]
            # It counts where it goes from now on, so that nobody else takes the room.
            target.members[job] = member
            world.records[job].group = target.number
            self._moved_us[job] = world.now_us
            homes.append((job, target.number))
        if found.gives_back:
            del pools.groups[found.group]  # nobody joins it
        self._under_way[wpg] = Regrouping(
            group=found.group, homes=tuple(homes), gives_back=found.gives_back
        )
        world.send(WpgDraining(wpg=wpg, at_us=world.now_us, cause=world.cause))

    def takes_part(self, group: int) -> bool:
        """Whether it is being emptied or relieved: then it is not given back by others."""
        return group in self._busy

    def reserve(self, group: int) -> None:
        """Nobody leaves it, and it is not given back, until it is free."""
        self._busy.add(group)

    def free(self, group: int) -> None:
        """As before; its promises are looked at again."""
        self._busy.discard(group)
        self._world.doubtful.add(group)

    def drained(self, wpg: WpgId) -> None:
        """Nothing is under way there: the images are copied."""
        world = self._world
        found = self._under_way[wpg]
        gpus = world.gpus_of(wpg)
        moved = sum(world.image_of(job) for job, _ in found.homes if not world.has_ended(job))
        nodes = max(1, gpus // world.cluster.node_gpus)
        # Out to the shared file system, and in again.
        copy_us = 2 * moved * 1_000_000 // (world.cluster.shared_bytes_per_s * nodes)
        world.at(world.now_us + copy_us, self._moved, wpg)

    def _moved(self, wpg: WpgId) -> None:
        world = self._world
        found = self._under_way.pop(wpg)
        for job, number in found.homes:
            if world.has_ended(job):
                continue
            name = DeploymentId(f"{Pool.TRAIN}-{job}")
            world.send(
                DeploymentMoved(
                    deployment=Deployment(
                        id=name,
                        job=job,
                        pool=Pool.TRAIN,
                        wpg=WpgId(f"train-{number}"),
                        image_bytes=world.image_of(job),
                        content=name,
                        priority=world.records[job].job.weight,
                    ),
                    image=world.images.get(name),
                    at_us=world.now_us,
                    cause=world.cause,
                )
            )
        self._busy.discard(found.group)
        if found.gives_back or not world.pools.groups[found.group].members:
            world.give_back(found.group)
        else:
            world.send(WpgResumed(wpg=wpg, at_us=world.now_us, cause=world.cause))
            world.doubtful.add(found.group)
