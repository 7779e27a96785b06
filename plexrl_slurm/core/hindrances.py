"""Why a job finds no home in a pool: every site is asked, answers are told by kind. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from plexrl_slurm.core.grouping import Placement, Rules
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.sites import (
    Applicant,
    Partition,
    Site,
    broken,
    fits_device,
    host_need,
    images_room,
    load,
)
from plexrl_slurm.core.sizes import in_words

#: Nearest to a home first: what others' ends change before what only another hold changes.
_ORDER: Final = (
    ObstacleKind.PROMISE,
    ObstacleKind.TRAIN_GPUS,
    ObstacleKind.ROLLOUT_GPUS,
    ObstacleKind.HOST_MEMORY,
    ObstacleKind.NVME,
    ObstacleKind.DEVICE_MEMORY,
    ObstacleKind.DRAINING,
    ObstacleKind.NO_WPG,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """What is in the way on one site."""

    kind: ObstacleKind
    site: Site
    #: How far from a home, among those of one kind.
    distance: float
    #: Asked only of the nearest.
    sentence: Callable[[], str]
    job: JobId | None = None
    needed_bytes: int = 0
    free_bytes: int = 0


def hindrances(
    who: Applicant,
    pool: Pool,
    partition: Partition,
    rules: Rules,
    slow: Mapping[JobId, float],
) -> tuple[Obstacle, ...]:
    """One obstacle for each kind, with the site that comes nearest."""
    sites = [site for site in partition.sites if site.wpg.pool is pool]
    open_sites = [site for site in sites if not site.draining]
    names = _names(who)
    kept = _of_kept([site for site in sites if site.kept], pool)
    if not open_sites:
        leaving = [site for site in sites if not site.kept]
        if leaving:
            every = "every other" if kept else "every"
            sentence = f"{every} {pool} WPG is being given back ({_listed(leaving)})"
            return (Obstacle(kind=ObstacleKind.DRAINING, pool=pool, sentence=sentence), *kept)
        if kept:
            return kept
        sentence = f"{names} needs a {pool} WPG, and the partition holds none"
        return (Obstacle(kind=ObstacleKind.NO_WPG, pool=pool, sentence=sentence),)
    findings: dict[ObstacleKind, list[_Finding]] = {}
    for site in open_sites:
        found = _finding(who, site, partition, rules, slow)
        findings.setdefault(found.kind, []).append(found)
    told = (_obstacle(kind, findings[kind], partition, pool) for kind in _ORDER if kind in findings)
    return (*told, *kept)


def _of_kept(sites: Sequence[Site], pool: Pool) -> tuple[Obstacle, ...]:
    """Of those that others may have: whoever is there or not, this job is not to come."""
    if not sites:
        return ()
    are = "are" if len(sites) > 1 else "is"
    sentence = f"{_listed(sites)} {are} kept free for jobs of a reserved qos"
    return (
        Obstacle(kind=ObstacleKind.RESERVATION, pool=pool, sentence=sentence, wpg=sites[0].wpg.id),
    )


def _listed(sites: Sequence[Site]) -> str:
    return ", ".join(str(site.wpg.id) for site in sites[:3]) + (", ..." if len(sites) > 3 else "")


def _obstacle(
    kind: ObstacleKind, findings: Sequence[_Finding], partition: Partition, pool: Pool
) -> Obstacle:
    nearest = min(findings, key=lambda each: (each.distance, each.site.wpg.id))
    ends: list[int] = []
    if kind is not ObstacleKind.DEVICE_MEMORY:
        here = {each.site.wpg.id for each in findings}
        members = {m.job: m for wpg in here for m in partition.members[wpg]}
        ends = [each.ends_us for each in members.values() if each.ends_us is not None]
    more = len(findings) - 1
    others = f" (and on {more} more like it)" if more else ""
    return Obstacle(
        kind=kind,
        pool=pool,
        sentence=f"{nearest.sentence()}{others}",
        wpg=nearest.site.wpg.id,
        job=nearest.job,
        needed_bytes=nearest.needed_bytes,
        free_bytes=nearest.free_bytes,
        until_us=min(ends, default=None),
    )


def _finding(
    who: Applicant,
    site: Site,
    partition: Partition,
    rules: Rules,
    slow: Mapping[JobId, float],
) -> _Finding:
    pool, name = site.wpg.pool, site.wpg.id
    if not fits_device(site, who):
        need = max(who.images(pool))
        return _Finding(
            kind=ObstacleKind.DEVICE_MEMORY,
            site=site,
            distance=need - site.device_bytes,
            needed_bytes=need,
            free_bytes=site.device_bytes,
            sentence=lambda: (
                f"{_names(who)} needs {in_words(need)} of device memory on {name}, "
                f"which has {in_words(site.device_bytes)}"
            ),
        )
    need, has = partition.room(site, who)
    if need > has:
        return _Finding(
            kind=ObstacleKind.NVME if site.nvme_bytes else ObstacleKind.HOST_MEMORY,
            site=site,
            distance=need - has,
            needed_bytes=need,
            free_bytes=max(0, has),
            sentence=partial(_of_memory, who, site, partition, need, has),
        )
    return _of_company(who, site, partition, rules, slow)


def _of_memory(who: Applicant, site: Site, partition: Partition, need: int, has: int) -> str:
    """In states where they are all alike, else in bytes."""
    shares = partition.shares(site)
    mine = [-(-image // len(site.at)) for image in who.images(site.wpg.pool)]
    tiers = f"{in_words(site.host_bytes)} of host memory"
    if site.nvme_bytes:
        tiers += f" and {in_words(site.nvme_bytes)} of disk"
    nodes = f"{len(site.at)} node{'s' * (len(site.at) > 1)} x {tiers}"
    kept = ""
    if site.kept_bytes:
        kept = f", beside {in_words(site.kept_bytes)} kept free for jobs of a reserved qos"
    alike = len(mine) == 1 and all(share == mine[0] for share in shares)
    if alike and has >= images_room(site, mine[0]):
        hold = 0
        while host_need([mine[0]] * (hold + 1)) <= has:
            hold += 1
        what = "states" if site.wpg.pool is Pool.TRAIN else "sets of weights"
        return (
            f"{nodes}{kept and f'{kept},'} hold {hold} {what} of {_plain(who)} on {site.wpg.id}; "
            f"{len(shares)} {'is' if len(shares) == 1 else 'are'} placed"
        )
    beside = f" beside {len(shares)} others" if shares else ""
    return (
        f"{_names(who)} needs {in_words(need)} of host memory on each node of {site.wpg.id}"
        f"{beside}, which has {in_words(max(0, has))} ({nodes}{kept})"
    )


def _of_company(
    who: Applicant,
    site: Site,
    partition: Partition,
    rules: Rules,
    slow: Mapping[JobId, float],
) -> _Finding:
    """It has room; those who live there are in the way."""
    pool, name = site.wpg.pool, site.wpg.id
    others = [each for each in partition.members[name] if each.job != who.job]
    taken = ObstacleKind.TRAIN_GPUS if pool is Pool.TRAIN else ObstacleKind.ROLLOUT_GPUS
    if rules.placement is Placement.ISOLATED:
        with_whom = others[0].label if others else "nobody"
        return _Finding(
            kind=taken,
            site=site,
            distance=len(others),
            sentence=lambda: (
                f"no {pool} WPG is free, and jobs share none here: {name} has {with_whom}"
            ),
        )
    if pool is Pool.TRAIN and len(others) >= rules.most:
        return _Finding(
            kind=taken,
            site=site,
            distance=len(others),
            sentence=lambda: f"{name} has {len(others)} jobs, and {rules.most} is the most",
        )
    lost = broken(who, site, partition, rules, slow)
    if lost:
        worst, there, left = max(lost, key=lambda each: (each[1] - each[2], each[0].job))
        return _Finding(
            kind=ObstacleKind.PROMISE,
            site=site,
            distance=there - left,
            sentence=partial(_of_promise, who, site, rules, worst, there, left),
            job=worst.job,
        )
    total = load(partition, site, who.job) + who.profile(pool, site.wpg.gpus).load
    return _Finding(
        kind=ObstacleKind.PROMISE,
        site=site,
        distance=total - rules.full,
        sentence=lambda: (
            f"{name} would be asked for {total:.0%} of its time, and {rules.full:.0%} is the most"
        ),
    )


def _of_promise(
    who: Applicant, site: Site, rules: Rules, worst: Applicant, there: float, left: float
) -> str:
    total = there + worst.most - left
    whose = "it" if worst is who else worst.label
    sentence = (
        f"on {site.wpg.id} {whose} would run {total:.2f} times as long as alone, "
        f"and {worst.max_slowdown:.2f} was promised"
    )
    if worst.most < worst.max_slowdown:
        sentence += f", of which {worst.most:.2f} is left after what it has lost so far"
    elif total <= worst.max_slowdown:
        sentence += f", of which a prediction may use {rules.margin:.0%}"
    return sentence


def _plain(who: Applicant) -> str:
    return " and ".join(dict.fromkeys(who.models)) or "its model"


def _names(who: Applicant) -> str:
    return f"model {_plain(who)}"
