"""One pass along the queue: who is looked at, and where it ends. Pure.

The daemon and the simulator walk in the same way; only what a place is differs.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

HOUR_US: Final = 3_600_000_000

_Why = TypeVar("_Why")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """Who may go before whom."""

    #: Whether a later job may go before an earlier one that does not fit.
    backfill: bool = True
    #: Nobody goes before a job that has waited so long.
    guard_us: int = 72 * HOUR_US
    #: Most jobs that one pass looks at.
    depth: int = 64


class End(StrEnum):
    """Why nobody else is looked at."""

    #: The one before did not fit, and there is no backfill.
    ORDER = "order"
    #: The one before did not fit, and has waited too long to be passed.
    GUARD = "guard"
    DEPTH = "depth"


class Walk(Generic[_Why]):
    """One pass. A shape that found no room finds none later in it either: nothing is given back
    while it lasts."""

    def __init__(self, rules: TurnRules, at_us: int) -> None:
        #: Set when the pass is over.
        self.ended: End | None = None
        self._rules, self._at_us = rules, at_us
        self._looked = 0
        self._failed: dict[Hashable, _Why] = {}

    def look(self, shape: Hashable) -> _Why | None:
        """The next job is looked at; what stood in the way of another of its shape."""
        self._looked += 1
        if self._looked >= self._rules.depth:
            self.ended = End.DEPTH
        return self._failed.get(shape)

    def fails(self, why: _Why, *, since_us: int, shape: Hashable = None) -> None:
        """It found no room; ``shape``: nor will another like it."""
        if shape is not None:
            self._failed[shape] = why
        if not self._rules.backfill:
            self.ended = End.ORDER
        elif self._at_us - since_us >= self._rules.guard_us:
            self.ended = End.GUARD
