"""What is kept free for jobs of a reserved QOS, such as interactive ones. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.sites import Applicant, Partition, Site, natural
from plexrl_slurm.core.sizes import in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Kept free in a partition."""

    #: WPGs of each pool, the last ones.
    wpgs: int = 0
    #: Of the host tier of each node with training WPGs, for images.
    host_bytes: int = 0

    @property
    def any(self) -> bool:
        """Whether anything is."""
        return bool(self.wpgs or self.host_bytes)


def open_to_all(
    partition: Partition, reservation: Reservation, reserved: Collection[JobId]
) -> Partition:
    """The partition as a job sees it that may not have what is kept free.

    ``reserved`` are the jobs that may, and live there: what they have is kept free no more. Never
    all WPGs of a pool are kept, also where it has fewer than it is configured to have.
    """
    kept: set[WpgId] = set()
    for pool in Pool:
        every = [site for site in partition.sites if site.wpg.pool is pool]
        there = sorted((site.wpg.id for site in every if not site.draining), key=natural)
        most = min(reservation.wpgs, max(0, len(every) - 1))
        kept |= set(there[max(0, len(there) - most) :])
    taken = _taken(partition, reserved)

    def seen(site: Site) -> Site:
        if site.wpg.id in kept:
            return replace(site, draining=True, kept=True)  # its memory counts, and nobody comes
        if site.wpg.pool is not Pool.TRAIN or not reservation.host_bytes:
            return site
        left = max(0, *(reservation.host_bytes - taken[node] for node in site.at))
        left = min(left, site.host_bytes)
        return replace(site, host_bytes=site.host_bytes - left, kept_bytes=left)

    sites: Sequence[Site] = [seen(site) for site in partition.sites]
    return Partition(sites=sites, settled=partition.settled)


def in_the_way(
    who: Applicant, found: Sequence[Obstacle], homes: Mapping[Pool, WpgId], seen: Partition
) -> tuple[Obstacle, ...]:
    """All obstacles of a job for which there would be room at ``homes``, were nothing kept free.

    What is kept free comes first, and ``found`` on ``seen``, which is open to all, after it.
    """
    kept: list[Obstacle] = []
    for pool, wpg in homes.items():
        site = next(each for each in seen.sites if each.wpg.id == wpg)
        need, has = seen.room(site, who)
        if site.kept:
            what = f"{wpg} has room for it, and is kept free for jobs of a reserved qos"
        elif need > has:
            what = (
                f"{in_words(site.kept_bytes)} of host memory on each node of {wpg} is kept free "
                f"for jobs of a reserved qos"
            )
        else:
            continue
        kept.append(
            Obstacle(
                kind=ObstacleKind.RESERVATION,
                sentence=f"{what}: wait for others to end, or ask for such a qos",
                pool=pool,
                wpg=wpg,
                needed_bytes=need,
                free_bytes=max(0, has),
            )
        )
    pools = {each.pool for each in found}
    first = [each for each in kept if each.pool in pools] or kept
    said = {each.pool for each in first}
    rest = [e for e in found if e.kind is not ObstacleKind.RESERVATION or e.pool not in said]
    return (*first, *rest)


def _taken(partition: Partition, reserved: Collection[JobId]) -> Counter[str]:
    """Bytes of images that reserved jobs have on each node."""
    found: Counter[str] = Counter()
    for site in partition.sites:
        if site.wpg.pool is Pool.TRAIN:
            for who in partition.members[site.wpg.id]:
                if who.job in reserved:
                    for node in site.at:
                        found[node] += sum(-(-image // len(site.at)) for image in who.train_images)
    return found
