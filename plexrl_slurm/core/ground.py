"""A partition as placement sees it, kept from one decision to the next. Pure.

Whoever asks tells what has changed first; so an answer costs what has to be decided, not what there
is, and a journal needs the changes alone to ask again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from plexrl_slurm.core.admission import Placement, place
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle
from plexrl_slurm.core.reservation import Reservation, in_the_way, open_to_all
from plexrl_slurm.core.sites import Applicant, Partition, Settled, Site, in_natural_order

Answer = Placement | tuple[Obstacle, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What has changed."""

    #: New, or other than they were.
    sites: tuple[Site, ...] = ()
    gone: tuple[WpgId, ...] = ()
    settled: tuple[Settled, ...] = ()
    left: tuple[JobId, ...] = ()
    #: Of jobs that are expected to end then, and are otherwise as they were.
    ends: tuple[tuple[JobId, int | None], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sites or self.gone or self.settled or self.left or self.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Homes that a job looks for; those that it has in these pools do not count."""

    who: Applicant
    rules: Rules
    pools: tuple[Pool, ...]
    #: It may have what the reservation keeps free.
    reserved: bool = False


class Ground:
    """Sites and who lives there, as far as was told."""

    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._sites: dict[WpgId, Site] = {}
        self._whole = Partition(sites=(), settled=())
        self._open: Partition | None = None

    def hear(self, news: News) -> None:
        """Something has changed."""
        if news.sites or news.gone:
            self._sites.update((site.wpg.id, site) for site in news.sites)
            for wpg in news.gone:
                self._sites.pop(wpg, None)
            self._whole = Partition(
                sites=in_natural_order(self._sites.values()), settled=self._whole.settled
            )
            self._open = None
        seen = [self._whole]
        if self._open is not None:
            if self._moves_what_is_kept(news):
                self._open = None
            else:
                seen.append(self._open)
        for partition in seen:
            for job in news.left:
                partition.leave(job)
            for each in news.settled:
                partition.settle(each)
            for job, ends_us in news.ends:
                partition.expect(job, ends_us)

    def _moves_what_is_kept(self, news: News) -> bool:
        """Whether reserved jobs take, or leave, what is kept for them."""
        if not self._reservation.host_bytes:
            return False
        jobs = (*news.left, *(each.who.job for each in news.settled))
        before = [self._whole.of(job) for job in jobs]
        return any(each is not None and each.reserved for each in (*before, *news.settled))

    @property
    def whole(self) -> Partition:
        """All of it; not to be changed."""
        return self._whole

    @property
    def open(self) -> Partition:
        """As whoever sees it that may not have what is kept free; not to be changed."""
        if not self._reservation.any:
            return self._whole
        if self._open is None:
            settled = self._whole.settled
            reserved = {each.who.job for each in settled if each.reserved}
            self._open = open_to_all(self._whole, self._reservation, reserved)
        return self._open

    def without(self, jobs: Collection[JobId]) -> "Ground":
        """Another, on which these do not live."""
        found = Ground(self._reservation)
        settled: Iterable[Settled] = self._whole.settled
        found.hear(
            News(
                sites=tuple(self._sites.values()),
                settled=tuple(each for each in settled if each.who.job not in jobs),
            )
        )
        return found

    def answer(self, wish: Wish) -> Answer:
        """Where it goes, or what is in its way. Raises as ``place`` does."""
        seen = self._whole if wish.reserved else self.open
        found = _asked(wish, seen)
        if isinstance(found, Placement) or seen is self._whole:
            return found
        without = _asked(wish, self._whole)
        if not isinstance(without, Placement):
            return found
        with seen.without(wish.who.job, wish.pools):
            return in_the_way(wish.who, found, without.homes, seen)


def _asked(wish: Wish, partition: Partition) -> Answer:
    with partition.without(wish.who.job, wish.pools):
        return place(wish.who, partition, wish.rules, pools=wish.pools)
