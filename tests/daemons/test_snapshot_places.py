"""What the daemon knows of snapshots, and orders."""

from typing import Any

import pytest

from plexrl_slurm.daemons.snapshot_places import SnapshotPlaces
from plexrl_slurm.transport import messages as tm


class Hub:
    """Places, and what they had posted."""

    def __init__(self, sampler: bytes = b"n2") -> None:
        self.sampler = sampler
        self.posted: list[tuple[bytes, tm.Command]] = []
        self.places = SnapshotPlaces(
            lambda where, what: self.posted.append((where, what)),
            epoch=7,
            sampler_of=lambda _: self.sampler,
        )

    def hello(self, node: str, *, port: int = 1, **facts: Any) -> None:
        source = tm.SnapshotSource(agent=node, host="h", port=port, folder="/f", token="t")
        values: dict[str, Any] = {"wpgs": [], "images": [], "snapshots": [], "finished": []}
        self.places.hello(
            node.encode(),
            tm.Hello(
                agent=node, hold="h1", node=node, epoch=1, pid=1, source=source, **(values | facts)
            ),
        )

    def here(self, node: str, origin: str = "") -> None:
        report = tm.SnapshotHere(agent=node, epoch=1, snapshot="s", bytes=9, origin=origin)
        self.places.here(node.encode(), report)

    def take(self) -> list[tuple[bytes, tm.Command]]:
        posted, self.posted = self.posted, []
        return posted


def test_a_fetch_is_ordered_as_soon_as_a_snapshot_is_published() -> None:
    hub = Hub()
    hub.hello("n1")
    hub.hello("n2")
    hub.here("n1")
    ((where, order),) = hub.take()
    assert where == b"n2"
    assert isinstance(order, tm.BringOrder)
    assert (order.snapshot, order.bytes) == ("s", 9)
    assert [source.agent for source in order.sources] == ["n1"]


def test_the_publisher_hears_when_another_node_has_it() -> None:
    hub = Hub()
    hub.hello("n1")
    hub.hello("n2")
    hub.here("n1")
    hub.take()
    hub.here("n2", origin="n1")
    assert hub.take() == [(b"n1", tm.SafeOrder(epoch=7, snapshot="s"))]
    assert hub.places.nodes("s") == ["n1", "n2"]


@pytest.mark.parametrize("first", ["n1", "n2"])
def test_a_daemon_that_starts_learns_from_hellos_what_is_safe(first: str) -> None:
    hub = Hub()
    facts: dict[str, Any] = {"n1": {"snapshots": ["s"]}, "n2": {"fetched": ["s"]}}
    for node in sorted(facts, reverse=first == "n2"):
        hub.hello(node, **facts[node])
    assert (b"n1", tm.SafeOrder(epoch=7, snapshot="s")) in hub.take()


def test_a_copy_with_another_agent_of_the_same_node_makes_nothing_safe() -> None:
    hub = Hub()
    hub.hello("n1", snapshots=["s"], fetched=["s"])
    assert hub.take() == []


def test_an_agent_that_is_back_is_asked_at_its_new_port() -> None:
    hub = Hub()
    hub.hello("n1", port=1)
    hub.hello("n2")
    hub.here("n1")
    hub.take()
    hub.hello("n1", port=2, snapshots=["s"])
    hub.places.fetch_again()
    ((_, order),) = hub.take()
    assert isinstance(order, tm.BringOrder)
    assert [source.port for source in order.sources] == [2]


def test_an_agent_that_is_lost_gives_nothing() -> None:
    hub = Hub()
    hub.hello("n1", snapshots=["s"])
    assert hub.places.sources("s")
    hub.places.gone(b"n1")
    assert hub.places.sources("s") == []
    assert hub.places.nodes("s") == []


def test_nothing_is_fetched_where_it_is_published_or_has_no_sampler() -> None:
    for sampler in (b"n1", b""):
        hub = Hub(sampler)
        hub.hello("n1")
        hub.here("n1")
        assert hub.take() == []


def test_what_is_dropped_is_not_fetched_again() -> None:
    hub = Hub()
    hub.hello("n1")
    hub.hello("n2")
    hub.here("n1")
    hub.take()
    hub.places.dropped(["s"])
    hub.places.fetch_again()
    assert hub.take() == []
