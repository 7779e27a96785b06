"""Who is next in the queue, and what each may have: ``[priority]``, ``[accounts]``, ``[qos]``,
``[limits]``, ``[queue]`` and ``[reservation]`` of the partition's file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from plexrl_slurm.core.limits import NORMAL, LimitRules, Limits, Qos
from plexrl_slurm.core.priority import Weights
from plexrl_slurm.core.queue_rules import QueueRules
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.sizes import in_words
from plexrl_slurm.core.turns import TurnRules
from plexrl_slurm.tomlcheck import (
    Report,
    Table,
    as_bytes,
    as_count,
    as_count_or_none,
    as_switch,
    as_text,
    mapping,
)

#: The tables of the file that are read here.
TABLES: Final = ("priority", "accounts", "qos", "limits", "queue", "reservation")
#: A QOS's weight multiplies that of a job, which is at most 1000.
_HEAVIEST: Final = 1000
_MOST: Final = 10**9
_TIME: Final = re.compile(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,4}))?(?::(\d{1,4}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Order, limits and reservation of one partition."""

    weights: Weights = field(default_factory=Weights)
    #: Of accounts that have others than 1.
    shares: Mapping[str, int] = field(default_factory=dict)
    limits: LimitRules = field(default_factory=LimitRules)
    turns: TurnRules = field(default_factory=TurnRules)
    reservation: Reservation = field(default_factory=Reservation)

    @property
    def most_qos(self) -> int:
        """The largest priority of a QOS."""
        return max((qos.priority for qos in self.limits.qos.values()), default=0)

    def rules(self, *, joins_first: bool = False) -> QueueRules:
        """As the core has them."""
        return QueueRules(
            weights=self.weights,
            shares=self.shares,
            limits=self.limits,
            turns=self.turns,
            reservation=self.reservation,
            joins_first=joins_first and self.turns.backfill,
        )

    def qos_named(self, options: Mapping[str, Any]) -> Qos | None:
        """The QOS that a row's options ask for; ``None`` if there is none of that name (now)."""
        return self.limits.found(str(options.get("qos") or NORMAL))

    def known_qos(self) -> str:
        """For a sentence."""
        return ", ".join(sorted({NORMAL, *self.limits.qos}))


def read_queue(report: Report, data: Mapping[str, Any], *, backfill: bool = True) -> QueueSettings:
    """The tables of this module; what is wrong goes to ``report``. ``backfill``: unless said."""
    turns = Table(report, "queue", mapping(report, data, "queue"))
    turns.take("backfill", as_switch, required=False)
    turns.take("guard", as_time, to="guard_us", required=False)
    turns.take("depth", as_count, required=False)
    turns.finish()
    kept = Table(report, "reservation", mapping(report, data, "reservation"))
    kept.take("wpgs", as_count_or_none, required=False)
    kept.take("host_bytes", as_bytes, required=False)
    kept.finish()
    qos = {
        name: found
        for name, table in _named(report, data, "qos")
        if (found := _qos(report, name, table)) is not None
    }
    reservation = Reservation(**kept.values)
    if reservation.any and not any(each.reserved for each in qos.values()):
        report.bad("reservation", "no job could ever use it: add reserved = true to a [qos.NAME]")
    return QueueSettings(
        weights=_weights(report, mapping(report, data, "priority")),
        shares=_shares(report, data),
        limits=_limits(report, mapping(report, data, "limits"), qos),
        turns=TurnRules(**{"backfill": backfill, **turns.values}),
        reservation=reservation,
    )


def check_reservation(
    report: Report, queue: QueueSettings, *, wpgs: Sequence[tuple[str, int]], host_bytes: int | None
) -> None:
    """Refuse to keep everything free; ``wpgs`` are pools, and how many of each a hold has."""
    kept = queue.reservation
    if host_bytes is not None and kept.host_bytes >= host_bytes:
        report.bad(
            "reservation.host_bytes",
            f"{in_words(kept.host_bytes)} are all of host_bytes ({in_words(host_bytes)}), so that "
            f"no other job could start: keep less free",
        )
    for pool in dict.fromkeys(pool for pool, _ in wpgs):
        count = sum(each for name, each in wpgs if name == pool)
        if 0 < count <= kept.wpgs:
            report.bad(
                "reservation.wpgs",
                f"{kept.wpgs} are all {pool} WPGs of a hold ({count}), so that no other job could "
                f"start: keep fewer free, or host_bytes instead",
            )


