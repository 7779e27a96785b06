"""Where a job lives: a home WPG in each pool, or everything that is in the way. Pure.

The training WPG is chosen by :func:`plexrl_slurm.core.grouping.place`, the simulator's own; here
it gets what a partition of held WPGs knows beyond a simulated one: which of them have memory left
for the job's images, and rollout WPGs that are shared as well. A promise is one for both pools:
what a job loses on its rollout WPG is left no more for its training WPG.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plexrl_slurm.core import grouping
from plexrl_slurm.core.errors import ModelTooLarge
from plexrl_slurm.core.grouping import Group, Home, Member, Pools, Rules, load_of
from plexrl_slurm.core.grouping import Placement as Way
from plexrl_slurm.core.hindrances import hindrances
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle
from plexrl_slurm.core.sites import (
    Applicant,
    Partition,
    Site,
    allowance,
    broken,
    could_hold,
    load,
    usable,
)

#: Of what memory has been seen to already.
_ENDLESS = 1 << 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A home in every pool that was asked for."""

    homes: Mapping[Pool, WpgId]


def place(
    who: Applicant, partition: Partition, rules: Rules, *, pools: Sequence[Pool] = tuple(Pool)
) -> Placement | tuple[Obstacle, ...]:
    """Homes in all of ``pools``, or in none of them and every obstacle, the nearest first.

    Raises ``ModelTooLarge`` if no site would have room for one of its images even if it were empty.
    """
    for pool in pools:
        refuse_too_large(who, pool, partition.sites)
    homes: dict[Pool, WpgId] = {}
    obstacles: list[Obstacle] = []
    slow: dict[JobId, float] = {}
    known = partition.homes.get(who.job, {}).get(Pool.ROLLOUT)
    if Pool.ROLLOUT in pools:
        home = _rollout_home(who, partition, rules)
        if home is None:
            obstacles += hindrances(who, Pool.ROLLOUT, partition, rules, {})
        else:
            homes[Pool.ROLLOUT] = known = home
    if known is not None and known in partition.members:
        slow = partition.with_one_more(known, who)
    if Pool.TRAIN in pools:
        home = _train_home(who, partition, rules, slow)
        if home is None:
            obstacles += hindrances(who, Pool.TRAIN, partition, rules, slow)
        else:
            homes[Pool.TRAIN] = home
    return tuple(obstacles) if obstacles else Placement(homes=homes)


def _rollout_home(who: Applicant, partition: Partition, rules: Rules) -> WpgId | None:
    """The one that samples least; alone if nobody shares, and with everybody's promise if fit."""
    ranked = sorted(
        usable(who, Pool.ROLLOUT, partition),
        key=lambda site: (load(partition, site, who.job), site.wpg.id),
    )
    for site in ranked:
        others = [each for each in partition.members[site.wpg.id] if each.job != who.job]
        if not others:
            return site.wpg.id
        if rules.placement is Way.ISOLATED:
            continue
        if rules.placement is Way.FIT:
            profile = who.profile(Pool.ROLLOUT, site.wpg.gpus)
            if load(partition, site, who.job) + profile.load > rules.full:
                continue
            if broken(who, site, partition, rules, {}):
                continue
        return site.wpg.id
    return None


def _train_home(
    who: Applicant, partition: Partition, rules: Rules, slow: Mapping[JobId, float]
) -> WpgId | None:
    """What grouping says of the smallest WPGs that can hold it, then of the next larger ones."""
    sites = list(usable(who, Pool.TRAIN, partition))
    for gpus in sorted({site.wpg.gpus for site in sites}):
        shape = sorted((s for s in sites if s.wpg.gpus == gpus), key=lambda site: site.wpg.id)
        groups, free = groups_of(who, shape, partition, slow)
        pools = Pools(
            train_free=gpus * len(free),
            rollout_free=0,
            node_gpus=1,
            node_bytes=_ENDLESS,
            groups=groups,
        )
        found = grouping.place(member_of(who, partition, gpus, slow), pools, rules)
        if isinstance(found, Home):
            return free[0] if found.group is None else shape[found.group].wpg.id
    return None


def groups_of(
    who: Applicant, shape: Sequence[Site], partition: Partition, slow: Mapping[JobId, float]
) -> tuple[dict[int, Group], list[WpgId]]:
    """Sites of one shape as groups, numbered as they stand; and those that are empty."""
    groups: dict[int, Group] = {}
    free: list[WpgId] = []
    at_home = who.job in partition.homes
    for number, site in enumerate(shape):
        others = partition.members[site.wpg.id]
        if at_home:
            others = [each for each in others if each.job != who.job]
        if not others:
            free.append(site.wpg.id)
            continue
        groups[number] = _group(number, site, others, partition, slow)
    return groups, free


def _group(
    number: int,
    site: Site,
    others: Sequence[Applicant],
    partition: Partition,
    slow: Mapping[JobId, float],
) -> Group:
    """Those ``others`` on a site; as it was found the last time, while nobody there has moved."""
    wpg, gpus = site.wpg.id, site.wpg.gpus
    new = slow and any(each.job in slow for each in others)
    plain = not new and len(others) == len(partition.members[wpg])
    known = partition.notes.get(wpg) if plain else None
    if isinstance(known, Group):
        if known.number != number:
            known.number = number
        return known
    group = Group(
        number=number,
        gpus=gpus,
        host_bytes=_ENDLESS,
        members={each.job: member_of(each, partition, gpus, slow) for each in others},
    )
    if plain:
        group.load = load_of(group)
        partition.notes[wpg] = group
    return group


def member_of(
    each: Applicant,
    partition: Partition,
    gpus: int,
    slow: Mapping[JobId, float],
    pool: Pool = Pool.TRAIN,
) -> Member:
    """As grouping sees it: what its promise leaves for a WPG of so many GPUs in ``pool``."""
    return Member(
        job=each.job,
        train_gpus=gpus,
        rollout_gpus=0,
        image_bytes=sum(each.images(pool)),
        profile=each.profile(pool, gpus),
        max_slowdown=allowance(each, partition, pool, slow),
    )


def refuse_too_large(who: Applicant, pool: Pool, sites: Sequence[Site]) -> None:
    """Raise ``ModelTooLarge`` if no site of the pool could ever hold one of its images."""
    there = [site for site in sites if site.wpg.pool is pool]
    for number, image in enumerate(who.images(pool)):
        if there and not any(could_hold(site, image) for site in there):
            largest = max(min(s.device_bytes, s.host_bytes * len(s.at) // 2) for s in there)
            name = who.models[number] if number < len(who.models) else "it"
            raise ModelTooLarge(name, image, largest, pool)
