"""Moves a job to another training WPG when promises are predicted to break where it is.

That costs a pause of the whole WPG: it is drained, so that every image there is durable and no call
is under way (decision 0015), the job moves, and the others go on. One at a time, and rarely.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.grouping import Placement
from plexrl_slurm.core.ids import CauseId, JobId, WpgId
from plexrl_slurm.core.messages import Pool, WpgDraining, WpgResumed
from plexrl_slurm.core.relief import relieve
from plexrl_slurm.daemons.moves import Mover
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: Between two looks.
LOOK_S: Final = 5.0
#: A drain that lasts longer is given up.
PATIENCE_US: Final = 300_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A WPG that is drained so that one job can leave it."""

    wpg: WpgId
    job: JobId
    home: WpgId
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
        self.count = 0

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
            home = job.homes.get(Pool.TRAIN) if job is not None else None
            if home is None:
                continue
            found = relieve(placer.open_partition(), home, placer.rules, self._may_move)
            if found is not None:
                self._begin(home, *found)
                return

    def drained(self, wpg: WpgId) -> None:
        """The core says that nothing is under way on a WPG."""
        found = self.under_way
        if found is None or found.wpg != wpg or wpg in self._parts.placer.draining:
            self._mover.wpg_drained(wpg)
            return
        job = self._parts.state.jobs.get(found.job)
        if job is not None and job.homes.get(Pool.TRAIN) == wpg and self._still_right(found):
            promise = "so that promised slowdowns are kept"
            if self._mover.move_training(job, found.home, f"job {job.slurm_id} moves {promise}"):
                self.count += 1
                self._moved_us[job.id] = now_us()
        self._end(found, "moved")

    # -- one relief ------------------------------------------------------------------------
    def _may_move(self, job_id: JobId) -> bool:
        job = self._parts.state.jobs.get(job_id)
        if job is None or job.ended or job.started_us is None:
            return False
        now = now_us()
        since_us = self._moved_us.get(job_id, job.started_us)
        ends_us = self._parts.placer.ends_of(job)
        stays = ends_us is None or ends_us - now >= self._sharing.regroup_us
        return stays and now - since_us >= self._sharing.regroup_us

    def _still_right(self, found: UnderWay) -> bool:
        """Whether it would be decided again; others have come and gone meanwhile."""
        placer = self._parts.placer
        now = placer.open_partition()
        again = relieve(now, found.wpg, placer.rules, lambda job: job == found.job)
        return again == (found.job, found.home)

    def _begin(self, wpg: WpgId, job: JobId, home: WpgId) -> None:
        say(log, "relief_begins", wpg=wpg, job=job, home=home)
        self.under_way = UnderWay(wpg=wpg, job=job, home=home, since_us=now_us())
        cause = CauseId(f"job {job} leaves {wpg}, so that promised slowdowns are kept")
        self._parts.shell.feed(WpgDraining(at_us=now_us(), cause=cause, wpg=wpg))

    def _look_after(self, found: UnderWay) -> None:
        placer = self._parts.placer
        gone = found.wpg not in placer.wpgs or found.wpg in placer.draining
        unwanted = found.job not in self._parts.state.jobs
        if gone or unwanted or now_us() - found.since_us > PATIENCE_US:
            self._moved_us[found.job] = now_us()  # not again at once
            self._end(found, "given up")

    def _end(self, found: UnderWay, how: str) -> None:
        self.under_way = None
        say(log, "relief_ends", wpg=found.wpg, job=found.job, how=how)
        # One that is to be given back now, or is gone, is somebody else's.
        if found.wpg in self._parts.placer.wpgs and found.wpg not in self._parts.placer.draining:
            cause = CauseId(f"{found.wpg} goes on")
            self._parts.shell.feed(WpgResumed(at_us=now_us(), cause=cause, wpg=found.wpg))
            self.doubtful |= {
                job.id
                for job in self._parts.state.jobs.values()
                if job.homes.get(Pool.TRAIN) == found.wpg
            }
