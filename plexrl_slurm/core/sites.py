"""A partition as placement sees it: WPGs to live on, jobs that live there or want to. Pure."""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.predict import Profile, foreseen
from plexrl_slurm.core.profiles import Habits


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A WPG as a place to live."""

    wpg: Wpg
    #: Bytes that a resident may take on its devices, all GPUs together.
    device_bytes: int
    #: Bytes that images may take in the host tier of each of its nodes.
    host_bytes: int
    #: Bytes that more of them may take below it; those that a switch moves are above.
    nvme_bytes: int = 0
    #: Whose host tiers these are; sites with a node in common share its tier. Empty: its own.
    nodes: tuple[str, ...] = ()
    #: It is to be given back: nobody comes.
    draining: bool = False
    #: To whoever sees it so: it is kept free for others, and so is this much more host memory.
    kept: bool = False
    kept_bytes: int = 0

    @property
    def at(self) -> tuple[str, ...]:
        """Names of its tiers."""
        return self.nodes or (str(self.wpg.id),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """A job that looks for its homes, or has them."""

    job: JobId
    #: As people know it.
    label: str
    #: Its models, for sentences.
    models: tuple[str, ...]
    #: Bytes of its training images, and of its sampling weights.
    train_images: tuple[int, ...]
    rollout_images: tuple[int, ...]
    #: By GPUs of a training WPG; what is not there is taken from the nearest.
    habits: Mapping[int, Habits]
    #: How much slower than alone it may become.
    max_slowdown: float
    #: When it is expected to end; ``None``: nobody knows.
    ends_us: int | None = None
    #: What it may become from now on so that the promise is kept at its end; 0: as promised.
    allowed: float = 0.0

    @property
    def most(self) -> float:
        """How much slower than alone it may be from now on."""
        return self.allowed or self.max_slowdown

    def images(self, pool: Pool) -> tuple[int, ...]:
        """Of one pool."""
        return self.train_images if pool is Pool.TRAIN else self.rollout_images

    def profile(self, pool: Pool, gpus: int) -> Profile:
        """On a WPG of so many GPUs."""
        if (found := self.habits.get(gpus)) is not None:
            return found.of(pool)
        nearest = min(self.habits, key=lambda size: (abs(size - gpus), size))
        return self.habits[nearest].of(pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A job that has homes, in one pool or in both."""

    who: Applicant
    homes: Mapping[Pool, WpgId]
    #: It may have what the reservation keeps free.
    reserved: bool = False


