"""A WPG that lies on several nodes, as the daemon knows it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Persist
from plexrl_slurm.daemons.gang_facts import Position, Said
from plexrl_slurm.daemons.layout import HeldWpg, Place
from plexrl_slurm.transport import messages as tm


@dataclass(slots=True, eq=False)
class Part:
    """A WPG's share of one node."""

    place: Place
    #: Of its agent; empty until that has said hello.
    address: bytes = b""
    #: ``starting``, ``up`` or ``down``.
    state: str = "down"
    pids: list[int] = field(default_factory=list)
    #: Starts in a row that failed because of this part.
    failures: int = 0
    #: What its agent said of it when it, or this daemon, was new.
    said: Said | None = None
    #: Its answer to the last :class:`PrepareOrder`.
    ready: tm.PartReady | None = None


@dataclass(slots=True, eq=False)
class Asked:
    """An order that not every part has answered yet."""

    then: Callable[[list[tm.Done]], None]
    answers: dict[int, tm.Done] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Gang:
    """A WPG on several nodes."""

    held: HeldWpg
    parts: list[Part]
    #: Tells people.
    show: Callable[["Gang", str], None]
    #: The last one that was ordered; 0: none by this daemon.
    incarnation: int = 0
    up: bool = False
    #: Progress of the image of each deployment that every node has.
    settled: dict[str, Position] = field(default_factory=dict)
    #: Runs, switches and saves.
    asked: dict[str, Asked] = field(default_factory=dict)
    #: Copies to the durable tier, by order: the deployment and what was asked for. They go on
    #: while ranks start again.
    copies: dict[str, tuple[Asked, Persist]] = field(default_factory=dict)
    pause: asyncio.TimerHandle | None = None

    @property
    def id(self) -> WpgId:
        """Its name."""
        return self.held.id

    def part_of(self, address: bytes) -> Part | None:
        """The part of an agent."""
        return next((part for part in self.parts if part.address == address), None)
