"""``plexrl state evict``: an image leaves host memory now, and never as the last complete copy."""

import asyncio
from typing import Any, Final

from plexrl_slurm.api.service import Principal
from plexrl_slurm.core.errors import BadInput, NotFound
from plexrl_slurm.core.ids import DeploymentId, JobId
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.gang_evictions import GangEviction
from plexrl_slurm.daemons.service_import import ImportCalls
from plexrl_slurm.daemons.state import LiveDeployment
from plexrl_slurm.transport import messages as tm

#: Copying an image takes as long as its disk does.
PATIENCE_S: Final = 600.0


class EvictCalls(ImportCalls):
    """See :class:`plexrl_slurm.api.service.Service`."""

    async def evict_state(
        self, who: Principal, job_id: JobId, *, deployment: str, to: str
    ) -> dict[str, Any]:
        row = await self.owned(who, job_id)
        if to not in ("nvme", "durable"):
            raise BadInput(f"images go to nvme or to durable, not to {to!r}")
        mine = [
            live
            for live in self.state.deployments.values()
            if live.job == job_id and not live.dropped and deployment in ("", live.id)
        ]
        if not mine:
            if deployment:
                raise NotFound("training deployment", deployment)
            what = "has ended" if row.ended_us is not None else "trains no model now"
            raise BadInput(
                f"job {row.slurm_id or job_id} {what}, and has no images in memory: see "
                f"`plexrl state show` for what it saved"
            )
        return {"job_id": job_id, "evicted": [await self._evict(live, to) for live in mine]}

    async def _evict(self, live: LiveDeployment, to: str) -> dict[str, Any]:
        hub = self._parts.hub
        view = hub.wpgs.get(live.wpg) if hub is not None else None
        gang = hub.gangs.get(live.wpg) if hub is not None else None
        if hub is not None and gang is not None:
            return await GangEviction(self._parts, hub, gang, self._ask).evict(
                live, to, persisted=self.image_persisted
            )
        if hub is None or view is None or not view.agent:
            raise BadInput(f"{live.id}: WPG {live.wpg} has no agent now: try again when it is up")
        progress: tuple[int, int] | None = None
        if to == "durable":
            progress = await self._make_durable(hub, view.agent, live)
        known = self.shell.durable.get(live.id)
        done = await self._ask(
            hub,
            view.agent,
            tm.EvictOrder(
                epoch=self._parts.epoch,
                id=hub.order_id(),
                wpg=live.wpg,
                deployment=live.id,
                to=to,
                durable=known.progress if progress is not None and known is not None else None,
            ),
        )
        return {"id": live.id, "node": view.node, "to": to, "bytes": done.moved_bytes}

    async def _make_durable(
        self, hub: AgentHub, agent: bytes, live: LiveDeployment
    ) -> tuple[int, int]:
        """Its newest image is durable, and the daemon and the core know it."""
        known = self.shell.durable.get(live.id)
        order = tm.PersistOrder(
            epoch=self._parts.epoch,
            id=hub.order_id(),
            wpg=live.wpg,
            deployment=live.id,
            folder=str(self.settings.durable_dir),
            known=known.progress if known is not None else None,
        )
        done = await self._ask(hub, agent, order)
        self.image_persisted(done)
        await self.writer.drain()
        if live.id in self.shell.deployments:
            self.shell.image_found(DeploymentId(live.id), done.progress)
        return done.progress

    async def _ask(
        self, hub: AgentHub, agent: bytes, order: tm.PersistOrder | tm.EvictOrder
    ) -> tm.Done:
        try:
            async with asyncio.timeout(PATIENCE_S):
                done = await hub.ask(agent, order)
        except TimeoutError:
            raise BadInput(
                f"{order.deployment}: its node did not answer within {PATIENCE_S:g} s: "
                f"see `plexrl sinfo`"
            ) from None
        if not done.ok:
            raise BadInput(f"{order.deployment} stays where it is: {done.error}")
        return done
