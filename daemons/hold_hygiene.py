"""Holds and nodes that are of no use: found here, given up by the keeper."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import Denied, SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.hold_job import is_hold, is_of_another
from plexrl_slurm.daemons.layout import Place
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.logs import say
from plexrl_slurm.settings import Settings
from plexrl_slurm.slurm.port import JobStatus, NodeStatus

log = logging.getLogger(__name__)

#: An agent that says nothing for so many of its timeouts is lost, whatever Slurm thinks.
PATIENCE = 10
#: The same of one that this daemon has not heard at all: a node's prolog may take minutes.
UNHEARD = 40


def refuse_others(settings: Settings, jobs: Mapping[SlurmId, JobStatus]) -> None:
    """Raises ``Denied`` if a daemon with another ``state_dir`` holds GPUs for this partition: each
    of the two would take the other's holds for its own."""
    for slurm_id, status in jobs.items():
        if is_hold(settings, status) and is_of_another(settings, status):
            raise Denied(
                f"partition {settings.partition!r} has a hold of another daemon (Slurm job "
                f"{slurm_id}, {status.comment!r}), and state_dir here is {settings.state_dir}: "
                f"take that partition down first, or give this one another name"
            )


class Hygiene:
    """Looks after a partition on Slurm."""

    def __init__(self, parts: Parts, hub: AgentHub) -> None:
        self._parts, self._hub = parts, hub
        #: Slurm jobs that look like holds of ours, and are none, in the last look.
        self._strays: set[SlurmId] = set()
        #: The last look, and the end of the last long pause between two: nobody was heard in it.
        self._looked_us = self._awake_us = 0

    def useless_places(self) -> list[tuple[Place, str]]:
        """Nodes that Slurm believes in, whose agent is silent or whose WPG never starts."""
        now, timeout_us = now_us(), self._parts.settings.hold.agent_timeout_us
        if now - self._looked_us > (PATIENCE - 1) * timeout_us:
            self._awake_us = now
        self._looked_us = now
        silent = [
            (place, f"the agent on node {place.node} is silent")
            for place, since_us in self._hub.heard_us().items()
            if now - max(since_us, self._awake_us) > PATIENCE * timeout_us
        ]
        unheard = [
            (place, f"the agent on node {place.node} does not come")
            for place, since_us in self._hub.unheard_us().items()
            if now - max(since_us, self._awake_us) > UNHEARD * timeout_us
        ]
        return [*silent, *unheard, *self._hub.hopeless()]

    async def broken(self, places: Collection[Place]) -> list[tuple[Place, str]]:
        """Those whose node Slurm cannot use: one of them is why it took the hold back."""
        port: Any = self._parts.port
        if self._parts.settings.backend != "slurm":
            return []
        try:
            nodes: Mapping[str, NodeStatus] = await asyncio.to_thread(port.nodes)
        except (SlurmRejected, SlurmUnavailable) as problem:
            say(log, "slurm_refused", reason=problem)
            return []
        return [
            (place, f"Slurm took the hold back while node {place.node} was {node.state}")
            for place in places
            if (node := nodes.get(place.node)) is not None and not node.usable
        ]

    async def cancel_strays(self, known: set[SlurmId]) -> None:
        """Holds that a daemon submitted, and died before it could write them down."""
        settings = self._parts.settings
        strays = {
            slurm_id
            for slurm_id, status in self._parts.watch.jobs.items()
            if slurm_id not in known and is_hold(settings, status)
            if not is_of_another(settings, status)
        }
        for slurm_id in strays & self._strays:
            say(log, "stray_hold_cancelled", slurm_id=slurm_id)
            try:
                await asyncio.to_thread(self._parts.port.cancel, slurm_id)
            except (SlurmRejected, SlurmUnavailable) as problem:
                say(log, "slurm_refused", reason=problem)
        self._strays = strays
