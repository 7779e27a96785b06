"""Writes passes along the queue to the journal, where they are news."""

from collections.abc import Sequence
from typing import Protocol

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.queue_pass import Queued, QueueNews, QueuePass, Refused, Said
from plexrl_slurm.daemons.standings import Standings


class QueueJournal(Protocol):
    """See :class:`plexrl_slurm.journal.JournalledCore`."""

    def passed(
        self, news: QueueNews, at_us: int, told: Sequence[Said], said: Sequence[Said]
    ) -> None:
        """A pass along the queue."""

    def refused(self, refused: Refused) -> None:
        """A job was over a limit when it came."""


class QueueBook:
    """One a daemon."""

    def __init__(self, standings: Standings) -> None:
        self._standings = standings
        self._written: dict[JobId, Queued] = {}
        self._last: tuple[list[Said], list[Said]] | None = None

    def write(self, jobs: Sequence[Queued], at_us: int, passing: QueuePass) -> None:
        """A pass has ended; ``jobs`` are those that it was made of."""
        standings = self._standings
        journal: QueueJournal | None = standings.journal
        refused, standings.refused = standings.refused, []
        if journal is None:
            return
        for each in refused:
            journal.refused(each)
        if self._last == (passing.told, passing.said):
            return
        self._last = (passing.told, passing.said)
        now = {each.job: each for each in jobs}
        news = QueueNews(
            jobs=tuple(each for each in jobs if self._written.get(each.job) != each),
            gone=tuple(job for job in self._written if job not in now),
            dues=standings.dues.news(),
        )
        self._written = now
        journal.passed(news, at_us, passing.told, passing.said)
