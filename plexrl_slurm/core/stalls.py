"""How long rollouts pause between their calls: mostly for their tools, or for the client.

A rollout that pauses holds nothing: its WPG is everybody's until its next call comes, except for
the short anticipatory hold of :mod:`plexrl_slurm.core.phase`. Pauses are of two sizes, some
milliseconds and the seconds of a tool, so a mean says nothing about the next one: a median does.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from plexrl_slurm.core.ids import JobId

#: Pauses of a job that are remembered.
KEPT: Final = 32


class Stalls:
    """The last pauses of each job's rollouts; forgotten with the job."""

    def __init__(self) -> None:
        self._gaps: dict[JobId, _Pauses] = {}
        self._stalls: dict[JobId, _Pauses] = {}

    def saw(self, job: JobId, gap_us: int, *, stall: bool) -> None:
        """Nothing of a rollout ran or waited for so long; ``stall``: the same one went on."""
        self._gaps.setdefault(job, _Pauses()).own.append(gap_us)
        if stall:
            self._stalls.setdefault(job, _Pauses()).own.append(gap_us)

    def gap_us(self, job: JobId) -> int | None:
        """Half of the last pauses were no longer than this."""
        found = self._gaps.get(job)
        return None if found is None else found.middle()

    def stall_us(self, job: JobId) -> int | None:
        """The same of those that were too long to hold for, and within a rollout."""
        found = self._stalls.get(job)
        return None if found is None else found.middle()

    def longest_us(self, job: JobId) -> int:
        """Of those; 0 if there was none."""
        found = self._stalls.get(job)
        return 0 if found is None else max((*found.believed, *found.own), default=0)

    def known(self, job: JobId) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pauses, and those that were too long to hold for; oldest first."""
        gaps, stalls = (known.get(job, _Pauses()).last() for known in (self._gaps, self._stalls))
        return gaps, stalls

    def expect(self, job: JobId, gaps: Sequence[int], stalls: Sequence[int]) -> None:
        """Believed of a job of which nothing is known: together as much as one pause of its own,
        for its client may have other tools than the one before."""
        for known, found in ((self._gaps, gaps), (self._stalls, stalls)):
            if found and job not in known:
                known[job] = _Pauses(found)

    def forget(self, job: JobId) -> None:
        """The job is over."""
        self._gaps.pop(job, None)
        self._stalls.pop(job, None)


class _Pauses:
    """Of one job."""

    __slots__ = ("_vote", "believed", "own")

    def __init__(self, believed: Sequence[int] = ()) -> None:
        self.own: deque[int] = deque(maxlen=KEPT)
        #: Of others, or of the same job under another daemon; and the middle of them, if any.
        self.believed = tuple(believed[-KEPT:])
        self._vote = (_middle(self.believed),) if believed else ()

    def middle(self) -> int:
        return _middle((*self._vote, *self.own))

    def last(self) -> tuple[int, ...]:
        return (*self.believed, *self.own)[-KEPT:]


def _middle(gaps: Sequence[int]) -> int:
    return sorted(gaps)[(len(gaps) - 1) // 2]
