"""One node's ranks of a WPG that lies on several nodes.

It starts nothing by itself: the daemon ends an incarnation on all nodes (:meth:`prepare`), and when
every node is ready it starts the next one on all of them (:meth:`begin`).
"""

import asyncio
from collections.abc import Callable
from typing import Any

from plexrl_slurm.daemons.gang import Gang, Meeting
from plexrl_slurm.transport import messages as tm


class GangPart(Gang):
    """The rank processes of this node."""

    def __init__(
        self, *args: Any, ready: Callable[["GangPart", int], None], **options: Any
    ) -> None:
        """``ready``: no rank lives, and the incarnation that is named may be started."""
        super().__init__(*args, **options)
        self._ready = ready
        #: Of the last :meth:`prepare`, and whether its end was said.
        self._wanted, self._announced = 0, True
        self._order: tm.StartOrder | None = None
        self._news = asyncio.Event()

    @property
    def newest(self) -> int:
        return max(self.incarnation, self._wanted)

    def prepare(self, incarnation: int) -> None:
        """End every earlier incarnation."""
        if incarnation > self._wanted or (incarnation == self._wanted and self._order is None):
            self._wanted, self._announced, self._order = incarnation, False, None
            self._reason = self._reason or "its ranks on another node are started again"
            self._signal_all()
            self._news.set()

    def begin(self, order: tm.StartOrder) -> None:
        """Start the incarnation that was prepared."""
        if order.incarnation == self._wanted:
            self._order = order
            self._news.set()

    async def stop(self) -> None:
        self._end.set()
        self._news.set()
        await super().stop()

    async def _keep_running(self) -> None:
        while not self._ending():
            if self._order is not None and self._order.incarnation > self.incarnation:
                self.incarnation = self._order.incarnation
                await self._live()
            elif not self._announced:
                self._announced = True
                self._ready(self, self._wanted)
            else:
                await self._news.wait()
                self._news.clear()

    async def _spawn(self) -> None:
        await super()._spawn()
        if self._wanted > self.incarnation:  # it was ended while it started
            self._signal_all()

    def _meeting(self) -> Meeting:
        order = self._order
        if order is None:  # prepared anew in this turn of the loop
            raise OSError("another incarnation is wanted")
        return Meeting(address=order.address, port=order.port, name=order.name)