def as_time(value: object) -> int:
    """A stretch of time in Slurm's forms, as microseconds."""
    given = as_text(value)
    match = _TIME.fullmatch(given)
    if match is None:
        raise ValueError(f'{given!r} is not a time: write minutes, "H:MM:SS" or "D-HH:MM:SS"')
    days, first, second, third = (None if each is None else int(each) for each in match.groups())
    first = first or 0
    if days is not None:
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = (first * 60 + (second or 0)) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    return seconds * 1_000_000


# ---- the tables ---------------------------------------------------------------------------


def _weights(report: Report, data: Mapping[str, Any]) -> Weights:
    table = Table(report, "priority", data)
    for name in ("age", "fairshare", "qos"):
        table.take(name, _weight, required=False)
    table.take("priority", _weight, to="job", required=False)
    table.take("max_age", as_time, to="max_age_us", required=False)
    table.take("decay_half_life", as_time, to="half_life_us", required=False)
    table.finish()
    return Weights(**table.values)


def _shares(report: Report, data: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, account in _named(report, data, "accounts"):
        table = Table(report, f"accounts.{name}", account)
        table.take("shares", as_count_or_none)
        table.finish()
        if "shares" in table.values:
            found[name] = table.values["shares"]
    return found


def _qos(report: Report, name: str, data: Mapping[str, Any]) -> Qos | None:
    table = Table(report, f"qos.{name}", data)
    table.take("priority", _weight, required=False)
    table.take("weight", _qos_weight, required=False)
    table.take("reserved", as_switch, required=False)
    table.take("users", _names, required=False)
    table.take("accounts", _names, required=False)
    _take_limits(table)
    _take_limits(table, "_per_user")
    table.finish()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        report.bad(f"qos.{name}", f"{name!r} is not a name: use letters, digits, dot and dash")
        return None
    values = dict(table.values)
    per_user = {key: values.pop(f"{key}_per_user") for key in _KEYS if f"{key}_per_user" in values}
    own = {key: values.pop(key) for key in _KEYS if key in values}
    return Qos(name=name, limits=Limits(**own), per_user=Limits(**per_user), **values)


def _limits(report: Report, data: Mapping[str, Any], qos: Mapping[str, Qos]) -> LimitRules:
    report.unknown("limits", data, ("users", "accounts", "user", "account"))
    general = {}
    for name in ("users", "accounts"):
        table = Table(report, f"limits.{name}", mapping(report, data, name, at="limits"))
        _take_limits(table)
        table.finish()
        general[name] = Limits(**table.values)
    single: dict[str, dict[str, Limits]] = {}
    for name in ("user", "account"):
        single[name] = {}
        for who, limits in _named(report, data, name, at="limits"):
            table = Table(report, f"limits.{name}.{who}", limits)
            _take_limits(table)
            table.finish()
            single[name][who] = Limits(**table.values).over(general[f"{name}s"])
    return LimitRules(
        qos=qos,
        users=general["users"],
        accounts=general["accounts"],
        user=single["user"],
        account=single["account"],
    )


_KEYS: Final = ("max_jobs", "max_submit", "gpu_us_per_day", "host_bytes")


def _take_limits(table: Table, suffix: str = "") -> None:
    table.take(f"max_jobs{suffix}", as_count_or_none, required=False)
    table.take(f"max_submit{suffix}", as_count_or_none, required=False)
    table.take(
        f"gpu_seconds_per_day{suffix}", _gpu_us, to=f"gpu_us_per_day{suffix}", required=False
    )
    table.take(f"host_bytes{suffix}", as_bytes, required=False)


def _named(
    report: Report, data: Mapping[str, Any], name: str, *, at: str = ""
) -> list[tuple[str, Mapping[str, Any]]]:
    """Tables ``[name.X]`` by X."""
    tables = mapping(report, data, name, at=at)
    return [(each, mapping(report, tables, each, at=f"{at}.{name}".lstrip("."))) for each in tables]


def _weight(value: object) -> int:
    if type(value) is int and 0 <= value <= _MOST:
        return value
    raise ValueError(f"{value!r} is not a whole number from 0 to {_MOST:,}")


def _qos_weight(value: object) -> int:
    if type(value) is int and 1 <= value <= _HEAVIEST:
        return value
    raise ValueError(f"{value!r} is not a whole number from 1 to {_HEAVIEST}")


def _gpu_us(value: object) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12:
        return round(value * 1_000_000)
    raise ValueError(f"{value!r} is not a number of GPU-seconds, 0 or more")


def _names(value: object) -> frozenset[str]:
    if isinstance(value, list) and all(isinstance(each, str) and each for each in value):
        return frozenset(value)
    raise ValueError(f'{value!r} is not a list of names, such as ["ada", "bob"]')
