"""Follows the users' own Slurm jobs: starts, ends, requeues, early releases, plain submissions."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plexrl_slurm.core.errors import BadInput, SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.job_views import RELEASED, RESTARTS, USER_HOLD
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.service_submission import Wish
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import Session
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.native import read_mark
from plexrl_slurm.slurm.port import ENDED, ClusterPort, JobStatus, SlurmState

log = logging.getLogger(__name__)

#: Between two questions about jobs that Slurm's usual answer does not have.
ASK_AGAIN_US = 10_000_000
#: A cancelled job that Slurm calls alive so much later is cancelled again, for so long.
CANCEL_AGAIN_US = 10_000_000
CANCELLED_US = 3_600_000_000
#: Between two tries of a release that Slurm did not take.
RELEASE_AGAIN_US = 5_000_000

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
    "LAUNCH_FAILED": "Slurm could not launch it",
    "RECONFIG_FAIL": "its node could not be set up",
    "DEADLINE": "it could not end before its deadline",
    "REVOKED": "another cluster ran it",
}


@dataclass(slots=True)
class _Memory:
    """What was done about one Slurm job."""

    #: Answers that were asked for before do not show our last act.
    acted_us: int = 0
    #: When a release was tried last.
    tried_us: int = 0
    #: Since when Slurm's usual answer lacks it.
    missing_us: int = 0
    #: Last reason that was written in its row.
    said: str = ""
    #: Its story says that it runs before its turn.
    early: bool = False


class Controllers:
    """Part of intake."""

    def __init__(self, parts: Parts, service: PartitionService) -> None:
        self._parts, self._service = parts, service
        self._asked_us = 0
        self._again_us = 0
        self._memories: dict[SlurmId, _Memory] = {}
        #: Marked jobs that are nothing for us, or not any more.
        self._settled: set[SlurmId] = set()

    async def watch(self) -> None:
        """Take in what Slurm said last."""
        parts = self._parts
        for job in [job for job in parts.state.jobs.values() if job.unfit]:
            await self.give_up(job, job.unfit)
        live = {job.slurm_id: job for job in parts.state.jobs.values()}
        rows = await parts.store.run(_bound, parts.settings.partition)
        bound = {SlurmId(row.slurm_id): row for row in rows if row.slurm_id is not None}
        for gone in self._memories.keys() - live.keys() - bound.keys():
            del self._memories[gone]
        found = await self._statuses([*live, *bound])
        for slurm_id, status in found.items():
            if (known := live.get(slurm_id)) is not None:
                await self._follow(known, status)
            else:
                await self._follow_waiting(bound[slurm_id], slurm_id, status)
        if parts.settings.slurm is not None:
            await self._adopt({*live, *bound})
            await self._cancel_again()

    async def give_up(self, job: LiveJob, reason: str) -> None:
        """A job that can never go on."""
        await self._service.cancel_in_slurm(job.slurm_id)
        await self._service.end_job(job.id, state=JobState.FAILED, reason=reason, exit_code=None)

    async def release(self, job: LiveJob) -> None:
        """Let an admitted job start; what Slurm does not take now is tried again later."""
        memory, status = self._memory(job.slurm_id), self._parts.watch.jobs.get(job.slurm_id)
        if job.user_held or job.released:
            return  # its owner lets it go
        memory.tried_us = self._service.now_us()
        if status is None or status.state is not SlurmState.RUNNING:
            try:
                await asyncio.to_thread(self._parts.port.release, job.slurm_id)
            except SlurmUnavailable as problem:
                say(log, "slurm_does_not_answer", reason=problem)
                return
            except SlurmRejected as problem:
                await self._not_released(job, problem)
                return
        memory.acted_us = self._service.now_us()
        await self._released(job)

    async def _released(self, job: LiveJob) -> None:
        await self._parts.store.run(queue.set_option, job.id, RELEASED, "yes")
        job.released = True

    async def _not_released(self, job: LiveJob, problem: SlurmRejected) -> None:
        say(log, "slurm_refused_to_release", slurm_id=job.slurm_id, reason=problem)
        if self._parts.settings.slurm is None:
            await self._service.end_job(
                job.id, state=JobState.FAILED, reason=str(problem), exit_code=None
            )
        else:
            await self._say(job.id, job.slurm_id, f"Slurm does not release it: {problem}")

    def _memory(self, slurm_id: SlurmId) -> _Memory:
        return self._memories.setdefault(slurm_id, _Memory())

    def _is_news(self, slurm_id: SlurmId) -> bool:
        """Whether Slurm's last answer knows of what was done last."""
        return self._parts.watch.at_us > self._memory(slurm_id).acted_us

    async def _statuses(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        """The last answer; what newer ones lack is asked for, but not often."""
        watch, now = self._parts.watch, self._service.now_us()
        found: dict[SlurmId, JobStatus] = {}
        missing: list[SlurmId] = []
        for job in jobs:
            memory = self._memory(job)
            if (status := watch.jobs.get(job)) is not None:
                found[job], memory.missing_us = status, 0
            elif memory.missing_us == 0:
                memory.missing_us = now  # it may be younger than the answer
            elif watch.at_us > memory.missing_us:
                missing.append(job)
        if missing and now - self._asked_us > ASK_AGAIN_US and not watch.trouble:
            self._asked_us = now
            try:
                found |= await asyncio.to_thread(self._parts.port.states, missing)
            except (SlurmUnavailable, SlurmRejected) as problem:
                say(log, "slurm_does_not_answer", reason=problem)
        return found

    async def _cancel_again(self) -> None:
        """A slurmctld that was killed has forgotten its last seconds: what was cancelled in them
        lives again, and nobody's turn would ever come to release or end it."""
        watch, now = self._parts.watch, self._service.now_us()
        if watch.at_us - self._again_us < CANCEL_AGAIN_US:
            return
        for slurm_id, at_us in list(watch.cancelled.items()):
            status = watch.jobs.get(slurm_id)
            if now - at_us > CANCELLED_US:
                del watch.cancelled[slurm_id]
            elif watch.at_us - at_us < CANCEL_AGAIN_US or status is None:
                continue
            elif status.state in (SlurmState.PENDING, SlurmState.RUNNING):
                self._again_us = watch.at_us
                say(log, "cancelled_again", slurm_id=slurm_id)
                with contextlib.suppress(SlurmUnavailable):
                    await self._service.cancel_in_slurm(slurm_id)

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
                await self._requeued(job, status)
            job.restarts = max(job.restarts, status.restarts)
            job.limit_end_us = status.end_us
            await self._start(job)
        elif status.state is SlurmState.PENDING and not job.ended:
            if job.running:
                await self._requeued(job, status)
            await self._pending(job, status)

    async def _start(self, job: LiveJob) -> None:
        if job.running or job.ended:
            return  # the second: it was cancelled while Slurm was asked
        if not job.started:
            await self._parts.store.run(
                queue.start, job.id, owner=str(self._parts.epoch), now_us=self._service.now_us()
            )
        elif self._memory(job.slurm_id).said:
            await self._say(job.id, job.slurm_id, "")
        job.running = job.started = True
        job.started_us = job.started_us or self._service.now_us()

    async def _pending(self, job: LiveJob, status: JobStatus) -> None:
        """It has a place, and Slurm does not run it yet."""
        if not self._is_news(job.slurm_id):
            return
        number = job.slurm_id
        if job.user_held and not status.held:
            job.user_held = False  # its owner has let it go
            await self._released(job)
        elif not job.released and not job.user_held:
            if self._service.now_us() - self._memory(number).tried_us > RELEASE_AGAIN_US:
                await self.release(job)
            return
        if not status.held:
            waits = f" ({status.reason})" if status.reason else ""
            await self._say(job.id, number, f"it has a place, and waits for a node of Slurm{waits}")
        elif status.reason == "JobHeldAdmin":
            await self._say(
                job.id, number, "an administrator holds it in Slurm: ask for its release"
            )
        else:
            await self._say(
                job.id, number, f"its owner holds it in Slurm: scontrol release {number}"
            )

    async def _requeued(self, job: LiveJob, status: JobStatus) -> None:
        """Slurm runs the controller again: a new process, which comes with new sessions."""
        since_us = self._parts.watch.at_us
        if status.state is SlurmState.RUNNING and status.start_us is not None:
            since_us = status.start_us
        restarts = max(job.restarts + 1, status.restarts)
        say(log, "controller_requeued", job=job.slurm_id, reason=status.reason)
        for session in list(self._parts.state.sessions.values()):
            if session.job == job.id and session.opened_us < since_us:
                self._service.end_session(session, reason="Slurm requeued its controller")
        await self._parts.store.run(_note_requeue, job.id, restarts, self._service.now_us())
        job.running, job.restarts = False, restarts

    # -- jobs that are not admitted yet ------------------------------------------------------
    async def _follow_waiting(self, row: JobRow, slurm_id: SlurmId, status: JobStatus) -> None:
        job_id, memory = JobId(row.id), self._memory(slurm_id)
        if status.state in ENDED:
            cancelled = status.state is SlurmState.CANCELLED
            how = _reason(status) or "its script ended"
            await self._service.end_job(
                job_id,
                state=JobState.CANCELLED if cancelled else JobState.FAILED,
                reason=how if cancelled else f"its Slurm job ended before it was admitted: {how}",
                exit_code=status.exit_code,
            )
        elif self._parts.settings.slurm is None:
            return
        elif status.state is SlurmState.PENDING and not status.held:
            if self._is_news(slurm_id):
                await self._hold_again(job_id, slurm_id)
        elif status.state is SlurmState.RUNNING and not memory.early:
            memory.early = True
            text = "it runs already, before its turn: its calls wait"
            await self._parts.store.run(_note, job_id, "early", text, self._service.now_us())

    async def _hold_again(self, job_id: JobId, slurm_id: SlurmId) -> None:
        """Its owner let it go before its turn. It is ours to release then, even if it was held
        by its owner before."""
        await self._parts.store.run(queue.set_option, job_id, USER_HOLD, None)
        try:
            await asyncio.to_thread(self._cluster().hold, slurm_id)
        except (SlurmUnavailable, SlurmRejected) as problem:
            say(log, "slurm_refused_to_hold", slurm_id=slurm_id, reason=problem)
        else:
            say(log, "held_again", slurm_id=slurm_id)
            text = "it was released before its turn, and is held again"
            await self._parts.store.run(_note, job_id, "held", text, self._service.now_us())
        self._memory(slurm_id).acted_us = self._service.now_us()

    async def _say(self, job_id: JobId, slurm_id: SlurmId, reason: str) -> None:
        memory = self._memory(slurm_id)
        if memory.said != reason:
            await self._parts.store.run(queue.explain_wait, job_id, reason=reason)
            memory.said = reason

    async def _adopt(self, known: set[SlurmId]) -> None:
        """Jobs that ``job_submit.lua`` has marked for this partition."""
        jobs = self._parts.watch.jobs
        self._settled &= jobs.keys()
        for slurm_id, status in jobs.items():
            if not status.admin_comment or slurm_id in known or slurm_id in self._settled:
                continue
            if status.state not in (SlurmState.PENDING, SlurmState.RUNNING) or status.uid is None:
                continue
            try:
                mark = read_mark(status.admin_comment)
            except BadInput as problem:
                say(log, "mark_refused", slurm_id=slurm_id, reason=problem)
                self._settled.add(slurm_id)
                continue
            if mark is None or mark.partition != self._parts.settings.partition:
                continue
            given = {"max_slowdown": mark.max_slowdown, "qos": mark.qos}
            options = {name: str(said) for name, said in given.items() if said is not None}
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
            if await self._service.adopt(slurm_id, status, wish):
                say(log, "adopted", slurm_id=slurm_id, user=status.user)
                self._parts.wake_intake.set()
            else:
                self._settled.add(slurm_id)

    def _cluster(self) -> ClusterPort:
        return self._parts.port  # type: ignore[return-value]


def _bound(session: Session, partition: str) -> list[JobRow]:
    """Jobs that wait in the queue with a Slurm job behind them: one may be cancelled there."""
    return queue.list_jobs(session, partition=partition, states=[JobState.PENDING], ended=False)


def _note(session: Session, job: JobId, kind: str, text: str, now_us: int) -> None:
    queue.note(session, job, at_us=now_us, kind=kind, text=text)


def _note_requeue(session: Session, job: JobId, restarts: int, now_us: int) -> None:
    queue.set_option(session, job, RESTARTS, str(restarts))
    text = "Slurm runs its controller again; load_state brings back what was saved"
    _note(session, job, "requeued", text, now_us)


def _reason(status: JobStatus) -> str:
    if status.state is SlurmState.COMPLETED:
        return ""
    if status.word in _WORDS:
        return _WORDS[status.word]
    if status.state is SlurmState.FAILED:
        return f"its script ended with exit code {status.exit_code}"
    return "its time limit passed" if status.state is SlurmState.TIMEOUT else "cancelled"
