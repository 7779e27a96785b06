"""What is kept free for jobs of a reserved QOS, such as interactive ones. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.sites import Partition, Site, natural


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
            return replace(site, draining=True)  # its memory counts, and nobody comes
        if site.wpg.pool is not Pool.TRAIN or not reservation.host_bytes:
            return site
        left = max(reservation.host_bytes - taken[node] for node in site.at)
        return replace(site, host_bytes=max(0, site.host_bytes - max(0, left)))

    sites: Sequence[Site] = [seen(site) for site in partition.sites]
    return Partition(sites=sites, settled=partition.settled)


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
