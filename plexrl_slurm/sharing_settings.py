"""``[sharing]``: who shares a WPG with whom, and how much slower than alone a job may become."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plexrl_slurm.core.grouping import Placement, Rules
from plexrl_slurm.core.leaving import LeaveRules
from plexrl_slurm.core.placements import PLACEMENTS
from plexrl_slurm.core.profiles import Guess
from plexrl_slurm.tomlcheck import (
    Report,
    Table,
    as_count,
    as_switch,
    mapping,
    one_of,
    positive_seconds,
)

_MOST: float = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSettings:
    """``[sharing]`` and ``[sharing.guess]``."""

    #: A name of ``core.placements.PLACEMENTS``.
    placement: str = "fit"
    #: What a job is promised that asks for nothing: so many times its time alone.
    max_slowdown: float = 1.10
    #: Most jobs of one training WPG.
    max_jobs: int = 6
    #: Most of a WPG's time that jobs may be expected to ask for together, with ``fit``.
    max_load: float = 0.95
    #: Of what a promise leaves, so much may be predicted to be used up.
    margin: float = 0.9
    #: Jobs move to other WPGs when promises are predicted to break.
    regroup: bool = True
    #: They also move so that a training WPG is free for somebody who waits.
    merge: bool = True
    #: No job moves twice within so long.
    regroup_us: int = 1_800_000_000
    #: Of a job of which nothing is known.
    guess: Guess = field(default_factory=Guess)

    @property
    def rules(self) -> Rules:
        """As the core has them."""
        return Rules(
            placement=PLACEMENTS[self.placement][0],
            most=self.max_jobs,
            full=self.max_load,
            margin=self.margin,
        )

    @property
    def leaving(self) -> LeaveRules:
        """As the core has them."""
        return LeaveRules(rules=self.rules, regroup_us=self.regroup_us)

    @property
    def joins_first(self) -> bool:
        """Whether whoever would take an empty training WPG comes after those that join others."""
        return self.rules.placement is Placement.FIT

    @property
    def backfill(self) -> bool:
        """Whether a later job may go before an earlier one that finds no place."""
        return PLACEMENTS[self.placement][1]


def read_sharing(report: Report, data: Mapping[str, Any]) -> SharingSettings:
    """The table ``[sharing]`` of a partition's file."""
    given = mapping(report, data, "sharing")
    table = Table(report, "sharing", given)
    table.take("placement", one_of("placement", tuple(PLACEMENTS)), required=False)
    table.take("max_slowdown", as_promise, required=False)
    table.take("max_jobs", as_count, required=False)
    table.take("max_load", _number(0.01, _MOST), required=False)
    table.take("margin", _number(0.01, 1.0), required=False)
    table.take("regroup", as_switch, required=False)
    table.take("merge", as_switch, required=False)
    table.take("regroup_seconds", positive_seconds, to="regroup_us", required=False)
    guess = Table(report, "sharing.guess", mapping(report, given, "guess", at="sharing"))
    table.known.append("guess")
    table.finish()
    guess.take("step_seconds", positive_seconds, to="step_us", required=False)
    guess.take("train_share", _number(0.001, 1.0), required=False)
    guess.take("sample_share", _number(0.001, 1.0), required=False)
    guess.take("switch_seconds", positive_seconds, to="switch_us", required=False)
    guess.finish()
    return SharingSettings(**table.values, guess=Guess(**guess.values))


def as_promise(value: object) -> float:
    """How many times as long as alone: 1 or more."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= _MOST:
        return float(value)
    raise ValueError(f"{value!r} is not a number from 1.0 to {_MOST:.0f}, such as 1.10")


def _number(least: float, most: float) -> Any:
    def convert(value: object) -> float:
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and least <= value <= most
        ):
            return float(value)
        raise ValueError(f"{value!r} is not a number from {least:g} to {most:g}")

    return convert
