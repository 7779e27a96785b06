"""An image leaves the memory of all nodes of a WPG that lies on several."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import DeploymentId
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.gang_view import Gang
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.state import LiveDeployment
from plexrl_slurm.transport import messages as tm

#: Sends an order to an agent; its report, if it says that all is well. Raises ``BadInput``.
Ask: TypeAlias = Callable[[AgentHub, bytes, tm.PersistOrder | tm.EvictOrder], Awaitable[tm.Done]]


class GangEviction:
    """One ``plexrl state evict`` of one deployment."""

    def __init__(self, parts: Parts, hub: AgentHub, gang: Gang, ask: Ask) -> None:
        self._parts, self._hub, self._gang, self._ask = parts, hub, gang, ask

    async def evict(
        self, live: LiveDeployment, to: str, *, persisted: Callable[[tm.Done], None]
    ) -> dict[str, Any]:
        """Every node gives its share's memory back. ``persisted`` writes down a durable image.

        To NVMe, a node that cannot keeps its share, which is as good there. Raises ``BadInput``.
        """
        self._refuse_busy(live)
        progress: tuple[int, int] | None = None
        if to == "durable":
            progress = await self._make_durable(live, persisted)
            self._refuse_busy(live)
        found = await self._ask_all(
            [
                tm.EvictOrder(
                    epoch=self._parts.epoch,
                    id=self._hub.order_id(),
                    wpg=live.wpg,
                    deployment=live.id,
                    to=to,
                    durable=progress,
                )
                for _ in self._gang.parts
            ]
        )
        done = [each for each in found if isinstance(each, tm.Done)]
        if done and to == "durable":
            # No node needs what another has given up: a load takes the durable image.
            self._hub.gangs.orders.settle(self._gang, {live.id: None})
        for each in found:
            if isinstance(each, BaseException):
                raise each
        size = sum(each.moved_bytes for each in done)
        return {"id": live.id, "node": self._gang.held.nodes, "to": to, "bytes": size}

    def _refuse_busy(self, live: LiveDeployment) -> None:
        wpg = self._gang.id
        if not all(part.address for part in self._gang.parts):
            raise BadInput(f"{live.id}: a node of WPG {wpg} has no agent now: try again later")
        if any(not name.startswith("run ") for name in self._gang.asked):
            raise BadInput(f"{live.id}: WPG {wpg} moves an image just now: try again")
        if self._hub.is_persisting(live.id):
            raise BadInput(f"{live.id} is being copied to the durable tier: try again")

    async def _make_durable(
        self, live: LiveDeployment, persisted: Callable[[tm.Done], None]
    ) -> tuple[int, int]:
        """The image that all nodes have is durable, and the daemon and the core know it."""
        shell, settled = self._parts.shell, self._gang.settled.get(live.id)
        known = shell.durable_progress(live.id)
        if settled is None:
            raise BadInput(f"{live.id}: the nodes of WPG {live.wpg} have no image of it in common")
        if known is not None and known >= settled:
            return known
        share = self._hub.order_id()

        def order(shares: Sequence[bytes] = ()) -> tm.PersistOrder:
            return tm.PersistOrder(
                epoch=self._parts.epoch,
                id=self._hub.order_id(),
                wpg=live.wpg,
                deployment=live.id,
                folder=str(self._parts.settings.durable_dir),
                known=known if shares else None,
                image=settled,
                share=share,
                shares=list(shares),
            )

        found = await self._ask_all([order() for _ in self._gang.parts])
        shares = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            shares.append(each.result)
        done = await self._ask(self._hub, self._gang.parts[0].address, order(shares))
        persisted(done)
        await self._parts.writer.drain()
        if live.id in shell.deployments:
            shell.image_found(DeploymentId(live.id), done.progress)
        return done.progress

    async def _ask_all(
        self, orders: Sequence[tm.PersistOrder | tm.EvictOrder]
    ) -> list[tm.Done | BaseException]:
        """One order to each part."""
        addresses = [part.address for part in self._gang.parts]
        return await asyncio.gather(
            *(
                self._ask(self._hub, address, order)
                for address, order in zip(addresses, orders, strict=True)
            ),
            return_exceptions=True,
        )
