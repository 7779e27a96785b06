"""Moves jobs to other WPGs: when promises are predicted to break where they are, and so that a
training WPG is free for somebody who waits.

That costs a pause of the whole WPG: it is drained, so that every image there is durable and no call
is under way (decision 0015), jobs move, and the others go on. One WPG at a time, and rarely.
"""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Any, Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.grouping import Placement
from plexrl_slurm.core.ids import CauseId, JobId, WpgId
from plexrl_slurm.core.messages import Pool, WpgDraining, WpgResumed
from plexrl_slurm.core.relief import merge, relieve
from plexrl_slurm.daemons.moves import Mover
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.db import queue
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: Between two looks.
LOOK_S: Final = 5.0
#: Between two looks for something to merge, which asks all groups of all sizes.
MERGE_US: Final = 30_000_000
#: A drain that lasts longer is given up.
PATIENCE_US: Final = 300_000_000
_PROMISE: Final = "so that promised slowdowns are kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A WPG that is drained so that jobs can leave it."""

    wpg: WpgId
    pool: Pool
    homes: tuple[tuple[JobId, WpgId], ...]
    #: For people.
    why: str
    #: All of them leave, or nobody does.
    merges: bool
    since_us: int


class Relief:
    """One a daemon."""

    def __init__(self, parts: Parts, mover: Mover) -> None:
        self._parts, self._mover = parts, mover
        self._sharing = parts.settings.sharing
        #: Jobs of which something new is known.
        self.doubtful: set[JobId] = set()
        self.under_way: UnderWay | None = None
        self._moved_us: dict[JobId, int] = {}
        self._merged_us: int | None = None
        #: Jobs that moved, and WPGs that became free.
        self.count = self.merges = 0

    @property
    def enabled(self) -> bool:
        """Whether jobs move at all: without durable images they would begin anew."""
        fits = self._sharing.rules.placement is Placement.FIT
        return self._sharing.regroup and fits and self._parts.settings.durable

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def heard_news(self, job: JobId) -> None:
        """It is known better than before."""
        self.doubtful.add(job)

    def look(self) -> None:
        """Decide whether somebody should move now."""
        if not self.enabled:
            self.doubtful.clear()
            return
        if self.under_way is not None:
            self._look_after(self.under_way)
            return
        jobs, placer = self._parts.state.jobs, self._parts.placer
        self._moved_us = {job: at for job, at in self._moved_us.items() if job in jobs}
        while self.doubtful:
            job = jobs.get(self.doubtful.pop())
            for pool, home in () if job is None else tuple(job.homes.items()):
                found = relieve(placer.open_partition(), home, placer.rules, self._may_move)
                if found is not None:
                    self._begin(home, pool, (found,), _PROMISE, merges=False)
                    return
        self._look_for_merge()

    def drained(self, wpg: WpgId) -> None:
        """The core says that nothing is under way on a WPG."""
        found = self.under_way
        if found is None or found.wpg != wpg or wpg in self._parts.placer.draining:
            self._mover.wpg_drained(wpg)
            return
        moved = self._move(found) if self._still_right(found) else 0
        self.merges += found.merges and moved == len(found.homes)
        self._end(found, "moved" if moved else "no longer wanted")

    # -- one after the other ---------------------------------------------------------------
    def _look_for_merge(self) -> None:
        """Make a training WPG free, where somebody waits for room or a hold could be given back."""
        now, parts = now_us(), self._parts
        early = self._merged_us is not None and 0 <= now - self._merged_us < MERGE_US
        if not self._sharing.merge or early:
            return
        waits = parts.state.waiting_since_us is not None
        if not waits and (parts.holds is None or len(parts.holds.live) < 2):
            return
        self._merged_us = now
        found = merge(parts.placer.open_partition(), parts.placer.rules, self._may_move)
        if found is not None:
            whom = "jobs that wait" if waits else "other partitions"
            why = f"so that {found.wpg} is free for {whom}"
            self._begin(found.wpg, Pool.TRAIN, found.homes, why, merges=True)

    def _may_move(self, job_id: JobId) -> bool:
        job = self._parts.state.jobs.get(job_id)
        if job is None or job.ended or job.started_us is None:
            return False
        now = now_us()
        # A clock that was set back must not keep a job where it is.
        since_us = min(now, self._moved_us.get(job_id, job.started_us))
        ends_us = self._parts.placer.ends_of(job)
        stays = ends_us is None or ends_us - now >= self._sharing.regroup_us
        return stays and now - since_us >= self._sharing.regroup_us

    def _still_right(self, found: UnderWay) -> bool:
        """Whether it would be decided again; others have come and gone meanwhile."""
        placer, mine = self._parts.placer, {job for job, _ in found.homes}
        now = placer.open_partition()
        if found.merges:
            again = merge(now, placer.rules, lambda job: job in mine, only=(found.wpg,))
            return again is not None and again.homes == found.homes
        return (relieve(now, found.wpg, placer.rules, lambda job: job in mine),) == found.homes

    def _move(self, found: UnderWay) -> int:
        """Number of jobs that have moved."""
        moved = 0
        for job_id, home in found.homes:
            job = self._parts.state.jobs.get(job_id)
            if job is None or job.homes.get(found.pool) != found.wpg:
                continue
            reason = f"job {job.slurm_id} moves {found.why}"
            if self._mover.move(job, found.pool, home, reason):
                moved += 1
                self._moved_us[job.id] = now_us()
        self.count += moved
        return moved

    def _begin(
        self,
        wpg: WpgId,
        pool: Pool,
        homes: tuple[tuple[JobId, WpgId], ...],
        why: str,
        *,
        merges: bool,
    ) -> None:
        now = now_us()
        say(log, "relief_begins", wpg=wpg, homes=self._named(homes), why=why)
        self.under_way = UnderWay(
            wpg=wpg, pool=pool, homes=homes, why=why, merges=merges, since_us=now
        )
        for job, home in homes:
            text = f"{wpg} is drained for a moment: the job moves to {home}, {why}"
            self._parts.writer.add(_note, job, text, now, lazy=True)
        who = ", ".join(f"job {self._parts.state.number(job)}" for job, _ in homes)
        cause = CauseId(f"{who} {'leaves' if len(homes) == 1 else 'leave'} {wpg}, {why}")
        self._parts.shell.feed(WpgDraining(at_us=now, cause=cause, wpg=wpg, relief=why))

    def _named(self, homes: tuple[tuple[JobId, WpgId], ...]) -> dict[str, WpgId]:
        """As people call the jobs."""
        return {self._parts.state.number(job): home for job, home in homes}

    def _look_after(self, found: UnderWay) -> None:
        placer, now = self._parts.placer, now_us()
        gone = found.wpg not in placer.wpgs or found.wpg in placer.draining
        unwanted = all(job not in self._parts.state.jobs for job, _ in found.homes)
        if now < found.since_us:  # the clock was set back: patience begins again
            self.under_way = replace(found, since_us=now)
        if gone or unwanted or now - found.since_us > PATIENCE_US:
            self._moved_us |= {job: now for job, _ in found.homes}  # not again at once
            self._end(found, "given up")

    def _end(self, found: UnderWay, how: str) -> None:
        self.under_way = None
        say(log, "relief_ends", wpg=found.wpg, homes=self._named(found.homes), how=how)
        # One that is to be given back now, or is gone, is somebody else's.
        if found.wpg in self._parts.placer.wpgs and found.wpg not in self._parts.placer.draining:
            cause = CauseId(f"{found.wpg} goes on")
            self._parts.shell.feed(WpgResumed(at_us=now_us(), cause=cause, wpg=found.wpg))
            self.doubtful |= {
                job.id for job in self._parts.state.jobs.values() if found.wpg in job.homes.values()
            }


def _note(session: Any, job: JobId, text: str, now_us: int) -> None:
    queue.note(session, job, at_us=now_us, kind="regroup", text=text)
