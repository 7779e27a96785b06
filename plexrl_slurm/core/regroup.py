"""Which jobs should move to another group: to give a WPG back, or to keep a promise. Pure.

A move costs a pause of the whole group, so it is decided rarely, and only for jobs that stay
long enough to earn it back.
"""

from collections.abc import Callable
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
    if rules.placement not in (Placement.FIT, Placement.PACK):
        return None
    thin = sorted(
        pools.groups.values(), key=lambda group: (load_of(group) / group.gpus, group.number)
    )
    for group in thin:
        if group.members and all(may_move(job) for job in group.members):
            homes = _elsewhere(list(group.members.values()), group, pools, rules)
            if homes is not None:
                return Regrouping(group=group.number, homes=homes, gives_back=True)
    return None


def relieve(
    group: Group, pools: Pools, rules: Rules, may_move: Callable[[JobId], bool]
) -> Regrouping | None:
    """Who leaves ``group`` so that the promises of those who stay are kept again."""
    members = list(group.members.values())
    if rules.placement is not Placement.FIT or len(members) < 2 or kept(members, 1.0, group.gpus):
        return None
    for leaver in sorted(members, key=lambda member: (member.profile.load, -member.job)):
        stay = [member for member in members if member is not leaver]
        if not may_move(leaver.job) or not kept(stay, 1.0, group.gpus):
            continue
        others = _without(pools, group)
        found = place(replace(leaver, rollout_gpus=0), others, rules)
        if isinstance(found, Home):
            homes = ((leaver.job, found.group),)
            return Regrouping(group=group.number, homes=homes, gives_back=False)
    return None


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
