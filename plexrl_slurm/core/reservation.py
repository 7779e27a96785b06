"""What is kept free for jobs of a reserved QOS, such as interactive ones. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Kept free in a partition."""

    #: WPGs of each pool, the last ones.
    wpgs: int = 0
    #: Host memory of each other WPG.
    host_bytes: int = 0

    @property
    def any(self) -> bool:
        """Whether anything is."""
        return bool(self.wpgs or self.host_bytes)


def open_to_all(
    sites: Sequence[Site], reservation: Reservation, taken: Mapping[WpgId, int]
) -> list[Site]:
    """The places as jobs without a reservation see them.

    ``taken`` are bytes of images that reserved jobs have on each WPG: so much less is kept free.
    """
    if not reservation.any:
        return list(sites)
    found: list[Site] = []
    for pool in dict.fromkeys(site.wpg.pool for site in sites):
        there = sorted((s for s in sites if s.wpg.pool is pool), key=lambda s: _natural(s.wpg.id))
        kept = len(there) - reservation.wpgs
        found += there[: max(0, kept)]
    open_now = {site.wpg.id for site in found}
    return [
        replace(
            site,
            host_bytes=max(
                0,
                site.host_bytes - max(0, reservation.host_bytes - taken.get(site.wpg.id, 0)),
            ),
        )
        for site in sites
        if site.wpg.id in open_now
    ]


def _natural(wpg: WpgId) -> tuple[str, int, str]:
    """``train-10`` comes after ``train-9``."""
    name, _, number = wpg.rpartition("-")
    return (name, int(number), "") if number.isdecimal() else (wpg, 0, wpg)
