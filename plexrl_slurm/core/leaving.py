"""Who leaves a WPG now, of those who may: decided from what a journal holds. Pure.

:mod:`plexrl_slurm.core.relief` and :mod:`plexrl_slurm.core.vacating` decide; this asks them about a
partition as it is at an instant.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.relief import merge, relieve
from plexrl_slurm.core.sites import Partition
from plexrl_slurm.core.vacating import vacant


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRules:
    """What the site wants; it does not change while a daemon lives."""

    rules: Rules = field(default_factory=Rules)
    #: Nobody leaves who came, or ends, within so long.
    regroup_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """Since when jobs have been where they are; what has changed of it."""

    since_us: Mapping[JobId, int] = field(default_factory=dict)
    #: These have ended, or do not run.
    gone: tuple[JobId, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.since_us or self.gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Who leaves a WPG, and for which ones."""

    wpg: WpgId
    homes: tuple[tuple[JobId, WpgId], ...]
    #: All of them leave, so that it is empty; else it is one, so that promises are kept.
    merges: bool


class Leaves:
    """A partition at an instant."""

    def __init__(
        self, rules: LeaveRules, partition: Partition, since_us: Mapping[JobId, int], at_us: int
    ) -> None:
        self._rules, self._partition = rules, partition
        self._since_us, self._at_us = since_us, at_us

    def may_leave(self, job: JobId) -> bool:
        """Whether it runs, has been where it is for long, and stays for long."""
        since_us, there = self._since_us.get(job), self._partition.of(job)
        if since_us is None or there is None:
            return False
        ends_us, at_us, least_us = there.who.ends_us, self._at_us, self._rules.regroup_us
        # A clock that was set back must not keep a job where it is.
        stayed = at_us - min(at_us, since_us) >= least_us
        return stayed and (ends_us is None or ends_us - at_us >= least_us)

    def relieved(self, wpgs: Iterable[WpgId]) -> Leaving | None:
        """Who leaves the first of these that somebody has to leave, and can."""
        for wpg in wpgs:
            found = relieve(self._partition, wpg, self._rules.rules, self.may_leave)
            if found is not None:
                return Leaving(wpg=wpg, homes=(found,), merges=False)
        return None

    def merged(self) -> Leaving | None:
        """A training WPG that all can leave."""
        found = merge(self._partition, self._rules.rules, self.may_leave)
        if found is None:
            return None
        return Leaving(wpg=found.wpg, homes=found.homes, merges=True)

    def vacated(self, holds: Sequence[tuple[str, Sequence[WpgId]]]) -> str | None:
        """Of holds with these WPGs, one that all can leave for the others."""
        return vacant(self._partition, holds, self._rules.rules, self.may_leave)


def still_right(partition: Partition, rules: LeaveRules, before: Leaving) -> bool:
    """Whether those who were to leave would leave now, and for the same; others have come and
    gone meanwhile."""
    mine = {job for job, _ in before.homes}
    if before.merges:
        again = merge(partition, rules.rules, mine.__contains__, only=(before.wpg,))
        return again is not None and again.homes == before.homes
    return (relieve(partition, before.wpg, rules.rules, mine.__contains__),) == before.homes
