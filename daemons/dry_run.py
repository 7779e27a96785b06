"""The partition in a dry run, for expected starts: a copy that other threads may work on."""

from collections.abc import Mapping, Sequence

from plexrl_slurm.core.admission import Placement, place
from plexrl_slurm.core.errors import ModelTooLarge
from plexrl_slurm.core.expected_start import Entry
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import Subject, Tally
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.reservation import Reservation, open_to_all
from plexrl_slurm.core.sites import Applicant, Partition, Settled


class DryRun:
    """See :class:`plexrl_slurm.core.expected_start.Room`."""

    def __init__(
        self,
        partition: Partition,
        rules: Rules,
        *,
        applicants: Mapping[JobId, Applicant],
        subjects: Mapping[JobId, Subject],
        tally: Tally,
        reservation: Reservation,
        reserved: frozenset[JobId],
    ) -> None:
        """``applicants`` and ``subjects``: those that wait, and of the latter all that live;
        one that waits and is no applicant has no model, or an unknown one. ``reserved``: those
        that may have what is kept free."""
        self._sites, self._rules, self._tally = partition.sites, rules, tally
        self._settled = {each.who.job: each for each in partition.settled}
        self._applicants, self._subjects = applicants, subjects
        self._reservation, self._reserved = reservation, reserved
        self._now: Partition | None = None
        self._open: Partition | None = None

    def holds(self, job: JobId) -> bool:
        return self._tally.holds(self._subjects[job]) is not None

    def enter(self, job: JobId, *, alone: bool) -> Entry:
        who, seen = self._applicants[job], self._seen_by(job)
        if who.models:
            try:
                found = place(who, seen, self._rules)
                if not isinstance(found, Placement):
                    without = found if seen is self._now else place(who, self._all(), self._rules)
                    return Entry.KEPT if isinstance(without, Placement) else _outcome(found)
            except ModelTooLarge:
                return Entry.NONE
            if not alone and not seen.members[found.homes[Pool.TRAIN]]:
                return Entry.LATER
            self._change()
            self._settled[job] = Settled(who=who, homes=found.homes)
        self._tally.enter(self._subjects[job])
        return Entry.PLACED

    def leave(self, job: JobId) -> None:
        if self._settled.pop(job, None) is not None:
            self._change()
        self._tally.leave(self._subjects[job])

    def _change(self) -> None:
        self._now = self._open = None

    def _all(self) -> Partition:
        if self._now is None:
            self._now = Partition(sites=self._sites, settled=tuple(self._settled.values()))
        return self._now

    def _seen_by(self, job: JobId) -> Partition:
        if job in self._reserved or not self._reservation.any:
            return self._all()
        if self._open is None:
            self._open = open_to_all(self._all(), self._reservation, self._reserved)
        return self._open


def _outcome(found: Sequence[Obstacle]) -> Entry:
    """Nobody waits behind a job that only what is kept free keeps from a pool."""
    return Entry.KEPT if found[0].kind is ObstacleKind.RESERVATION else Entry.NONE
