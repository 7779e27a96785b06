"""The GPUs of an agent that two of its WPGs share: who is awake, and grants."""

from collections.abc import Awaitable, Callable
from itertools import count

from plexrl_slurm.core.errors import DeviceBusy
from plexrl_slurm.daemons.agent_orders import Orders
from plexrl_slurm.daemons.gang import Gang, GangLost
from plexrl_slurm.daemons.shared_gpus import Share, SharedGpus, WakeLost
from plexrl_slurm.transport import messages as tm


class Turns:
    """Groups of WPGs on this node, by the name of their leader."""

    def __init__(
        self,
        orders: Orders,
        *,
        report: Callable[[tm.Done], Awaitable[None]],
        number: Callable[[], int],
    ) -> None:
        self._orders, self._report, self._number = orders, report, number
        self._groups: dict[str, SharedGpus] = {}
        self._numbers = count(1)

    def add(self, config: tm.WpgConfig, gang: Gang) -> None:
        """A gang that is about to start; it may share."""
        if not config.group:
            return
        group = self._groups.get(config.group)
        if group is None:
            group = self._groups[config.group] = SharedGpus({}, order_id=self._order_id)
        group.add(
            config.name,
            Share(gang=gang, awake_bytes=config.awake_bytes, residual_bytes=config.residual_bytes),
        )

    def is_awake(self, name: str) -> bool:
        """Whether it has the GPUs that it shares."""
        return any(name in group.awake for group in self._groups.values())

    async def grant(self, order: tm.GrantOrder) -> None:
        """The turn goes to another WPG. Ends in a report in any case."""
        gang = self._orders.gangs.get(order.wpg)
        group = self._groups.get(gang.config.group) if gang is not None else None
        error, awake = "its agent does not run it", ""
        if group is not None:
            error = ""
            for name in group.names:
                if name != order.wpg:
                    self._orders.resident.pop(name, None)
            try:
                await group.grant(order.wpg)
            except DeviceBusy as problem:
                error = str(problem)
            except WakeLost as problem:
                error = str(problem)
            except GangLost as problem:
                error = f"a gang was lost: {problem}"
            awake = next(iter(group.awake), "")
        await self._report(
            tm.Done(
                number=self._number(), wpg=order.wpg, order=order.id, what="grant",
                ok=not error, part=order.number, error=error, awake=awake,
            )
        )  # fmt: skip

    def _order_id(self) -> str:
        return f"turn {next(self._numbers)}"
