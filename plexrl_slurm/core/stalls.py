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
        self._gaps: dict[JobId, deque[int]] = {}
        self._stalls: dict[JobId, deque[int]] = {}

    def saw(self, job: JobId, gap_us: int, *, stall: bool) -> None:
        """Nothing of a rollout ran or waited for so long; ``stall``: the same one went on."""
        self._gaps.setdefault(job, deque(maxlen=KEPT)).append(gap_us)
        if stall:
            self._stalls.setdefault(job, deque(maxlen=KEPT)).append(gap_us)

    def gap_us(self, job: JobId) -> int | None:
        """Half of the last pauses were no longer than this."""
        return _middle(self._gaps.get(job))

    def stall_us(self, job: JobId) -> int | None:
        """The same of those that were too long to hold for, and within a rollout."""
        return _middle(self._stalls.get(job))

    def longest_us(self, job: JobId) -> int:
        """Of those; 0 if there was none."""
        return max(self._stalls.get(job, ()), default=0)

    def known(self, job: JobId) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pauses, and those that were too long to hold for; oldest first."""
        return tuple(self._gaps.get(job, ())), tuple(self._stalls.get(job, ()))

    def expect(self, job: JobId, gaps: Sequence[int], stalls: Sequence[int]) -> None:
        """Believed of a job of which nothing is known."""
        for known, found in ((self._gaps, gaps), (self._stalls, stalls)):
            if found and job not in known:
                known[job] = deque(found, maxlen=KEPT)

    def forget(self, job: JobId) -> None:
        """The job is over."""
        self._gaps.pop(job, None)
        self._stalls.pop(job, None)


def _middle(gaps: "deque[int] | None") -> int | None:
    return sorted(gaps)[(len(gaps) - 1) // 2] if gaps else None
