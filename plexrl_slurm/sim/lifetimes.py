"""What interrupts a simulated WPG: the loss of a node, and a hold that comes to its time limit."""

from typing import TYPE_CHECKING, Final

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, WpgDown, WpgDraining, WpgResumed, WpgUp

if TYPE_CHECKING:
    from plexrl_slurm.sim.world import Device, World

_HOUR_US: Final = 3_600_000_000
#: A WPG that takes part in a regrouping is asked again so much later.
_LATER_US: Final = 60_000_000
#: WPGs that go down without a step between: no job will ever take one.
_IN_VAIN: Final = 10_000


class Lifetimes:
    """Of all WPGs that are held."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._renewing: dict[WpgId, Device] = {}
        #: Holds that were renewed.
        self.renewed = 0
        #: WPGs that have gone down since the last step of any job.
        self._in_vain = 0

    def begin(self, name: WpgId, device: "Device") -> None:
        """It is held from now on."""
        self._arm_loss(name, device)
        self._arm_renewal(name, device)

    def stepped(self) -> None:
        """A job has taken a step."""
        self._in_vain = 0

    # -- a node is lost ----------------------------------------------------------------------
    def _arm_loss(self, name: WpgId, device: "Device") -> None:
        world = self._world
        if not world.plan.node_loss_hours:
            return
        hours = world.rng.exponential(world.plan.node_loss_hours / self._nodes(device))
        world.at(world.now_us + int(hours * _HOUR_US), self._lost, name, device)

    def _lost(self, name: WpgId, device: "Device") -> None:
        world = self._world
        if not world.has(name, device):
            return
        if self._renewing.get(name) is device:  # its end comes after that of the renewal
            world.at(world.now_us + _LATER_US, self._lost, name, device)
            return
        self._down(name, device, "a node was lost")
        world.at(world.now_us + world.plan.restart_us, self._back, name, device)

    def _down(self, name: WpgId, device: "Device", reason: str) -> None:
        world = self._world
        self._in_vain += 1
        if self._in_vain > _IN_VAIN:
            raise BadInput(
                f"{name}: {reason}, and no job took a step between {_IN_VAIN:,} such ends: give "
                "more --node-loss-hours or more --hold-hours"
            )
        device.life += 1
        device.up = False
        world.send(
            WpgDown(wpg=name, reason=reason, blame=False, at_us=world.now_us, cause=world.cause)
        )

    def _back(self, name: WpgId, device: "Device") -> None:
        if self._world.has(name, device):
            self._up(name, device)
            self._arm_loss(name, device)

    def _up(self, name: WpgId, device: "Device") -> None:
        device.up = True
        self._world.send(WpgUp(wpg=name, at_us=self._world.now_us, cause=self._world.cause))

    def _nodes(self, device: "Device") -> int:
        return max(1, device.wpg.gpus // self._world.cluster.node_gpus)

    # -- a hold is renewed -------------------------------------------------------------------
    def _arm_renewal(self, name: WpgId, device: "Device") -> None:
        world = self._world
        if world.plan.hold_limit_us:
            world.at(world.now_us + world.plan.hold_limit_us, self._due, name, device)

    def _due(self, name: WpgId, device: "Device") -> None:
        """It is drained: what runs there ends, and nothing new begins."""
        world = self._world
        if not world.has(name, device):
            return
        group = device.group if device.wpg.pool is Pool.TRAIN else None
        if not device.up or (group is not None and world.mover.takes_part(group)):
            world.at(world.now_us + _LATER_US, self._due, name, device)
            return
        if group is not None:
            world.mover.reserve(group)
        self._renewing[name] = device
        world.send(WpgDraining(wpg=name, at_us=world.now_us, cause=world.cause))

    def drained(self, name: WpgId) -> bool:
        """Nothing is under way there any more; false if that was not for a renewal."""
        device = self._renewing.get(name)
        if device is None:
            return False
        if self._world.has(name, device):
            at_us = self._world.now_us + self._copy_us(device)
            self._world.at(at_us, self._given_back, name, device)
        else:  # its last job has ended, and it was given back
            del self._renewing[name]
        return True

    def _copy_us(self, device: "Device") -> int:
        """Of all images to the shared file system, or from it."""
        world = self._world
        if device.wpg.pool is not Pool.TRAIN or device.group not in world.pools.groups:
            return 0
        members = world.pools.groups[device.group].members
        moved = sum(world.image_of(job) for job in members)
        return moved * 1_000_000 // (world.cluster.shared_bytes_per_s * self._nodes(device))

    def _given_back(self, name: WpgId, device: "Device") -> None:
        world = self._world
        if not world.has(name, device):
            del self._renewing[name]
            return
        if self._is_empty(device):
            del self._renewing[name]
            world.mover.free(device.group)
            world.give_back(device.group)
            return
        self._down(name, device, "its hold is renewed")
        after_us = world.plan.renew_us + self._copy_us(device)
        world.at(world.now_us + after_us, self._renewed, name, device)

    def _renewed(self, name: WpgId, device: "Device") -> None:
        world = self._world
        del self._renewing[name]
        if not world.has(name, device):
            return
        self.renewed += 1
        self._up(name, device)
        world.send(WpgResumed(wpg=name, at_us=world.now_us, cause=world.cause))
        self._arm_renewal(name, device)
        if device.wpg.pool is Pool.TRAIN:
            world.mover.free(device.group)
            if self._is_empty(device):
                world.give_back(device.group)

    def _is_empty(self, device: "Device") -> bool:
        """Whether it need not be held any more."""
        world = self._world
        if device.wpg.pool is not Pool.TRAIN or world.keeps_empty:
            return False
        return not world.pools.groups[device.group].members
