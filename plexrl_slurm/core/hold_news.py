"""What is decided of holds, told so that it can be decided again. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plexrl_slurm.core.holding import (
    Demand,
    Fault,
    HoldAction,
    HoldRules,
    HoldView,
    decide,
    excluded,
    rest_until_us,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """What does not change while a daemon lives."""

    rules: HoldRules = field(default_factory=HoldRules)
    #: Pauses after submissions that failed, and holds that ended at once.
    first_rest_us: int = 5_000_000
    longest_rest_us: int = 600_000_000
    #: A node that failed so often in that time is left out for that time.
    exclude_after: int = 3
    exclude_us: int = 3_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldNews:
    """What a decision is made on, as far as it has changed since the last one."""

    #: New, or other than they were.
    holds: tuple[HoldView, ...] = ()
    gone: tuple[str, ...] = ()
    #: As they are now.
    demand: Demand = field(default_factory=Demand)
    failed_us: tuple[int, ...] = ()


def to_do(
    at_us: int,
    holds: Iterable[HoldView],
    demand: Demand,
    failed_us: Sequence[int],
    rules: KeepRules,
) -> tuple[HoldAction, ...]:
    """What to do with holds now; ``failed_us``: instants of the failures since one last came up."""
    rest_us = rest_until_us(
        failed_us, first_us=rules.first_rest_us, longest_us=rules.longest_rest_us
    )
    return decide(at_us, list(holds), demand, rules.rules, not_before_us=rest_us)


def left_out(at_us: int, faults: Sequence[Fault], rules: KeepRules) -> list[str]:
    """Nodes that the next hold is not to have."""
    return sorted(excluded(at_us, faults, rules.exclude_after, rules.exclude_us))
