"""Who has used how much: for fair shares, and for limits of a day. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import Key, Subject, keys_of
from plexrl_slurm.core.priority import DAY_US, Owner, Usage

#: What was used in a day is kept by minutes.
MINUTE_US: Final = 60_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DuesNews:
    """What is other than it was."""

    #: ``(account, user, GPU-microseconds, at)``: so much counted at that instant.
    used: tuple[tuple[str, str, float, int], ...] = ()
    #: ``(minute, user, account, qos, GPU-microseconds)``.
    day: tuple[tuple[int, str, str, str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.used or self.day)


class Dues:
    """As far as it was told."""

    def __init__(self, half_life_us: int) -> None:
        self._usage = Usage(half_life_us)
        self._day: Counter[tuple[int, str, str, str]] = Counter()
        self._new_owners: set[Owner] = set()
        self._new_minutes: set[tuple[int, str, str, str]] = set()

    def add(self, owner: Owner, qos: str, gpu_us: int, at_us: int) -> None:
        """Somebody used something."""
        self._usage.add(owner, gpu_us, at_us)
        minute = (at_us // MINUTE_US, owner.user, owner.account, qos)
        self._day[minute] += gpu_us
        self._new_owners.add(owner)
        self._new_minutes.add(minute)

    def forget(self, now_us: int) -> None:
        """What is older than a day counts for no limit of a day any more."""
        oldest = _oldest(now_us)
        for key in [key for key in self._day if key[0] < oldest]:
            del self._day[key]

    def hear(self, news: DuesNews) -> None:
        """What another one has."""
        for account, user, gpu_us, at_us in news.used:
            self._usage.set(Owner(account, user), gpu_us, at_us)
        for minute, user, account, qos, gpu_us in news.day:
            self._day[minute, user, account, qos] = gpu_us

    def news(self) -> DuesNews:
        """What has changed since this was asked the last time."""
        owners, minutes = self._new_owners, self._new_minutes
        self._new_owners, self._new_minutes = set(), set()
        return DuesNews(
            used=tuple((*owner, *self._usage.of(owner)) for owner in sorted(owners)),
            day=tuple((*key, self._day[key]) for key in sorted(minutes) if key in self._day),
        )

    def usage(self, now_us: int) -> dict[Owner, float]:
        """What counts of it for fair shares."""
        return self._usage.at(now_us)

    def today(self, now_us: int) -> dict[Key, int]:
        """Of the last 24 hours, by whoever has a limit."""
        found: Counter[Key] = Counter()
        for (_, user, account, qos), gpu_us in self._recent(_oldest(now_us)):
            for key in keys_of(Subject(job=JobId(0), user=user, account=account, qos=qos)):
                found[key] += gpu_us
        return found

    def _recent(self, oldest: int) -> Iterable[tuple[tuple[int, str, str, str], int]]:
        return ((key, gpu_us) for key, gpu_us in self._day.items() if key[0] >= oldest)


def _oldest(now_us: int) -> int:
    return (now_us - DAY_US) // MINUTE_US
