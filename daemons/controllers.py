"""Follows the users' own Slurm jobs: starts, ends, requeues, early releases, plain submissions."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import BadInput, SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.service_submission import Wish
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.native import read_mark
from plexrl_slurm.slurm.port import ENDED, ClusterPort, JobStatus, SlurmState

log = logging.getLogger(__name__)

#: Between two questions about jobs that Slurm's usual answer does not have.
ASK_AGAIN_US = 10_000_000

_ENDS: Mapping[SlurmState, JobState] = {
    SlurmState.COMPLETED: JobState.COMPLETED,
    SlurmState.FAILED: JobState.FAILED,
    SlurmState.CANCELLED: JobState.CANCELLED,
    SlurmState.TIMEOUT: JobState.TIMEOUT,
}
#: Slurm's words for bad ends that are not the script's fault.
_WORDS: Mapping[str, str] = {
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "it used more memory than it had asked for",
    "PREEMPTED": "Slurm preempted it",
    "BOOT_FAIL": "its node did not boot",
    "DEADLINE": "it could not end before its deadline",
    "REVOKED": "another cluster ran it",
}


class Controllers:
    """Part of intake."""

    def __init__(self, parts: Parts, service: PartitionService) -> None:
        self._parts, self._service = parts, service
        self._asked_us = 0
        #: Marked jobs whose mark cannot be read, or that cannot be adopted.
        self._refused: set[SlurmId] = set()

    async def watch(self) -> None:
        """Take in what Slurm said last."""
        parts = self._parts
        for job in [job for job in parts.state.jobs.values() if job.unfit]:
            await self.give_up(job, job.unfit)
        live = {job.slurm_id: job for job in parts.state.jobs.values()}
        rows = await parts.store.run(_bound, parts.settings.partition)
        bound = {SlurmId(row.slurm_id): row for row in rows if row.slurm_id is not None}
        found = await self._statuses([*live, *bound])
        for slurm_id, status in found.items():
            if (known := live.get(slurm_id)) is not None:
                await self._follow(known, status)
            else:
                await self._follow_waiting(bound[slurm_id], slurm_id, status)
        if parts.settings.slurm is not None and not parts.state.draining:
            await self._adopt({*live, *bound})

    async def give_up(self, job: LiveJob, reason: str) -> None:
        """A job that can never go on."""
        await self._service.cancel_in_slurm(job.slurm_id)
        await self._service.end_job(job.id, state=JobState.FAILED, reason=reason, exit_code=None)

    async def _statuses(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """The last answer; what it lacks is asked for, but not often."""
        known = self._parts.watch.jobs
        found = {job: known[job] for job in jobs if job in known}
        missing = [job for job in jobs if job not in known]
        now = self._service.now_us()
        if missing and now - self._asked_us > ASK_AGAIN_US and not self._parts.watch.trouble:
            self._asked_us = now
            try:
                found |= await asyncio.to_thread(self._parts.port.states, missing)
            except (SlurmUnavailable, SlurmRejected) as problem:
                say(log, "slurm_does_not_answer", reason=problem)
        return found

    # -- admitted jobs -----------------------------------------------------------------------
    async def _follow(self, job: LiveJob, status: JobStatus) -> None:
        if status.state in ENDED:
            await self._service.end_job(
                job.id,
                state=_ENDS[status.state],
                reason=_reason(status),
                exit_code=status.exit_code,
            )
        elif status.state is SlurmState.RUNNING:
            if status.restarts > job.restarts and job.running:
                self._requeued(job, status)
            job.restarts = max(job.restarts, status.restarts)
            await self._start(job)
        elif status.state is SlurmState.PENDING and job.running and not job.ended:
            self._requeued(job, status)

    async def _start(self, job: LiveJob) -> None:
        if job.running or job.ended:
            return  # the second: it was cancelled while Slurm was asked
        if not job.started:
            await self._parts.store.run(
                queue.start, job.id, owner=str(self._parts.epoch), now_us=self._service.now_us()
            )
        job.running = job.started = True

    def _requeued(self, job: LiveJob, status: JobStatus) -> None:
        """Slurm runs the controller again: a new process, which comes with new sessions."""
        job.running, job.restarts = False, max(job.restarts + 1, status.restarts)
        say(log, "controller_requeued", job=job.id, slurm_id=job.slurm_id, reason=status.reason)
        for session in list(self._parts.state.sessions.values()):
            if session.job == job.id:
                self._service.end_session(session, reason="Slurm requeued its controller")
        text = "Slurm runs its controller again; load_state brings back what was saved"
        self._parts.writer.add(_note, job.id, "requeued", text, self._service.now_us(), lazy=True)

    # -- jobs that are not admitted yet ------------------------------------------------------
    async def _follow_waiting(self, row: JobRow, slurm_id: SlurmId, status: JobStatus) -> None:
        job_id = JobId(row.id)
        if status.state in ENDED:
            cancelled = status.state is SlurmState.CANCELLED
            reason = "its Slurm job ended before it was admitted: never release it yourself"
            await self._service.end_job(
                job_id,
                state=JobState.CANCELLED if cancelled else JobState.FAILED,
                reason=_reason(status) if cancelled else reason,
                exit_code=status.exit_code,
            )
        elif self._parts.settings.slurm is None:
            return
        elif status.state is SlurmState.PENDING and not status.held:
            try:
                await asyncio.to_thread(self._cluster().hold, slurm_id)
            except (SlurmUnavailable, SlurmRejected) as problem:
                say(log, "slurm_refused_to_hold", slurm_id=slurm_id, reason=problem)
            else:
                say(log, "held_again", slurm_id=slurm_id)
                text = "it was released before its turn, and is held again"
                await self._parts.store.run(_note, job_id, "held", text, self._service.now_us())
        elif status.state is SlurmState.RUNNING and not row.reason.startswith("it runs already"):
            text = "it runs already, because its owner released it: its calls wait for its turn"
            await self._parts.store.run(queue.explain_wait, job_id, reason=text)

    async def _adopt(self, known: set[SlurmId]) -> None:
        """Jobs that ``job_submit.lua`` has marked for this partition."""
        for slurm_id, status in self._parts.watch.jobs.items():
            if not status.admin_comment or slurm_id in known or slurm_id in self._refused:
                continue
            if status.state not in (SlurmState.PENDING, SlurmState.RUNNING):
                continue
            try:
                mark = read_mark(status.admin_comment)
            except BadInput as problem:
                say(log, "mark_refused", slurm_id=slurm_id, reason=problem)
                self._refused.add(slurm_id)
                continue
            if mark is None or mark.partition != self._parts.settings.partition:
                continue
            if status.uid is None:
                continue
            options = {} if mark.max_slowdown is None else {"max_slowdown": str(mark.max_slowdown)}
            wish = Wish(
                name=status.name,
                uid=status.uid,
                user=status.user,
                account=status.account,
                script=status.name,
                models=mark.models,
                priority=mark.priority or 1,
                seed=mark.seed or 0,
                options=options,
            )
            await self._service.adopt(slurm_id, status, wish)
            say(log, "adopted", slurm_id=slurm_id, user=status.user)
            self._parts.wake_intake.set()

    def _cluster(self) -> ClusterPort:
        return self._parts.port  # type: ignore[return-value]


def _bound(session: Session, partition: str) -> list[JobRow]:
    """Jobs that wait in the queue with a Slurm job behind them: one may be cancelled there."""
    return queue.list_jobs(session, partition=partition, states=[JobState.PENDING], ended=False)


def _note(session: Session, job: JobId, kind: str, text: str, now_us: int) -> None:
    queue.note(session, job, at_us=now_us, kind=kind, text=text)


def _reason(status: JobStatus) -> str:
    if status.state is SlurmState.COMPLETED:
        return ""
    if status.word in _WORDS:
        return _WORDS[status.word]
    if status.state is SlurmState.FAILED:
        return f"its script ended with exit code {status.exit_code}"
    return "its time limit passed" if status.state is SlurmState.TIMEOUT else "cancelled"
