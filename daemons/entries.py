"""Calls as the daemon keeps them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.messages import Call


@dataclass(slots=True, eq=False)
class Entry:
    """A call while anybody may still ask for it."""

    call: Call
    #: Samples are kept whole; training bodies are in the spool.
    sample: wire.Sample | wire.Doomed | None = None
    #: Encoded body of a training call while it is hot; read from the spool otherwise.
    data: bytes | None = None
    #: Snapshot id of a publish.
    publish: str = ""
    #: What a result means beyond itself (a snapshot is ready, a checkpoint exists).
    translate: Callable[[wire.Result], Any] | None = None
    parts: dict[int, wire.Result] = field(default_factory=dict)
    #: The answer, once it is durable.
    outcome: Any = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    #: Something was delivered to the caller at this instant; ``None``: never.
    fetched_us: int | None = None
    #: It has its outcome since.
    ended_us: int = 0
    #: It ended while no daemon was there; its end is being written down.
    late: bool = False
    #: A complete image contains it: no replay will need it.
    forgotten: bool = False

    def resolve(self, outcome: Any) -> None:
        """Everybody who waits gets ``outcome``."""
        self.outcome = outcome
        self.ended_us = now_us()
        self.ended.set()
