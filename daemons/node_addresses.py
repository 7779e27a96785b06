"""Where ranks on several nodes find each other: the first node's address as Slurm knows it."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.daemons.layout import Place
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.port import NodeStatus, SlurmPort

log = logging.getLogger(__name__)


class NodeAddresses:
    """``NodeAddr`` of nodes. A node's name need not be known to the others, nor be its own."""

    def __init__(self, port: SlurmPort, *, backend: str) -> None:
        self._port: Any = port
        self._backend = backend
        self._known: Mapping[str, NodeStatus] = {}

    async def __call__(self, place: Place) -> str:
        """The node's name if Slurm does not say more."""
        if self._backend == "local":
            return "127.0.0.1"
        try:
            self._known = await asyncio.to_thread(self._port.nodes)
        except (SlurmRejected, SlurmUnavailable) as problem:
            say(log, "node_address_unknown", node=place.node, reason=problem)
        found = self._known.get(place.node)
        return found.address if found is not None and found.address else place.node
