"""The books of one WPG: every held microsecond in exactly one stretch. Integers only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.ids import CallId, CauseId, JobId
from plexrl_slurm.core.messages import Activity, Call, Charge, Wpg

#: A stretch that several calls share is written down at least this often, any other
SHARED_ROW_US: Final = 10_000_000
#: at least this often (at the next beat of the clock).
ROW_US: Final = 60_000_000


def split(total: int, weights: Mapping[JobId, int]) -> dict[JobId, int]:
    """Share ``total`` in proportion to ``weights``; the remainder goes to the lowest job id.

    Without any weight the shares are equal. They always sum to ``total``.
    """
    whole = sum(weights.values())
    if whole == 0:
        weights, whole = dict.fromkeys(weights, 1), len(weights)
    shares = {job: total * weights[job] // whole for job in sorted(weights)}
    first = min(shares)
    shares[first] += total - sum(shares.values())
    return shares


@dataclass(slots=True, kw_only=True)  # not frozen: built for every stretch, and that is slow
class Use:
    """What a WPG does; the next stretch begins when it changes. A value: nobody changes one."""

    activity: Activity
    #: Who pays; nobody for idle and down, several for shared sampling.
    jobs: frozenset[JobId] = frozenset()
    call: CallId | None = None
    #: When its function began: tells two runs of one call apart. ``None`` for sampling.
    began_us: int | None = None


DOWN: Final = Use(activity=Activity.DOWN)
IDLE: Final = Use(activity=Activity.IDLE)


class Meter:
    """The open stretch of one WPG, and how it is closed."""

    def __init__(self, wpg: Wpg, at_us: int) -> None:
        self._wpg = wpg
        self.use = DOWN
        #: Since when the WPG does what it does.
        self.since_us = at_us
        #: Everything before is written down.
        self.cursor_us = at_us
        self._tokens: dict[JobId, int] = {}
        self._calls: set[CallId] = set()

    def turn(self, use: Use, at_us: int, running: Iterable[Call], cause: CauseId) -> list[Charge]:
        """The WPG does ``use`` from now on; the charges for what it did before."""
        if use is self.use or use == self.use:
            return []
        charges = self.cut(at_us, (), cause)
        self.use, self.since_us = use, at_us
        for call in running:
            self.count(call)
        return charges

    def count(self, call: Call) -> None:
        """``call`` runs in the open stretch and bears its share of it."""
        if call.id not in self._calls:
            self._calls.add(call.id)
            self._tokens[call.job] = self._tokens.get(call.job, 0) + call.tokens

    def due_us(self) -> int:
        """When the open stretch has become too long to be kept in memory only."""
        shared = self.use.activity is Activity.BUSY and self.use.began_us is None
        return self.cursor_us + (SHARED_ROW_US if shared else ROW_US)

    def due(self, at_us: int) -> bool:
        """Whether it has."""
        return at_us >= self.due_us()

    def cut(self, at_us: int, running: Iterable[Call], cause: CauseId) -> list[Charge]:
        """Write down what has passed; the same use goes on with the ``running`` calls."""
        start_us, self.cursor_us = self.cursor_us, at_us
        tokens, calls = self._tokens, self._calls
        if calls:
            self._tokens, self._calls = {}, set()
        for call in running:
            self.count(call)
        if at_us == start_us or not self._wpg.gpus:
            return []  # the time of GPUs that are shared is booked where they belong
        use = self.use
        only = next(iter(calls)) if use.call is None and len(calls) == 1 else use.call
        gpu_us = (at_us - start_us) * self._wpg.gpus
        payers: dict[JobId | None, int] = {None: gpu_us}
        if len(use.jobs) == 1:
            payers = dict.fromkeys(use.jobs, gpu_us)
        elif use.jobs:
            payers = dict(split(gpu_us, {job: tokens.get(job, 0) for job in use.jobs}).items())
        return [
            Charge(
                wpg=self._wpg.id,
                activity=use.activity,
                job=job,
                call=only,
                start_us=start_us,
                stop_us=at_us,
                gpu_us=share,
                cause=cause,
            )
            for job, share in payers.items()
        ]
