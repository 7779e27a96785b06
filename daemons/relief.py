"""Moves jobs to other WPGs: when promises are predicted to break where they are, and so that a
training WPG is free for somebody who waits. Where nobody does, it tells the keeper of holds which
one all could leave.

That costs a pause of the whole WPG: it is drained, so that every image there is durable and no call
is under way (decision 0015), jobs move, and the others go on. One WPG at a time, and rarely.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ground import News
from plexrl_slurm.core.grouping import Placement
from plexrl_slurm.core.holding import HoldPhase
from plexrl_slurm.core.ids import CauseId, JobId, WpgId
from plexrl_slurm.core.leaving import Leaves, Leaving, Stays, still_right
from plexrl_slurm.core.messages import Pool, WpgDraining, WpgResumed
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

    #: All of them leave if it merges, or nobody does.
    what: Leaving
    pool: Pool
    #: For people.
    why: str
    since_us: int


class LeaveJournal(Protocol):
    """See :class:`plexrl_slurm.journal.JournalledCore`."""

    def left(
        self, news: News, stays: Stays, at_us: int, asked: list[WpgId] | None, found: Leaving | None
    ) -> None:
        """Somebody leaves one of the WPGs ``asked`` (``None``: any, to make it empty), or not."""

    def vacated(
        self,
        news: News,
        stays: Stays,
        at_us: int,
        holds: Sequence[tuple[str, Sequence[WpgId]]],
        found: str | None,
    ) -> None:
        """Everybody could leave one of these holds, or none."""

    def still(self, news: News, right: bool) -> None:
        """What was decided the last time would be decided now, or not."""


class Relief:
    """One a daemon."""

    def __init__(self, parts: Parts, mover: Mover) -> None:
        self._parts, self._mover = parts, mover
        self._sharing = parts.settings.sharing
        #: Jobs of which something new is known.
        self.doubtful: set[JobId] = set()
        self.under_way: UnderWay | None = None
        self.journal: LeaveJournal | None = None
        self._moved_us: dict[JobId, int] = {}
        self._merged_us: int | None = None
        #: The hold that all could leave.
        self._vacant: str | None = None
        #: Since when each has been where it is, and what of that the journal has.
        self._since_us: dict[JobId, int] = {}
        self._told_us: dict[JobId, int] = {}
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
        jobs = self._parts.state.jobs
        self._moved_us = {job: at for job, at in self._moved_us.items() if job in jobs}
        if self.doubtful:
            asked: list[WpgId] = []
            leaves, at_us = self._leaves()
            found = leaves.relieved(self._in_doubt(asked))
            self._note(at_us, asked, found)
            if found is not None:
                self._begin(found, _PROMISE)
                return
        self._look_for_merge()

    def drained(self, wpg: WpgId) -> None:
        """The core says that nothing is under way on a WPG."""
        found = self.under_way
        if found is None or found.what.wpg != wpg or wpg in self._parts.placer.draining:
            self._mover.wpg_drained(wpg)
            return
        moved = self._move(found) if self._still_right(found.what) else 0
        self.merges += found.what.merges and moved == len(found.what.homes)
        self._end(found, "moved" if moved else "no longer wanted")

    # -- one after the other ---------------------------------------------------------------
    def _in_doubt(self, asked: list[WpgId]) -> Iterator[WpgId]:
        """Homes of jobs of which something new is known, each once, as long as one is asked for."""
        while self.doubtful:
            job = self._parts.state.jobs.get(self.doubtful.pop())
            for home in () if job is None else tuple(job.homes.values()):
                if home not in asked:
                    asked.append(home)
                    yield home

    def _look_for_merge(self) -> None:
        """Make a training WPG free where somebody waits for room; else see whether a hold could be
        given back."""
        now, parts = now_us(), self._parts
        early = self._merged_us is not None and 0 <= now - self._merged_us < MERGE_US
        waits = parts.state.waiting_since_us is not None
        if waits:
            self._tell_vacant(None, now)
        if not self._sharing.merge or early:
            return
        if not waits:
            self._look_for_vacant()
            return
        self._merged_us = now
        leaves, at_us = self._leaves()
        found = leaves.merged()
        self._note(at_us, None, found)
        if found is not None:
            self._begin(found, f"so that {found.wpg} is free for jobs that wait")

    def _look_for_vacant(self) -> None:
        """Whether all could leave one of the holds; the keeper lets it go after a while."""
        keeper, rules = self._parts.holds, self._parts.settings.hold
        if keeper is None or not rules.idle_release_us or len(keeper.live) <= max(1, rules.min):
            self._tell_vacant(None, 0)
            return
        holds = [
            (hold.id, tuple(hold.wpgs))
            for hold in keeper.live.values()
            if hold.phase is HoldPhase.RUNNING and not hold.draining
        ]
        leaves, self._merged_us = self._leaves()
        found = leaves.vacated(holds)
        if self.journal is not None and found != self._vacant:
            news = self._parts.placer.residents.news()
            self.journal.vacated(news, self._stays(), self._merged_us, holds, found)
        self._tell_vacant(found, self._merged_us)

    def _tell_vacant(self, found: str | None, at_us: int) -> None:
        self._vacant, keeper = found, self._parts.holds
        for hold in () if keeper is None else keeper.live.values():
            since_us = hold.vacant_since_us
            if hold.id != found:
                hold.vacant_since_us = None
            elif since_us is None or since_us > at_us:
                hold.vacant_since_us = at_us

    def _leaves(self) -> tuple[Leaves, int]:
        """What may be decided now, and when that is."""
        now = now_us()
        self._since_us = {
            job.id: self._moved_us.get(job.id, job.started_us)
            for job in self._parts.state.jobs.values()
            if not job.ended and job.started_us is not None
        }
        partition = self._parts.placer.open_partition()
        return Leaves(self._sharing.leaving, partition, self._since_us, now), now

    def _note(self, at_us: int, asked: list[WpgId] | None, found: Leaving | None) -> None:
        if self.journal is None or asked == []:
            return
        news = self._parts.placer.residents.news()
        self.journal.left(news, self._stays(), at_us, asked, found)

    def _stays(self) -> Stays:
        """What no journal has yet."""
        told, self._told_us = self._told_us, self._since_us
        return Stays(
            since_us={job: at for job, at in self._told_us.items() if told.get(job) != at},
            gone=tuple(job for job in told if job not in self._told_us),
        )

    def _still_right(self, found: Leaving) -> bool:
        """Whether it would be decided again; others have come and gone meanwhile."""
        placer = self._parts.placer
        right = still_right(placer.open_partition(), self._sharing.leaving, found)
        if self.journal is not None:
            self.journal.still(placer.residents.news(), right)
        return right

    def _move(self, found: UnderWay) -> int:
        """Number of jobs that have moved."""
        moved = 0
        for job_id, home in found.what.homes:
            job = self._parts.state.jobs.get(job_id)
            if job is None or job.homes.get(found.pool) != found.what.wpg:
                continue
            reason = f"job {job.slurm_id} moves {found.why}"
            if self._mover.move(job, found.pool, home, reason):
                moved += 1
                self._moved_us[job.id] = now_us()
        self.count += moved
        return moved

    def _begin(self, what: Leaving, why: str) -> None:
        now, wpg, homes = now_us(), what.wpg, what.homes
        self._tell_vacant(None, now)  # until somebody has looked again
        say(log, "relief_begins", wpg=wpg, homes=self._named(homes), why=why)
        pool = self._parts.placer.wpgs[wpg].wpg.pool
        self.under_way = UnderWay(what=what, pool=pool, why=why, since_us=now)
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
        wpg, homes = found.what.wpg, found.what.homes
        gone = wpg not in placer.wpgs or wpg in placer.draining
        unwanted = all(job not in self._parts.state.jobs for job, _ in homes)
        if now < found.since_us:  # the clock was set back: patience begins again
            self.under_way = replace(found, since_us=now)
        if gone or unwanted or now - found.since_us > PATIENCE_US:
            self._moved_us |= {job: now for job, _ in homes}  # not again at once
            self._end(found, "given up")

    def _end(self, found: UnderWay, how: str) -> None:
        self.under_way, wpg = None, found.what.wpg
        say(log, "relief_ends", wpg=wpg, homes=self._named(found.what.homes), how=how)
        # One that is to be given back now, or is gone, is somebody else's.
        if wpg in self._parts.placer.wpgs and wpg not in self._parts.placer.draining:
            cause = CauseId(f"{wpg} goes on")
            self._parts.shell.feed(WpgResumed(at_us=now_us(), cause=cause, wpg=wpg))
            jobs = self._parts.state.jobs.values()
            self.doubtful |= {job.id for job in jobs if wpg in job.homes.values()}


def _note(session: Any, job: JobId, text: str, now_us: int) -> None:
    queue.note(session, job, at_us=now_us, kind="regroup", text=text)
