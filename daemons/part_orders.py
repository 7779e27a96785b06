"""What an agent does for its daemon with its part of a WPG that lies on several nodes."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

from plexrl_slurm.core.errors import BadImage, PlexError, StorageFull
from plexrl_slurm.core.messages import Room
from plexrl_slurm.daemons.agent_orders import Orders
from plexrl_slurm.daemons.fallback import may_pass
from plexrl_slurm.daemons.gang import free_port
from plexrl_slurm.daemons.gang_part import GangPart
from plexrl_slurm.daemons.part_tier import PartTier
from plexrl_slurm.transport import messages as tm

#: Orders that only the agents of such a WPG get.
PartOrder: TypeAlias = tm.PrepareOrder | tm.StartOrder | tm.FetchOrder | tm.SettleOrder


class PartOrders:
    """Beside :class:`Orders`, which runs, switches and saves here, too."""

    def __init__(
        self,
        tier: PartTier,
        orders: Orders,
        *,
        report: Callable[[tm.Done], Awaitable[None]],
        send: Callable[[tm.PartReady], Awaitable[None]],
        number: Callable[[], int],
    ) -> None:
        """``number``: of the next report."""
        self._tier, self._orders = tier, orders
        self._report, self._send, self._number = report, send, number
        #: Images under way, by WPG.
        self._moves: Counter[str] = Counter()
        self._still: dict[str, Callable[[], None]] = {}

    def of(self, wpg: str) -> GangPart | None:
        """The part of a WPG that lies on several nodes."""
        gang = self._orders.gangs.get(wpg)
        return gang if isinstance(gang, GangPart) else None

    def busy(self) -> list[str]:
        """WPGs whose images are under way here."""
        return [wpg for wpg, moves in self._moves.items() if moves]

    def work(self, order: PartOrder) -> Coroutine[Any, Any, None] | None:
        """Do what can be done at once; answers with the rest."""
        part = self.of(order.wpg)
        match order:
            case _ if part is None:
                return None  # it is no more
            case tm.PrepareOrder(incarnation=0):
                return self._end(part)
            case tm.PrepareOrder():
                part.prepare(order.incarnation)
            case tm.StartOrder():
                part.begin(order)
            case tm.FetchOrder():
                return self._moving(order.wpg, self._fetch(order))
            case tm.SettleOrder():
                for deployment, image in order.images.items():
                    self._tier.settle(order.wpg, deployment, image)
        return None

    def moving(self, wpg: str, work: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        """A switch or save, which :meth:`ready` waits for."""
        return self._moving(wpg, work) if self.of(wpg) is not None else work

    async def _moving(self, wpg: str, work: Coroutine[Any, Any, None]) -> None:
        self._moves[wpg] += 1
        try:
            await work
        finally:
            self._moves[wpg] -= 1
            if not self._moves[wpg] and (said := self._still.pop(wpg, None)) is not None:
                said()

    async def ready(self, part: GangPart, incarnation: int) -> None:
        """No rank lives here any more; when no image is under way either, say so."""
        wpg = part.config.name
        if self._moves[wpg]:
            still: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._still[wpg] = lambda: still.set_result(None)
            await still
        await self._send(
            tm.PartReady(
                wpg=wpg,
                incarnation=incarnation,
                port=free_port(""),
                images=self._tier.part_images(wpg),
            )
        )

    async def _end(self, part: GangPart) -> None:
        del self._orders.gangs[part.config.name]
        await part.stop()
        self._tier.forget(part.config.name)

    async def _fetch(self, order: tm.FetchOrder) -> None:
        self._tier.returns(order.deployment)
        error, size, left, room = "", 0, None, Room.ENOUGH
        try:
            size = (await self._tier.fetch_part(order)).bytes
        except BadImage as problem:
            error, path = str(problem), order.durable_path
            if not path or not may_pass(problem, Path(path)):
                left = tm.ImagesLeft(image=None, durable=None, damaged=[error])
        except PlexError as problem:
            error = str(problem)
            room = Room.SHORT if isinstance(problem, StorageFull) else Room.ENOUGH
        await self._say(
            order, "fetch", order.deployment, order.image, error=error, size=size, left=left,
            room=room,
        )  # fmt: skip

    async def persist(self, order: tm.PersistOrder) -> None:
        """This node's share of a durable image, or, when all have theirs, the whole of it."""
        error, size, share, image = "", 0, b"", order.image or (0, 0)
        what = "persist" if order.shares else "share"
        try:
            if order.shares:
                size = (await self._tier.join(order)).bytes
            else:
                held, share = await self._tier.share(order)
                size = held.bytes
        except (PlexError, KeyError, OSError) as problem:
            error = str(problem)
        await self._say(order, what, order.deployment, image, error=error, size=size, result=share)

    async def _say(
        self,
        order: tm.FetchOrder | tm.PersistOrder,
        what: str,
        deployment: str,
        image: tuple[int, int],
        *,
        error: str,
        size: int,
        result: bytes = b"",
        left: tm.ImagesLeft | None = None,
        room: Room = Room.ENOUGH,
    ) -> None:
        await self._report(
            tm.Done(
                number=self._number(),
                wpg=order.wpg,
                order=order.id,
                what=what,
                ok=not error,
                deployment=deployment,
                progress=image,
                result=result,
                error=error,
                moved_bytes=size,
                left=left,
                room=str(room),
            )
        )
