"""Which hold all jobs could leave for the others. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from plexrl_slurm.core.admission import Placement, place
from plexrl_slurm.core.errors import ModelTooLarge
from plexrl_slurm.core.grouping import Placement as Way
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.sites import Applicant, Partition

#: Holds that one look tries: those that are used least.
FEW: Final = 4


def vacant(
    partition: Partition,
    holds: Sequence[tuple[str, Sequence[WpgId]]],
    rules: Rules,
    may_leave: Callable[[JobId], bool],
) -> str | None:
    """The hold, of those with these WPGs, that all who live there could leave for WPGs that are as
    large, of others that are used already, with every promise kept; the least used first."""
    if rules.placement is not Way.FIT:
        return None
    used = {name: wpgs for name, wpgs in holds if any(partition.members.get(wpg) for wpg in wpgs)}

    def load(name: str) -> tuple[float, str]:
        there = [wpg for wpg in used[name] if wpg in partition.members]
        return sum(partition.load(wpg) for wpg in there), name

    for name in sorted(used, key=load)[:FEW] if len(used) > 1 else ():
        others = {wpg for other, wpgs in used.items() if other != name for wpg in wpgs}
        if _all_fit(partition, set(used[name]), others, rules, may_leave):
            return name
    return None


def _all_fit(
    partition: Partition,
    wpgs: Collection[WpgId],
    others: Collection[WpgId],
    rules: Rules,
    may_leave: Callable[[JobId], bool],
) -> bool:
    """Whether everybody who lives on ``wpgs`` finds a place on ``others``, one after another."""
    leave: dict[JobId, Applicant] = {
        who.job: who for wpg in sorted(wpgs) for who in partition.members.get(wpg, ())
    }
    if not all(may_leave(job) for job in leave):
        return False
    gpus = {site.wpg.id: site.wpg.gpus for site in partition.sites}
    left = Partition(
        sites=[site for site in partition.sites if site.wpg.id in others],
        settled=partition.settled,
    )
    for job, who in sorted(leave.items(), key=lambda each: (-_share(each[1]), each[0])):
        if (there := partition.of(job)) is None:
            return False
        pools = tuple(pool for pool, wpg in there.homes.items() if wpg in wpgs)
        with left.without(job, pools):
            try:
                found = place(who, left, rules, pools=pools)
            except ModelTooLarge:
                return False
        if not isinstance(found, Placement):
            return False
        if any(gpus[home] != gpus[there.homes[pool]] for pool, home in found.homes.items()):
            return False
        left.settle(replace(there, homes={**there.homes, **found.homes}))
    return True


def _share(who: Applicant) -> float:
    """Of the time of a WPG, on the one where it is most."""
    return max(max(habits.train.load, habits.rollout.load) for habits in who.habits.values())
