"""The queue pass of intake: who is looked at, who gets a place, and why the others wait.

A job gets its place in memory first, then its row is claimed; if the daemon is killed in between,
nothing has happened, and after the claim the row's lease brings it back.
"""

import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import Denied, InvalidTransition, ModelTooLarge, UnknownModel
from plexrl_slurm.core.grouping import Placement
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.limits import Held, HeldKind, Qos, Tally
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import ObstacleKind
from plexrl_slurm.core.states import JobState
from plexrl_slurm.core.turns import End, Walk
from plexrl_slurm.daemons.job_views import live_job
from plexrl_slurm.daemons.recovery import LEASE_US
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.standings import Standings
from plexrl_slurm.daemons.state import LiveJob, Wait
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import Session
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: Numbers in a sentence change all the time: they are written anew no more often than this.
WRITE_US: Final = 10_000_000
#: Reasons that one walk writes; a transaction is not to be long.
MOST_WRITES: Final = 100
#: After a walk, so many times as long as it took, there is none: thousands of jobs may wait.
PAUSE: Final = 4

Waits: TypeAlias = tuple[Wait, ...]


@dataclass(slots=True, eq=False)
class _Turn:
    """One pass, as far as it has come."""

    at_us: int
    walk: Walk[Waits]
    tally: Tally
    waits: dict[JobId, tuple[JobRow, Waits]] = field(default_factory=dict)
    #: Nobody else has had a turn since the last job was tried: nothing has changed.
    steady: bool = False
    #: Those that would take an empty WPG.
    later: list[JobRow] = field(default_factory=list)
    oldest_us: int | None = None
    #: Who ended it, and what that is to all the others.
    stopper: str = ""
    behind: Waits = ()


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
        sharing = parts.settings.sharing
        #: As in the simulator: whoever takes an empty WPG comes after those that join others.
        self._joins_first = (
            sharing.rules.placement is Placement.FIT and standings.queue.turns.backfill
        )

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
        turn = _Turn(
            at_us=at_us,
            walk=Walk(self._standings.queue.turns, at_us),
            tally=self._standings.tally(rows),
        )
        for standing in self._standings.in_order(waiting, at_us):
            await self._look_at(standing.row, turn)
        for row in turn.later:
            if (held := self._standings.holds(row, turn.tally)) is not None:
                turn.waits[JobId(row.id)] = (row, (held,))  # by another of them
            else:
                await self._try(row, turn, alone=True)
        parts.state.waiting_since_us = turn.oldest_us
        await self._say(turn.waits, at_us)

    async def _look_at(self, row: JobRow, turn: "_Turn") -> None:
        job_id, qos = JobId(row.id), self._standings.qos(row)
        ended = turn.walk.ended
        if (known := self._parts.state.jobs.get(job_id)) is not None:
            turn.steady = False
            await self._claim_again(known)
        elif (held := self._standings.holds(row, turn.tally)) is not None:
            turn.waits[job_id] = (row, (held,))
        elif ended is not None and not self._passes(qos, ended):
            turn.behind = turn.behind or (self._behind(ended, turn.stopper),)
            turn.waits[job_id] = (row, turn.behind)
        else:
            overdue = turn.at_us - row.submitted_us >= self._standings.queue.turns.guard_us
            await self._try(row, turn, alone=overdue or not self._joins_first)

    async def _try(self, row: JobRow, turn: "_Turn", *, alone: bool) -> None:
        """Give it a place, if there is one; ``alone``: an empty training WPG will do."""
        parts, walk = self._parts, turn.walk
        job = live_job(row, self._standings.qos(row))
        shape = self._shape(row, job)
        try:
            obstacles = walk.look(shape)
            if not obstacles:
                obstacles = parts.placer.admit(job, list(row.models), steady=turn.steady)
                turn.steady = True
        except (ModelTooLarge, UnknownModel) as problem:
            job.unfit = str(problem)
            parts.state.jobs[job.id] = job  # so that it is tried again where Slurm is away
            turn.steady = False
            await self._give_up(job, job.unfit)
            return
        if not obstacles:
            if not alone and self._is_empty(job.homes.get(Pool.TRAIN)):
                turn.later.append(row)
                return
            turn.steady = False
            if await self._take(job):
                turn.tally.enter(self._standings.subject(row))
            return
        turn.waits[job.id] = (row, obstacles)
        turn.oldest_us = min(turn.oldest_us or row.submitted_us, row.submitted_us)
        if obstacles[0].kind is ObstacleKind.RESERVATION:
            return  # there is room, and it is not for this one: nobody waits behind it
        if walk.ended is None or walk.ended is End.DEPTH:
            turn.stopper = row.slurm_id or str(row.id)
        walk.fails(obstacles, since_us=row.submitted_us, shape=shape)

    def _is_empty(self, wpg: WpgId | None) -> bool:
        homes = (job.homes.get(Pool.TRAIN) for job in self._parts.state.jobs.values())
        return wpg is not None and wpg not in homes

    def _passes(self, qos: Qos, end: End) -> bool:
        """Room was set aside for some, and they wait for nobody else's."""
        return qos.reserved and self._standings.queue.reservation.any and end is not End.DEPTH

    @staticmethod
    def _shape(row: JobRow, job: LiveJob) -> Hashable:
        """Jobs of one shape find a place, or none, together."""
        return (tuple(row.models), job.reserved, row.options.get("max_slowdown"))

    def _behind(self, end: End, stopper: str) -> Held:
        if end is End.DEPTH:
            sentence = (
                f"{self._standings.queue.turns.depth} jobs that go first were looked at, and a "
                f"pass looks at no more"
            )
        elif end is End.GUARD:
            sentence = f"job {stopper} has waited so long that nobody goes before it"
        else:
            sentence = f"job {stopper} goes first, and finds no place yet"
        return Held(kind=HeldKind.PRIORITY, sentence=sentence)

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
            say(log, "ended_while_claimed", job=job.id)
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
            say(log, "ended_while_claimed", job=row.id)

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
            if new or told is None or at_us - told[1] >= WRITE_US:
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
