"""Which agents have which snapshots, as the daemon has heard; has them brought where they will be
sampled, while other jobs use the GPUs there."""

from collections.abc import Callable, Iterable

from plexrl_slurm.transport import messages as tm


class SnapshotPlaces:
    """Forgets nothing that an agent would not say again in its next hello."""

    def __init__(
        self,
        post: Callable[[bytes, tm.Command], None],
        *,
        epoch: int,
        sampler_of: Callable[[str], bytes],
    ) -> None:
        """``sampler_of``: the agent that will need a snapshot, or nothing."""
        self._post, self._epoch, self._sampler_of = post, epoch, sampler_of
        self._sources: dict[bytes, tm.SnapshotSource] = {}
        self._nodes: dict[bytes, str] = {}
        self._published: dict[str, set[bytes]] = {}
        self._fetched: dict[str, set[bytes]] = {}
        #: Bytes of snapshots that are being brought somewhere.
        self._under_way: dict[str, int] = {}

    # -- what agents say ---------------------------------------------------------------------
    def hello(self, address: bytes, hello: tm.Hello) -> None:
        """All that this agent has."""
        self.gone(address)
        if hello.source is not None:
            self._sources[address] = hello.source
        self._nodes[address] = hello.node
        for name in hello.snapshots:
            self._published.setdefault(name, set()).add(address)
        for name in hello.fetched:
            self._fetched.setdefault(name, set()).add(address)
        for name in {*hello.snapshots, *hello.fetched}:
            self._say_safe(name)

    def here(self, address: bytes, report: tm.SnapshotHere) -> None:
        """It was published there, and is to be brought to where it is sampled; or it has come."""
        if report.origin:
            self._fetched.setdefault(report.snapshot, set()).add(address)
            self._under_way.pop(report.snapshot, None)
        else:
            self._published.setdefault(report.snapshot, set()).add(address)
            self._under_way[report.snapshot] = report.bytes
            self._fetch(report.snapshot)
        self._say_safe(report.snapshot)

    def gone(self, address: bytes) -> None:
        """Nothing can be had from this agent."""
        self._sources.pop(address, None)
        self._nodes.pop(address, None)
        for where in (*self._published.values(), *self._fetched.values()):
            where.discard(address)

    def dropped(self, names: Iterable[str]) -> None:
        """Nobody has them any more."""
        for name in names:
            for known in (self._published, self._fetched, self._under_way):
                known.pop(name, None)

    def _say_safe(self, name: str) -> None:
        """Tell whoever published it, once another node has it."""
        having = {self._nodes.get(each) for each in self._fetched.get(name, ())}
        for publisher in sorted(self._published.get(name, ())):
            if having - {self._nodes.get(publisher)}:
                self._post(publisher, tm.SafeOrder(epoch=self._epoch, snapshot=name))

    # -- who gets it from whom ---------------------------------------------------------------
    def sources(self, name: str) -> list[tm.SnapshotSource]:
        """Who gives it."""
        found = sorted(self._published.get(name, ()))
        return [self._sources[each] for each in found if each in self._sources]

    def nodes(self, name: str) -> list[str]:
        """Where it is in memory."""
        found = self._published.get(name, set()) | self._fetched.get(name, set())
        return sorted({self._nodes[each] for each in found if each in self._nodes})

    def fetch_again(self) -> None:
        """An agent is there again: what it gives or needs may go on."""
        for name in [*self._under_way]:
            self._fetch(name)

    def _fetch(self, name: str) -> None:
        sampler, sources = self._sampler_of(name), self.sources(name)
        if not sampler or not sources:
            return  # whoever switches to it brings it
        if sampler in self._published.get(name, set()) | self._fetched.get(name, set()):
            self._under_way.pop(name, None)
            return
        self._post(
            sampler,
            tm.BringOrder(
                epoch=self._epoch, snapshot=name, bytes=self._under_way[name], sources=sources
            ),
        )
