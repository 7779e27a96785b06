"""Who leaves a WPG: because promises are predicted to break there, or so that it is free. Pure.

What is decided is decided by :mod:`plexrl_slurm.core.regroup`; this tells it of held WPGs.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from plexrl_slurm.core.admission import Placement, member_of, place
from plexrl_slurm.core.grouping import Group, Pools, Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.regroup import emptied, leavers, thinnest
from plexrl_slurm.core.regroup import relieve as regroup_relieve
from plexrl_slurm.core.sites import Applicant, Partition, Site, images_room, usable

#: More GPUs than there are, where they are not counted.
_MANY: Final = 1 << 40
#: Groups of each shape that one look tries to empty: those that use least.
THIN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A training WPG that can be empty, and where those who live there go."""

    wpg: WpgId
    homes: tuple[tuple[JobId, WpgId], ...]


def relieve(
    partition: Partition, wpg: WpgId, rules: Rules, may_move: Callable[[JobId], bool]
) -> tuple[JobId, WpgId] | None:
    """The job that leaves ``wpg``, and its next home; ``None``: nobody has to, or nobody can.

    Its home in the other pool stays as it is; the next home of what it trains has as many GPUs,
    and every next home has memory for it.
    """
    here = next((site for site in partition.sites if site.wpg.id == wpg), None)
    if here is None or here.draining:
        return None
    if here.wpg.pool is Pool.ROLLOUT:
        return _relieve_rollout(partition, here, rules, may_move)
    movable = [who for who in partition.members[wpg] if may_move(who.job)]
    shape = [site for site in _of_shape(partition, here.wpg.gpus) if site is not here]
    free = [
        site.wpg.id
        for site in shape
        if not partition.members[site.wpg.id] and _takes_any(site, movable, partition)
    ]
    sites = [here, *(site for site in shape if partition.members[site.wpg.id])]
    pools = _pools(sites, movable, partition, here.wpg.gpus * len(free))
    found = regroup_relieve(pools.groups[0], pools, rules, lambda job: _among(job, movable))
    if found is None:
        return None
    ((job, number),) = found.homes
    home = min(free) if number is None else sites[number].wpg.id
    who = next(each for each in movable if each.job == job)
    fits = any(site.wpg.id == home for site in usable(who, Pool.TRAIN, partition))
    return (job, home) if fits else None


def _relieve_rollout(
    partition: Partition, here: Site, rules: Rules, may_move: Callable[[JobId], bool]
) -> tuple[JobId, WpgId] | None:
    """As a new job would, whoever leaves goes where least is sampled."""
    pool, gpus, wpg = Pool.ROLLOUT, here.wpg.gpus, here.wpg.id
    members = {who.job: member_of(who, partition, gpus, {}, pool) for who in partition.members[wpg]}
    group = Group(number=0, gpus=gpus, host_bytes=_MANY * _MANY, members=members)
    for leaver in leavers(group, rules, may_move):
        who = next(each for each in partition.members[wpg] if each.job == leaver.job)
        with partition.without(who.job, (pool,)):
            found = place(who, partition, rules, pools=(pool,))
        if isinstance(found, Placement) and found.homes[pool] != wpg:
            return who.job, found.homes[pool]
    return None


def merge(
    partition: Partition,
    rules: Rules,
    may_move: Callable[[JobId], bool],
    *,
    only: Collection[WpgId] = (),
) -> Merge | None:
    """A training WPG whose jobs all find room, and promises, on others of its size that have
    jobs already; larger ones first, then those that use least. ``only``: one of these."""
    for gpus in sorted({site.wpg.gpus for site in partition.pool(Pool.TRAIN)}, reverse=True):
        sites = [site for site in _of_shape(partition, gpus) if partition.members[site.wpg.id]]
        if len(sites) < 2:
            continue
        movable = [
            who for site in sites for who in partition.members[site.wpg.id] if may_move(who.job)
        ]
        pools = _pools(sites, movable, partition, 0)
        thin = [g for g in thinnest(pools) if not only or sites[g.number].wpg.id in only]
        for group in thin[:THIN]:
            found = emptied(group, pools, rules, may_move)
            if found is None:
                continue
            homes = tuple(
                (job, sites[number].wpg.id) for job, number in found.homes if number is not None
            )
            if _have_memory(homes, partition):
                return Merge(wpg=sites[group.number].wpg.id, homes=homes)
    return None


def _have_memory(homes: Sequence[tuple[JobId, WpgId]], partition: Partition) -> bool:
    """Whether there is memory for each when those before it have come."""
    before = [settled for job, _ in homes if (settled := partition.of(job)) is not None]
    try:
        for (_, home), each in zip(homes, before, strict=True):
            if not any(site.wpg.id == home for site in usable(each.who, Pool.TRAIN, partition)):
                return False
            partition.settle(replace(each, homes={**each.homes, Pool.TRAIN: home}))
    finally:
        for each in before:
            partition.settle(each)
    return True


def _of_shape(partition: Partition, gpus: int) -> list[Site]:
    """Training sites of so many GPUs that take jobs."""
    sites = partition.pool(Pool.TRAIN)
    return [site for site in sites if site.wpg.gpus == gpus and not site.draining]


def _pools(
    sites: Sequence[Site], movable: Sequence[Applicant], partition: Partition, free: int
) -> Pools:
    """Sites with members as groups, numbered as they stand."""
    groups = {
        number: Group(
            number=number,
            gpus=site.wpg.gpus,
            host_bytes=_room_left(site, movable, partition),
            members={
                who.job: member_of(who, partition, site.wpg.gpus, {})
                for who in partition.members[site.wpg.id]
            },
        )
        for number, site in enumerate(sites)
    }
    return Pools(
        train_free=free, rollout_free=0, node_gpus=1, node_bytes=_MANY * _MANY, groups=groups
    )


def _among(job: JobId, movable: Sequence[Applicant]) -> bool:
    return any(who.job == job for who in movable)


def _takes_any(site: Site, movable: Sequence[Applicant], partition: Partition) -> bool:
    """Whether whoever of them leaves would find memory there."""
    return bool(movable) and all(site in usable(who, Pool.TRAIN, partition) for who in movable)


def _room_left(site: Site, movable: Sequence[Applicant], partition: Partition) -> int:
    """Bytes of images that may be there, as regroup counts: without the spare slab."""
    shares = partition.shares(site)
    coming = [-(-image // len(site.at)) for who in movable for image in who.train_images]
    largest = max([*shares, *coming], default=0)
    room = images_room(site, largest) - partition.others(site) - largest
    return max(0, room) * len(site.at)
