"""The queue pass of intake: who is looked at, who gets a place, and why the others wait.

A job gets its place in memory first, then its row is claimed; if the daemon is killed in between,
nothing has happened, and after the claim the row's lease brings it back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import Denied, InvalidTransition, ModelTooLarge, UnknownModel
from plexrl_slurm.core.ids import JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.queue_pass import (
    AGAIN,
    GONE,
    LATER,
    PLACED,
    UNFIT,
    Queued,
    QueuePass,
    Waits,
)
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.job_views import live_job
from plexrl_slurm.daemons.outside import held_outside
from plexrl_slurm.daemons.queue_book import QueueBook
from plexrl_slurm.daemons.recovery import LEASE_US
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.standings import Standings
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import Session
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.port import JobStatus

log = logging.getLogger(__name__)

#: Numbers in a sentence change all the time: they are written anew no more often than this.
WRITE_US: Final = 10_000_000
#: Reasons that one walk writes; a transaction is not to be long.
MOST_WRITES: Final = 100
#: After so long others have a turn, in the middle of a walk.
WAY_S: Final = 0.02
#: After a walk, so many times as long as it took, there is none: thousands of jobs may wait.
PAUSE: Final = 4


@dataclass(slots=True, eq=False)
class _Turn:
    """One pass, as far as it has come."""

    passing: QueuePass
    rows: dict[JobId, JobRow]
    waits: dict[JobId, tuple[JobRow, Waits]] = field(default_factory=dict)
    #: Nobody else has had a turn since the last job was tried: nothing has changed.
    steady: bool = False
    #: When others had a turn.
    since_s: float = field(default_factory=monotonic)


class Turns:
    """Part of intake."""

    def __init__(
        self,
        parts: Parts,
        standings: Standings,
        *,
        admit: Callable[[JobRow, LiveJob], Awaitable[None]],
        give_up: Callable[[LiveJob, str], Awaitable[None]],
    ) -> None:
        self._parts, self._standings = parts, standings
        self._admit, self._give_up = admit, give_up
        #: Kinds of obstacles that each job's story has last, and when they were written.
        self._told: dict[JobId, tuple[tuple[str, ...], int]] = {}
        self._not_before_us = 0
        self._book = QueueBook(standings)

    async def look(self) -> None:
        """One pass along the queue, unless the last one took long and has just been."""
        at_us = now_us()
        if at_us < self._not_before_us <= at_us + 60_000_000:
            return
        await self._walk(at_us)
        done_us = now_us()
        self._not_before_us = done_us + PAUSE * (done_us - at_us)

    async def _walk(self, at_us: int) -> None:
        parts = self._parts
        rows = await parts.store.run(queue.living, parts.settings.partition)
        for row in rows:
            if row.owner == str(parts.epoch) and JobId(row.id) not in parts.state.jobs:
                await self._give_back(row)
        waiting = [r for r in rows if r.state is JobState.PENDING and r.slurm_id is not None]
        if not waiting:
            parts.state.waiting_since_us = None
            parts.state.obstacles.clear()
            return
        await self._standings.refresh(parts.store, at_us)
        slurm = {**parts.watch.young, **parts.watch.jobs}
        jobs = [
            self._queued(row, slurm, at_us)
            for row in rows
            if row.slurm_id is not None or row.state is not JobState.PENDING
        ]
        turn = _Turn(
            passing=QueuePass(
                self._standings.rules, at_us=at_us, jobs=jobs, dues=self._standings.dues
            ),
            rows={JobId(row.id): row for row in waiting},
        )
        passing = turn.passing
        for each in passing.order:
            if (known := parts.state.jobs.get(each.job)) is not None:
                turn.steady = False
                passing.hears(each, AGAIN)
                await self._claim_again(known)
            else:
                await self._try(each, turn, passing.looks_at(each))
            await self._give_way(turn)
        for each in list(passing.later):
            await self._try(each, turn, passing.looks_again(each), last=True)
            await self._give_way(turn)
        parts.state.waiting_since_us = passing.oldest_us
        self._book.write(jobs, at_us, passing)
        await self._say(turn.waits, at_us)

    def _queued(self, row: JobRow, slurm: Mapping[SlurmId, JobStatus], at_us: int) -> Queued:
        found = self._standings.queued(row)
        if found.placed or (held := held_outside(row, slurm, at_us)) is None:
            return found
        return replace(found, in_slurm=held)

    async def _give_way(self, turn: "_Turn") -> None:
        """Calls that come meanwhile do not wait for the whole pass."""
        if monotonic() - turn.since_s >= WAY_S:
            await asyncio.sleep(0)
            turn.since_s, turn.steady = monotonic(), False

    async def _try(
        self, each: Queued, turn: "_Turn", waits: Waits | None, *, last: bool = False
    ) -> None:
        """Give it a place, if there is one; ``last``: nobody who joins others comes after it."""
        parts, passing, row = self._parts, turn.passing, turn.rows[each.job]
        if waits is not None:
            turn.waits[each.job] = (row, waits)
            return
        job = live_job(row, self._standings.qos(row))
        try:
            obstacles = parts.placer.admit(job, list(row.models), steady=turn.steady)
        except (ModelTooLarge, UnknownModel) as problem:
            passing.hears(each, UNFIT)
            job.unfit = str(problem)
            parts.state.jobs[job.id] = job  # so that it is tried again where Slurm is away
            turn.steady = False
            await self._give_up(job, job.unfit)
            return
        turn.steady = True
        if obstacles:
            passing.finds_none(each, obstacles)
            turn.waits[each.job] = (row, obstacles)
        elif not (last or passing.alone(each)) and self._is_empty(job.homes.get(Pool.TRAIN)):
            passing.hears(each, LATER)
        else:
            turn.steady = False
            passing.hears(each, PLACED if await self._take(job) else GONE)

    def _is_empty(self, wpg: WpgId | None) -> bool:
        homes = (job.homes.get(Pool.TRAIN) for job in self._parts.state.jobs.values())
        return wpg is not None and wpg not in homes

    async def _take(self, job: LiveJob) -> bool:
        """Claim the row of a job that has its homes; false if it is not to be had any more."""
        jobs = self._parts.state.jobs
        jobs[job.id] = job  # from now on its homes count
        try:
            row = await self._claim(job)
        except BaseException:
            jobs.pop(job.id, None)
            raise
        if row is None or job.ended:
            say(log, "ended_while_claimed", job=job.slurm_id)
            jobs.pop(job.id, None)
            return False
        await self._admit(row, job)
        return True

    async def _claim_again(self, job: LiveJob) -> None:
        """The lease of a job of ours had lapsed."""
        if not job.unfit and (taken := await self._claim(job)) is not None:
            await self._admit(taken, job)

    async def _give_back(self, row: JobRow) -> None:
        """Its claim was kept, and nobody heard of it: the connection broke at that moment."""
        owner = str(self._parts.epoch)
        try:
            await self._parts.store.run(
                queue.unclaim, JobId(row.id), owner=owner, obstacles=[], now_us=now_us()
            )
        except (InvalidTransition, Denied):
            say(log, "ended_while_claimed", job=row.slurm_id)

    async def _claim(self, job: LiveJob) -> JobRow | None:
        parts = self._parts
        return await parts.store.run(
            _claim_with_homes,
            job.id,
            partition=parts.settings.partition,
            owner=str(parts.epoch),
            homes={str(pool): str(wpg) for pool, wpg in job.homes.items()},
            at_us=now_us(),
        )

    async def _say(self, waits: dict[JobId, tuple[JobRow, Waits]], at_us: int) -> None:
        """Write down why they wait, where that is news."""
        changes: list[tuple[JobId, list[str], bool]] = []
        for job, (row, obstacles) in waits.items():
            sentences = [each.sentence for each in obstacles]
            kinds = tuple(str(each.kind) for each in obstacles)
            told = self._told.get(job)
            if row.obstacles == sentences:
                self._told.setdefault(job, (kinds, 0))
                continue
            new = told is None or told[0] != kinds
            if new or told is None or not 0 <= at_us - told[1] < WRITE_US:
                changes.append((job, sentences, new))
                self._told[job] = (kinds, at_us)
            if len(changes) == MOST_WRITES:
                break
        self._parts.state.obstacles = {job: obstacles for job, (_, obstacles) in waits.items()}
        for gone in self._told.keys() - waits.keys():
            del self._told[gone]
        if changes:
            await self._parts.store.run(_write, changes, at_us)


def _claim_with_homes(
    session: Session, job: JobId, *, partition: str, owner: str, homes: dict[str, str], at_us: int
) -> JobRow | None:
    """Both or none: whoever finds the claim finds the homes."""
    row = queue.claim(
        session, partition=partition, owner=owner, lease_us=LEASE_US, now_us=at_us, job=job
    )
    if row is not None:
        queue.set_homes(session, job, homes)
    return row


def _write(session: Session, changes: Sequence[tuple[JobId, list[str], bool]], at_us: int) -> None:
    for job, sentences, tell in changes:
        queue.keep_waiting(session, job, obstacles=sentences, tell=tell, now_us=at_us)
