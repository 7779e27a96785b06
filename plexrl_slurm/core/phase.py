"""Phases: runs of calls that belong together, seen from one WPG.

A training phase goes from the first call after a completed step, or after a long pause, to the
end of ``optim_step`` (or of the ``publish`` that history says follows at once). A sampling phase
goes from the first sample to the last; it belongs to the job, across its snapshots.
"""

from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.estimates import Estimates
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import FunctionKind, Pool

#: The shortest anticipatory hold.
LEAST_HOLD_US: Final = 50_000
#: Their end may end a phase.
_LAST: Final = frozenset({FunctionKind.OPTIM_STEP, FunctionKind.PUBLISH, FunctionKind.SAMPLE})
#: They begin a new phase if a step was completed before.
_FIRST: Final = frozenset({FunctionKind.FORWARD, FunctionKind.FORWARD_BACKWARD})


@dataclass(slots=True, eq=False, kw_only=True)
class Phase:
    """Where one job stands in its phase on one WPG."""

    job: JobId
    pool: Pool
    #: Busy and waiting time of the phase so far, without what lasts now.
    served_us: int = 0
    waited_us: int = 0
    #: Calls that wait, and that run, now.
    waiting: int = 0
    running: int = 0
    #: Since when something waits; since when something runs.
    ready_us: int = 0
    busy_us: int = 0
    last_end_us: int | None = None
    last_kind: FunctionKind | None = None
    #: Tenant that the call which ended last was of.
    last_key: str = ""
    open_step: bool = False
    #: An optimizer step ended in this phase.
    stepped: bool = False

    def wait(
        self, kind: FunctionKind, at_us: int, estimates: Estimates, hold_us: int, key: str = ""
    ) -> None:
        """A call of tenant ``key`` that could run waits."""
        if self.waiting == 0:
            self.ready_us = at_us
            if self.running == 0 and self.last_end_us is not None and self.last_kind is not None:
                gap_us = max(0, at_us - self.last_end_us)
                stall = gap_us > hold_us and key == self.last_key
                estimates.saw_gap(self.job, self.last_kind, gap_us, stall=stall)
                over = gap_us > hold_us or (self.stepped and kind in _FIRST)
                if over and not self.open_step:
                    self.close(estimates)
        self.waiting += 1

    def join(self, at_us: int) -> None:
        """A call is about to run that did not wait here: its WPG said that it runs it."""
        if self.waiting == 0:
            self.ready_us = at_us
        self.waiting += 1

    def give_up(self, count: int) -> None:
        """Waiting calls were cancelled."""
        self.waiting -= count

    def carry(self, other: "Phase", count: int) -> None:
        """``count`` calls that waited in ``other``, on another WPG, wait here from now on."""
        if not (self.waiting or self.running or self.in_middle()) and self.last_end_us is None:
            self.served_us, self.stepped = other.served_us, other.stepped
            self.last_end_us, self.last_kind = other.last_end_us, other.last_kind
        self.waited_us = max(self.waited_us, other.waited_us)
        if count:
            self.ready_us = min(self.ready_us, other.ready_us) if self.waiting else other.ready_us
        self.waiting += count
        other.waiting -= count

    def begin(self, at_us: int, estimates: Estimates) -> None:
        """A waiting call runs. One that was long overdue has its due with that."""
        if self.running == 0:
            waited_us = max(0, at_us - self.ready_us)
            self.waited_us += waited_us
            if self.waited_us >= 2 * estimates.step_us(self.job):
                self.waited_us = 0
            estimates.saw_wait(self.job, waited_us)
            self.busy_us = at_us
        self.waiting -= 1
        self.running += 1

    def end(self, kind: FunctionKind, at_us: int, estimates: Estimates, hold_us: int) -> None:
        """A running call ended."""
        self._stop(1, at_us)
        self.last_end_us, self.last_kind = at_us, kind
        self.stepped |= kind is FunctionKind.OPTIM_STEP
        if (
            kind in _LAST
            and self.running == 0
            and self.waiting == 0
            and not self.open_step
            and self.hold_until_us(estimates, hold_us) is None
        ):
            self.close(estimates)

    def lose(self, count: int, at_us: int) -> None:
        """Running calls are gone with their WPG; nobody holds for what went wrong."""
        self._stop(count, at_us)
        self.last_end_us = None

    def close(self, estimates: Estimates) -> None:
        """The phase is over."""
        if self.served_us:
            estimates.saw_phase(self.job, self.pool, self.served_us)
        self.served_us = self.waited_us = 0
        self.stepped = False

    def in_middle(self) -> bool:
        """Whether the phase has begun and is not over."""
        return self.running > 0 or self.open_step or self.served_us > 0

    def hold_until_us(self, estimates: Estimates, hold_us: int) -> int | None:
        """Until when the next call is worth waiting for; ``None`` if it will not come soon."""
        if self.last_end_us is None or self.last_kind is None or not self.in_middle():
            return None
        gap_us = estimates.gap_us(self.job, self.last_kind)
        if gap_us is None:
            return self.last_end_us + hold_us if self.open_step else None
        if gap_us > hold_us:
            return None
        return self.last_end_us + min(hold_us, max(LEAST_HOLD_US, 2 * gap_us))

    def remaining_us(self, kind: FunctionKind, at_us: int, estimates: Estimates) -> int:
        """Expected rest of the phase: never less than one function."""
        served_us = self.served_us + (at_us - self.busy_us if self.running else 0)
        return estimates.left_us(self.job, kind, self.pool, served_us)

    def _stop(self, count: int, at_us: int) -> None:
        self.running -= count
        if count and self.running == 0:
            self.served_us += max(0, at_us - self.busy_us)
