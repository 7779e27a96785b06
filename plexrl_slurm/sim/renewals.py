"""Holds end at their time limit: another one takes over, and the WPG stands still for a moment.

The next hold is there before the last one ends, so that the GPUs are held twice until its ranks
are up; then the WPG is drained, and its images go over the shared file system.
"""

from typing import TYPE_CHECKING, Final

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Activity, Pool, WpgDraining, WpgResumed

if TYPE_CHECKING:
    from plexrl_slurm.sim.world import Device, World

_HOUR_US: Final = 3_600_000_000
#: A WPG from which a job moves right now is looked at again after so long.
_AGAIN_US: Final = 60_000_000


class Renewals:
    """Of all WPGs of a world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._limit_us = int(world.plan.hold_hours * _HOUR_US)
        #: Being drained.
        self._under_way: dict[WpgId, Device] = {}
        self.count = 0

    def held(self, wpg: WpgId) -> None:
        """A hold of it begins."""
        if self._limit_us:
            world = self._world
            world.at(world.now_us + self._limit_us, self._due, wpg, world.device(wpg))

    def _due(self, wpg: WpgId, device: "Device") -> None:
        world = self._world
        if world.device(wpg) is not device:
            return  # it was given back
        if device.wpg.pool is Pool.TRAIN and not world.mover.claim(device.group):
            world.at(world.now_us + _AGAIN_US, self._due, wpg, device)
            return
        self.count += 1
        self._under_way[wpg] = device
        world.send(WpgDraining(wpg=wpg, at_us=world.now_us, cause=world.cause))

    def drained(self, wpg: WpgId) -> bool:
        """Whether it is one of these that has nothing under way now."""
        if wpg not in self._under_way:
            return False
        world, device = self._world, self._under_way[wpg]
        images = 0
        if device.wpg.pool is Pool.TRAIN:
            members = world.pools.groups[device.group].members
            images = sum(world.image_of(m) for m in members if f"train-{m}" in world.images)
        nodes = max(1, device.wpg.gpus // world.cluster.node_gpus)
        copy_us = 2 * images * 1_000_000 // (world.cluster.shared_bytes_per_s * nodes)
        world.at(world.now_us + copy_us, self._renewed, wpg)
        return True

    def _renewed(self, wpg: WpgId) -> None:
        world, device = self._world, self._under_way.pop(wpg)
        trains = device.wpg.pool is Pool.TRAIN
        if trains:
            world.mover.free(device.group)
        if world.device(wpg) is not device:
            return
        device.twice_us += world.plan.restart_us
        world.gpu_us[device.wpg.pool, Activity.DOWN] += world.plan.restart_us * device.wpg.gpus
        if trains and not world.keeps_empty and not world.pools.groups[device.group].members:
            world.give_back(device.group)
            return
        world.send(WpgResumed(wpg=wpg, at_us=world.now_us, cause=world.cause))
        self.held(wpg)
