"""Which jobs should move to another group: to give a WPG back, or to keep a promise. Pure.

A move costs a pause of the whole group, so it is decided rarely, and only for jobs that stay
long enough to earn it back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from plexrl_slurm.core.grouping import (
    Group,
    Home,
    Member,
    Placement,
    Pools,
    Rules,
    kept,
    load_of,
    place,
)
from plexrl_slurm.core.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """Members of one group that go elsewhere, all at once."""

    group: int
    #: Where each goes; ``None``: to a new group.
    homes: tuple[tuple[JobId, int | None], ...]
    #: Nobody is left: the WPG is given back.
    gives_back: bool


def merge(pools: Pools, rules: Rules, may_move: Callable[[JobId], bool]) -> Regrouping | None:
    """A group that can be emptied into others of its shape; the one that takes most room first.

    Its rollout GPUs stay as they are: only training WPGs are merged.
    """
    for group in thinnest(pools):
        found = emptied(group, pools, rules, may_move)
        if found is not None:
            return found
    return None


def thinnest(pools: Pools) -> list[Group]:
    """Groups that use least of what they hold first."""
    return sorted(
        pools.groups.values(), key=lambda group: (load_of(group) / group.gpus, group.number)
    )


def emptied(
    group: Group, pools: Pools, rules: Rules, may_move: Callable[[JobId], bool]
) -> Regrouping | None:
    """Where the members of ``group`` go so that nobody is left, and no promise breaks."""
    if rules.placement not in (Placement.FIT, Placement.PACK) or not group.members:
        return None
    if not all(may_move(job) for job in group.members):
        return None
    homes = _elsewhere(list(group.members.values()), group, pools, rules)
    return None if homes is None else Regrouping(group=group.number, homes=homes, gives_back=True)


def relieve(
    group: Group, pools: Pools, rules: Rules, may_move: Callable[[JobId], bool]
) -> Regrouping | None:
    """Who leaves ``group`` so that the promises of those who stay are kept again."""
    for leaver in leavers(group, rules, may_move):
        others = _without(pools, group)
        found = place(replace(leaver, rollout_gpus=0), others, rules)
        if isinstance(found, Home):
            homes = ((leaver.job, found.group),)
            return Regrouping(group=group.number, homes=homes, gives_back=False)
    return None


def leavers(group: Group, rules: Rules, may_move: Callable[[JobId], bool]) -> Iterator[Member]:
    """Members without which the promises of the others would be kept again, the lightest first;
    nobody, if they are kept."""
    members = list(group.members.values())
    if rules.placement is not Placement.FIT or len(members) < 2 or kept(members, 1.0, group.gpus):
        return
    for leaver in sorted(members, key=lambda member: (member.profile.load, -member.job)):
        stay = [member for member in members if member is not leaver]
        if may_move(leaver.job) and kept(stay, 1.0, group.gpus):
            yield leaver


def _without(pools: Pools, group: Group) -> Pools:
    """The pools as if ``group`` took nobody; its own members may change nothing there."""
    groups = {
        number: Group(
            number=number, gpus=each.gpus, host_bytes=each.host_bytes, members=dict(each.members)
        )
        for number, each in pools.groups.items()
        if number != group.number
    }
    return replace(pools, groups=groups)


def _elsewhere(
    members: list[Member], group: Group, pools: Pools, rules: Rules
) -> tuple[tuple[JobId, int | None], ...] | None:
    others = replace(_without(pools, group), train_free=0)
    homes: list[tuple[JobId, int | None]] = []
    for member in sorted(members, key=lambda each: (-each.profile.load, each.job)):
        found = place(replace(member, rollout_gpus=0), others, rules)
        if not isinstance(found, Home) or found.group is None:
            return None
        others.groups[found.group].members[member.job] = member
        homes.append((member.job, found.group))
    return tuple(homes)
