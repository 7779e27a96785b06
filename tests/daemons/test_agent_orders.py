"""What an agent asks of its ranks and its tier for an order."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plexrl_slurm.core.errors import StorageFull
from plexrl_slurm.daemons.agent_orders import Orders
from plexrl_slurm.daemons.host_tier import HostTier, Passage
from plexrl_slurm.engines import ranklink
from plexrl_slurm.transport import messages as tm

SLAB_BYTES = 500


class TwoRanks:
    """A training gang that is up."""

    trains, processes, state, incarnation = True, 2, "up", 1

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def order(
        self, order_id: str, operations: list[ranklink.Operation]
    ) -> list[ranklink.Answer]:
        """Every rank does it."""
        assert len(operations) == self.processes
        self.asked.append(type(operations[0]).__name__)
        size = SLAB_BYTES if isinstance(operations[0], ranklink.Measure) else 0
        return [ranklink.Answer(order_id, True, slab_bytes=size) for _ in operations]


class Full(HostTier):
    """Notes for how much room is asked, and has none."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "host", snapshots=None, writer="w")
        self.out: list[int] = []

    async def begin_switch(self, order: tm.SwitchOrder, *, out: int = 0) -> Passage:
        self.out.append(out)
        raise StorageFull("/dev/shm", out, 0)


def test_room_for_what_leaves_is_asked_for_with_the_bytes_that_all_ranks_say(
    tmp_path: Path,
) -> None:
    reports: list[tm.Done] = []

    async def report(done: tm.Done) -> None:
        reports.append(done)

    async def published(_snapshot: str, _size: int) -> None:
        raise AssertionError

    tier, gang = Full(tmp_path), TwoRanks()
    orders = Orders(tier, report=report, published=published, number=lambda: 1, tidy=lambda: None)
    orders.gangs["train-0"] = gang  # type: ignore[assignment]

    def switch(outgoing: str) -> Any:
        return orders.switch(
            tm.SwitchOrder(
                epoch=1, id="1", wpg="train-0", incarnation=1, incoming="b", outgoing=outgoing
            )
        )

    asyncio.run(switch("a"))
    assert tier.out == [gang.processes * SLAB_BYTES] and gang.asked == ["Measure"]
    assert not reports[0].ok and "/dev/shm" in reports[0].error and reports[0].room == "short"
    asyncio.run(switch(""))  # nothing leaves: nothing is asked
    assert tier.out[1] == 0 and gang.asked == ["Measure"]


def test_what_a_training_rank_died_with_is_doubted(tmp_path: Path) -> None:
    doubted: list[tuple[str, str]] = []

    class Noting(Full):
        def doubt(self, wpg: str, deployment: str) -> None:
            doubted.append((wpg, deployment))

    async def nothing(*_: Any) -> None:
        raise AssertionError

    orders = Orders(
        Noting(tmp_path), report=nothing, published=nothing, number=lambda: 1, tidy=lambda: None
    )
    for name, trains in (("train-0", True), ("train-1", True), ("rollout-0", False)):
        gang = TwoRanks()
        gang.trains, gang.state = trains, "down"
        gang.config = SimpleNamespace(name=name)  # type: ignore[attr-defined]
        if name != "train-1":
            orders.resident[name] = "a"
        orders.gang_changed(gang, finished=())  # type: ignore[arg-type]
    assert doubted == [("train-0", "a")]
    assert orders.resident == {}