class Partition:
    """Sites, and who lives there. What is worked out of it is kept until somebody moves; it is
    the same however the partition came to be as it is."""

    def __init__(self, *, sites: Sequence[Site], settled: Iterable[Settled]) -> None:
        self.sites = sites
        #: By job, in their order.
        self.members: dict[WpgId, list[Applicant]] = {site.wpg.id: [] for site in sites}
        self.homes: dict[JobId, Mapping[Pool, WpgId]] = {}
        self._settled: dict[JobId, Settled] = {}
        self._by_id = {site.wpg.id: site for site in sites}
        self._by_pool = {
            pool: tuple(site for site in sites if site.wpg.pool is pool) for pool in Pool
        }
        #: Bytes that images take on one node of a site: all of them, and the largest one.
        self._stock: dict[WpgId, tuple[int, int]] = {}
        #: Bytes of a node's tier that training sites there need together.
        self._taken: dict[str, int] = {}
        self._load: dict[WpgId, float] = {}
        self._slow: dict[WpgId, dict[JobId, float]] = {}
        #: What others have worked out of a site, as it is now.
        self.notes: dict[WpgId, object] = {}
        for each in sorted(settled, key=lambda each: each.who.job):
            self._settled[each.who.job] = each
            self.homes[each.who.job] = each.homes
            for wpg in each.homes.values():
                if wpg in self.members:
                    self.members[wpg].append(each.who)
        for site in sites:
            self._count(site, 1)

    # -- who lives there -------------------------------------------------------------------
    @property
    def settled(self) -> Sequence[Settled]:
        """Everybody who has a home."""
        return tuple(self._settled.values())

    def of(self, job: JobId) -> Settled | None:
        """A job, and its homes."""
        return self._settled.get(job)

    def settle(self, each: Settled) -> None:
        """A job has these homes now, and is like this."""
        self.leave(each.who.job)
        self._settled[each.who.job] = each
        self.homes[each.who.job] = each.homes
        for wpg in each.homes.values():
            if wpg in self.members:
                with self._changing(wpg):
                    insort(self.members[wpg], each.who, key=_job_of)

    def expect(self, job: JobId, ends_us: int | None) -> None:
        """A job that has homes is expected to end then; nothing that is kept depends on it."""
        before = self._settled[job]
        who = replace(before.who, ends_us=ends_us)
        self._settled[job] = replace(before, who=who)
        for wpg in before.homes.values():
            if wpg in self.members:
                self.members[wpg] = [who if e.job == job else e for e in self.members[wpg]]

    def leave(self, job: JobId) -> None:
        """It has none any more."""
        gone = self._settled.pop(job, None)
        if gone is None:
            return
        for wpg in gone.homes.values():
            if wpg in self.members:
                with self._changing(wpg):
                    self.members[wpg] = [each for each in self.members[wpg] if each.job != job]
        del self.homes[job]

    @contextmanager
    def without(self, job: JobId, pools: Collection[Pool]) -> Iterator[None]:
        """For as long as this lasts the job has no home in ``pools``."""
        before = self._settled.get(job)
        if before is None or not any(pool in before.homes for pool in pools):
            yield
            return
        self.settle(
            replace(before, homes={p: wpg for p, wpg in before.homes.items() if p not in pools})
        )
        try:
            yield
        finally:
            self.settle(before)

    @contextmanager
    def _changing(self, wpg: WpgId) -> Iterator[None]:
        site = self._by_id[wpg]
        self._count(site, -1)
        yield
        self._count(site, 1)
        for known in (self._load, self._slow, self.notes):
            known.pop(wpg, None)
        # What a promise leaves for a job's other home depends on this one.
        for each in self.members[wpg]:
            for other in self.homes.get(each.job, {}).values():
                self.notes.pop(other, None)

    def _count(self, site: Site, sign: int) -> None:
        if sign > 0:
            shares = self.shares(site)
            self._stock[site.wpg.id] = (sum(shares), max(shares, default=0))
        if site.wpg.pool is Pool.TRAIN:
            need = sign * sum(self._stock[site.wpg.id])
            for node in site.at:
                self._taken[node] = self._taken.get(node, 0) + need

    # -- what there is ---------------------------------------------------------------------
    def pool(self, pool: Pool) -> tuple[Site, ...]:
        """Its sites."""
        return self._by_pool[pool]

    def shares(self, site: Site) -> list[int]:
        """What each image there takes on one of its nodes."""
        nodes, pool = len(site.at), site.wpg.pool
        images = (image for who in self.members[site.wpg.id] for image in who.images(pool))
        return [-(-image // nodes) for image in images]

    def room(self, site: Site, who: Applicant) -> tuple[int, int]:
        """Bytes that the images there need on one node together with those of ``who``, and what
        the fullest node has for them."""
        nodes, (total, largest) = len(site.at), self._stock[site.wpg.id]
        for image in who.images(site.wpg.pool):
            share = -(-image // nodes)
            total, largest = total + share, max(largest, share)
        return total + largest, images_room(site, largest) - self.others(site)

    def others(self, site: Site) -> int:
        """Bytes that other training sites need on the fullest of its nodes."""
        if site.wpg.pool is not Pool.TRAIN:
            return 0
        if len(site.at) == 1:
            return self._taken[site.at[0]] - sum(self._stock[site.wpg.id])
        return max(self._taken[node] for node in site.at) - sum(self._stock[site.wpg.id])

    def load(self, wpg: WpgId) -> float:
        """Share of a site's time that those who live there need."""
        if wpg not in self._load:
            pool, gpus = self._by_id[wpg].wpg.pool, self._by_id[wpg].wpg.gpus
            self._load[wpg] = sum(each.profile(pool, gpus).load for each in self.members[wpg])
        return self._load[wpg]

    def slowdown(self, wpg: WpgId | None, job: JobId) -> float:
        """Of a settled job on one of its homes."""
        if wpg is None or wpg not in self.members:
            return 1.0
        if wpg not in self._slow:
            self._slow[wpg] = self.with_one_more(wpg, None)
        return self._slow[wpg].get(job, 1.0)

    def with_one_more(self, wpg: WpgId, who: Applicant | None) -> dict[JobId, float]:
        """Slowdown of everybody on ``wpg`` if ``who`` came."""
        site = self._by_id[wpg]
        members = [each for each in self.members[wpg] if who is None or each.job != who.job]
        members += [] if who is None else [who]
        found = foreseen(tuple(m.profile(site.wpg.pool, site.wpg.gpus) for m in members))
        return {member.job: slow for member, slow in zip(members, found, strict=True)}


def in_natural_order(sites: Iterable[Site]) -> list[Site]:
    """``train-10`` comes after ``train-9``."""
    return sorted(sites, key=lambda site: natural(site.wpg.id))


def natural(wpg: WpgId) -> tuple[str, int, str]:
    """To put names in their order."""
    name, _, number = wpg.rpartition("-")
    return (name, int(number), "") if number.isdecimal() else (wpg, 0, wpg)


def _job_of(who: Applicant) -> JobId:
    return who.job


def usable(who: Applicant, pool: Pool, partition: Partition) -> Iterator[Site]:
    """Sites of ``pool`` that have memory for it."""
    for site in partition.pool(pool):
        if not site.draining and fits_device(site, who):
            need, has = partition.room(site, who)
            if need <= has:
                yield site


def fits_device(site: Site, who: Applicant) -> bool:
    """Whether each of its images, one at a time, can be on the devices."""
    return max(who.images(site.wpg.pool), default=0) <= site.device_bytes


def load(partition: Partition, site: Site, but: JobId | None = None) -> float:
    """Share of the site's time that those who live there need."""
    found = partition.load(site.wpg.id)
    if but is None or but not in partition.homes:
        return found
    pool, gpus = site.wpg.pool, site.wpg.gpus
    members = partition.members[site.wpg.id]
    return found - sum(each.profile(pool, gpus).load for each in members if each.job == but)


def allowance(
    who: Applicant, partition: Partition, pool: Pool, slow: Mapping[JobId, float]
) -> float:
    """The slowdown that its promise leaves for ``pool``; ``slow``: what it is in the other one,
    where that is about to change."""
    other = Pool.ROLLOUT if pool is Pool.TRAIN else Pool.TRAIN
    there = slow.get(who.job)
    if there is None:
        there = partition.slowdown(partition.homes.get(who.job, {}).get(other), who.job)
    return who.most - (there - 1)


def broken(
    who: Applicant,
    site: Site,
    partition: Partition,
    rules: Rules,
    slow: Mapping[JobId, float],
) -> list[tuple[Applicant, float, float]]:
    """Whose promise ``who`` would break on ``site``: ``(job, slowdown there, what is left)``."""
    after = partition.with_one_more(site.wpg.id, who)
    members = [each for each in partition.members[site.wpg.id] if each.job != who.job]
    found = []
    for each in (*members, who):
        left = allowance(each, partition, site.wpg.pool, slow)
        if after[each.job] - 1 > (left - 1) * rules.margin:
            found.append((each, after[each.job], left))
    return found


def host_need(image_bytes: Sequence[int]) -> int:
    """Host bytes of some images: all of them, and a spare slab for the one that is leaving."""
    return sum(image_bytes) + max(image_bytes, default=0)


def images_room(site: Site, largest: int) -> int:
    """Bytes for images on both tiers: an image lies on one of them as a whole."""
    if not site.nvme_bytes or not largest:
        return site.host_bytes
    return sum(size // largest * largest for size in (site.host_bytes, site.nvme_bytes))


def could_hold(site: Site, image_bytes: int) -> bool:
    """Whether the site would have room for this image if it were empty."""
    share, host_bytes = -(-image_bytes // len(site.at)), site.host_bytes + site.kept_bytes
    return image_bytes <= site.device_bytes and host_need([share]) <= host_bytes


def needed_by(site: Site, image_bytes: Sequence[int]) -> int:
    """Bytes of some images, and of a spare slab, on all nodes of a site together."""
    return host_need([-(-image // len(site.at)) for image in image_bytes]) * len(site.at)


def most_for(site: Site, image_bytes: Sequence[int]) -> int:
    """Of one image, the bytes that it may have on the site if it is empty; of several, what
    :func:`needed_by` may be."""
    nodes, largest = len(site.at), max(image_bytes)
    if len(image_bytes) == 1:
        return min(site.device_bytes, site.host_bytes * nodes // 2)
    return images_room(site, -(-largest // nodes)) * nodes
