"""Lets jobs in and sees them out: claims queue rows, releases Slurm jobs, notices their ends."""

import asyncio
import logging

from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.daemons.controllers import Controllers
from plexrl_slurm.daemons.recovery import LEASE_US
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.state import LiveJob, LiveSession
from plexrl_slurm.daemons.turns import Turns
from plexrl_slurm.db import queue
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: Between two looks at Slurm.
LOOK_S = 0.5
#: Between two collections of abandoned things.
COLLECT_S = 5.0
#: `plexrl sbatch` binds its row at once; one that has not after so long was killed.
UNBOUND_US = 120_000_000
#: An answer that was fetched stays for a client that asks again for so long.
FETCHED_US = 600_000_000
#: One that nobody has ever fetched stays for so long.
UNFETCHED_US = 3_600_000_000


class Intake:
    """Two loops of the daemon."""

    def __init__(self, parts: Parts, service: PartitionService) -> None:
        self._parts, self._service = parts, service
        self._controllers = Controllers(parts, service)
        self._turns = Turns(
            parts, service.standings, admit=self._admit, give_up=self._controllers.give_up
        )

    async def run(self) -> None:
        """Claim and watch for ever."""
        while True:
            self._parts.wake_intake.clear()
            try:
                if not self._parts.state.draining:
                    await self._claim()
                await self._controllers.watch()
                self._parts.state.trouble = ""
            except PlexError as problem:
                if not problem.retryable:
                    raise
                self._parts.state.trouble = f"no job is admitted or ended now: {problem}"
                say(log, "intake_waits", reason=problem)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._parts.wake_intake.wait()
            except TimeoutError:
                pass

    async def collect(self) -> None:
        """Extend leases; end sessions nobody beats for; drop what nobody needs."""
        while True:
            await asyncio.sleep(COLLECT_S)
            now = self._service.now_us()
            state = self._parts.state
            silent = now - self._parts.settings.session_timeout_us
            for session in list(state.sessions.values()):
                if not session.finished and last_heard_us(session, now) < silent:
                    say(log, "session_abandoned", session=session.id)
                    self._service.end_session(session, reason="its client fell silent")
            self._service.collect_samplers()
            self._parts.shell.collect(
                fetched_before_us=now - FETCHED_US, ended_before_us=now - UNFETCHED_US
            )
            self._parts.shell.tick()
            try:
                await self._parts.store.run(
                    queue.extend_leases,
                    owner=str(self._parts.epoch),
                    lease_us=LEASE_US,
                    now_us=now,
                )
                await self._parts.store.run(
                    queue.drop_unbound,
                    partition=self._parts.settings.partition,
                    before_us=now - UNBOUND_US,
                    now_us=now,
                )
            except PlexError as problem:
                if not problem.retryable:
                    raise
                say(log, "lease_not_extended", reason=problem)

    async def _claim(self) -> None:
        await self._parts.store.run(
            queue.requeue_expired,
            partition=self._parts.settings.partition,
            now_us=self._service.now_us(),
        )
        await self._turns.look()

    async def _admit(self, row: JobRow, job: LiveJob) -> None:
        parts, job_id = self._parts, job.id
        parts.state.jobs[job_id] = job
        if row.token_sha256 is not None:
            parts.state.tokens[row.token_sha256] = job_id
        say(log, "job_admitted", job=job.slurm_id, homes=job.homes)
        await self._controllers.release(job)


def last_heard_us(session: LiveSession, now_us: int) -> int:
    """When its client was heard last; one of the future was heard just now, and no later: the
    clock was set back."""
    session.heartbeat_us = min(session.heartbeat_us, now_us)
    return session.heartbeat_us
