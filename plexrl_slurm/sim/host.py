"""Which images are in the host memory of a simulated node, and which only on its disks."""

from collections import OrderedDict
from collections.abc import Mapping

from plexrl_slurm.core.grouping import MEMORY_SHARE, Pools
from plexrl_slurm.core.ids import DeploymentId, WpgId
from plexrl_slurm.core.messages import Switch
from plexrl_slurm.sim.cluster import Cluster


class HostRooms:
    """The host memory of every WPG.

    Who was there longest ago leaves, at no cost: agents copy to the disk while it is idle. Who
    comes back is waited for: no read ahead is counted on, so a run tells the most it can cost.
    """

    def __init__(self, pools: Pools, cluster: Cluster) -> None:
        self._cluster, self._node_gpus = cluster, pools.node_gpus
        self._rooms: dict[WpgId, OrderedDict[DeploymentId, int]] = {}
        #: That have an image somewhere.
        self._known: set[DeploymentId] = set()

    def switch_us(self, switch: Switch, gpus: int, sizes: Mapping[DeploymentId, int]) -> int:
        """How long the incoming image takes from the disk; ``sizes`` in bytes."""
        room = self._rooms.setdefault(switch.wpg, OrderedDict())
        name = switch.incoming
        missing = name in self._known and name not in room
        self._known.update(sizes)
        for each in (switch.outgoing, name):
            if each is not None:
                room[each] = sizes[each]
                room.move_to_end(each)
        cluster = self._cluster
        most = int(MEMORY_SHARE * cluster.node_bytes * gpus / self._node_gpus)
        while len(room) > 1 and sum(room.values()) > most:
            room.popitem(last=False)
        if not missing:
            return 0
        return int(sizes[name] * 1_000_000 * self._node_gpus / (cluster.nvme_bytes_per_s * gpus))
