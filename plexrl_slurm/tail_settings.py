"""``[tails]`` of the partition's configuration: which last samples of rollouts may be paused."""

from collections.abc import Mapping
from typing import Any

from plexrl_slurm.core.tails import TailRules
from plexrl_slurm.tomlcheck import Report, Table, as_count, as_count_or_none, as_seconds, as_switch


def read_tails(report: Report, data: Mapping[str, Any]) -> TailRules:
    """The rules; what is wrong goes into ``report``."""
    table = Table(report, "tails", data)
    table.take("pause", as_switch, required=False)
    table.take("running", as_count, required=False)
    table.take("share_percent", _percent, to="share", required=False)
    table.take("least_seconds", as_seconds, to="least_us", required=False)
    table.take("pauses", as_count, required=False)
    table.finish()
    return TailRules(**table.values)


def _percent(value: object) -> int:
    """A whole number from 0 to 100."""
    if as_count_or_none(value) > 100:
        raise ValueError(f"{value!r} is more than 100 percent")
    return as_count_or_none(value)
