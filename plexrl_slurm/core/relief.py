"""Who leaves a training WPG whose promises are predicted to break, and where it goes. Pure.

What is decided is decided by :mod:`plexrl_slurm.core.regroup`; this tells it of held WPGs.
"""

from collections.abc import Callable, Sequence
from typing import Final

from plexrl_slurm.core.admission import member_of
from plexrl_slurm.core.grouping import Group, Pools, Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.regroup import relieve as regroup_relieve
from plexrl_slurm.core.sites import Applicant, Partition, Site, images_room, usable

#: More GPUs than there are, where they are not counted.
_MANY: Final = 1 << 40


def relieve(
    partition: Partition, wpg: WpgId, rules: Rules, may_move: Callable[[JobId], bool]
) -> tuple[JobId, WpgId] | None:
    """The job that leaves ``wpg``, and its next home; ``None``: nobody has to, or nobody can.

    Its rollout WPG stays as it is; the next home has as many GPUs, and memory for it.
    """
    here = next((site for site in partition.sites if site.wpg.id == wpg), None)
    if here is None or here.wpg.pool is not Pool.TRAIN or here.draining:
        return None
    movable = [who for who in partition.members[wpg] if may_move(who.job)]
    shape = [
        site
        for site in partition.sites
        if site.wpg.pool is Pool.TRAIN
        and site.wpg.gpus == here.wpg.gpus
        and not site.draining
        and site is not here
    ]
    free = [
        site.wpg.id
        for site in shape
        if not partition.members[site.wpg.id] and _takes_any(site, movable, partition)
    ]
    sites = [here, *(site for site in shape if partition.members[site.wpg.id])]
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
    pools = Pools(
        train_free=here.wpg.gpus * len(free),
        rollout_free=0,
        node_gpus=1,
        node_bytes=_MANY * _MANY,
        groups=groups,
    )
    found = regroup_relieve(groups[0], pools, rules, lambda job: _among(job, movable))
    if found is None:
        return None
    ((job, number),) = found.homes
    home = min(free) if number is None else sites[number].wpg.id
    who = next(each for each in movable if each.job == job)
    fits = any(site.wpg.id == home for site in usable(who, Pool.TRAIN, partition))
    return (job, home) if fits else None


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
