"""Job control: what ``plexrl sbatch``, ``squeue``, ``scancel``, ``sinfo``, ``explain`` ask for."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plexrl_slurm import __version__
from plexrl_slurm.api.service import Outcome, Pending, Principal
from plexrl_slurm.core.errors import BadInput, Denied, NotFound, SlurmRejected
from plexrl_slurm.core.ids import CallId, JobId, SlurmId, WpgId
from plexrl_slurm.core.limits import NORMAL
from plexrl_slurm.core.messages import FunctionKind
from plexrl_slurm.core.obstacles import WORDS, Obstacle, ObstacleKind
from plexrl_slurm.core.states import ENDED, JobState
from plexrl_slurm.daemons.entries import Entry
from plexrl_slurm.daemons.job_views import call_kinds, job_views
from plexrl_slurm.daemons.service_queue import QueueCalls
from plexrl_slurm.daemons.service_submission import hashed
from plexrl_slurm.daemons.state import LiveJob, LiveSession, Wait
from plexrl_slurm.daemons.tail_views import tail_views
from plexrl_slurm.daemons.wpg_views import wpg_views
from plexrl_slurm.db import calls, deployments, holds, ledger, queue
from plexrl_slurm.db.models import CallRow, CallState, JobRow, SessionRow
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)


class PartitionService(QueueCalls):
    """The whole service."""

    # -- who ---------------------------------------------------------------------------------
    async def principal_of_token(self, token: str) -> Principal | None:
        job = self.state.jobs.get(self.state.tokens.get(hashed(token), JobId(-1)))
        if job is None:
            job = await self.waiting_job(token)
        if job is None:
            return None
        return Principal(uid=job.uid, user=job.user, job=job.id)

    # -- sessions ----------------------------------------------------------------------------
    async def open_session(
        self, who: Principal, *, idempotency_key: str, metadata: Mapping[str, Any]
    ) -> str:
        job = self.job_of(who)
        job.sessions += 1
        row = await self.store.run(
            _open_session,
            job.id,
            job.sessions,
            idempotency_key=idempotency_key,
            metadata=metadata,
            now_us=self.now_us(),
        )
        if job.ended:
            raise NotFound("running job", job.slurm_id)
        if row.id not in self.state.sessions:
            self.state.sessions[row.id] = LiveSession(
                id=row.id, job=job.id, heartbeat_us=self.now_us(), opened_us=row.created_us
            )
        return row.id

    async def heartbeat(self, who: Principal, session_id: str) -> bool:
        session = self.session_of(who, session_id)
        session.heartbeat_us = self.now_us()
        return not session.finished

    async def finish_session(self, who: Principal, session_id: str, *, reason: str) -> None:
        self.end_session(self.session_of(who, session_id), reason=reason)

    def end_session(self, session: LiveSession, *, reason: str) -> None:
        """No new call in it; what it had goes. The first reason wins."""
        if session.finished:
            return
        session.finished = True
        self.writer.add(_finish_session, session.id, reason, self.now_us())
        for sampler in list(self.state.samplers.values()):
            if sampler.session == session.id:
                self.close_sampler(sampler)
        for live in list(self.state.deployments.values()):
            if live.session == session.id:
                self.drop_deployment(live)

    # -- futures -----------------------------------------------------------------------------
    async def outcome(self, who: Principal, request_id: str, *, wait_s: float) -> Outcome:
        call_id = CallId(request_id)
        entry = self.shell.entries.get(call_id)
        lost = self.lost_samples.get(call_id)
        if entry is None and lost is not None and lost[0].job == who.job:
            del self.lost_samples[call_id]
            self.begin_sample(*lost)
            entry = self.shell.entries.get(call_id)
        if entry is None:
            return await self._ended_before(who, call_id)
        if entry.call.job != who.job:
            raise NotFound("request", request_id)
        if not entry.ended.is_set() and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await entry.ended.wait()
            except TimeoutError:
                pass
        if not entry.ended.is_set():
            return self._pending(entry)
        entry.fetched_us = self.now_us()
        outcome: Outcome = entry.outcome
        return outcome

    def _pending(self, entry: Entry) -> Pending:
        if self.writer.trouble:
            return Pending(queue_state="paused_capacity", reason=self.writer.trouble)
        return Pending(queue_state="active", reason=self.why_call_waits(entry.call.id))

    def why_call_waits(self, call: CallId) -> str:
        """One sentence; "" if it runs."""
        return self.shell.why_waits(call, self.asker())

    async def _ended_before(self, who: Principal, call_id: CallId) -> Outcome:
        """A training call that ended so long ago that only the database knows it."""
        row = await self.store.run(calls.get_call, call_id)
        if row is None or row.job_id != who.job:
            raise NotFound("request", call_id)
        entry = self.entry_of_row(row)
        result = self.spool.read_result(call_id)
        if row.state is CallState.WAITING or result is None or entry.translate is None:
            raise NotFound("result of request", call_id)
        return entry.translate(self.shell.decode(result))  # type: ignore[no-any-return]

    def entry_of_row(self, row: CallRow) -> Entry:
        """A training call, back from the database."""
        call = call_kinds(row)
        live = self.state.deployments.get(call.deployment)
        translate = self.translator(live, call) if live is not None else None
        publish = ""
        if call.kind is FunctionKind.PUBLISH:
            publish = f"{call.id.rpartition('.')[0]}.v{call.seq}"
        return Entry(call=call, publish=publish, translate=translate)

    async def cancel(self, who: Principal, request_id: str) -> None:
        entry = self.shell.entries.get(CallId(request_id))
        if entry is not None and entry.call.job == who.job:
            self.shell.cancel(entry.call.id)

    # -- jobs --------------------------------------------------------------------------------
    async def cancel_job(
        self, who: Principal, job_id: JobId, *, reason: str, keep_slurm_job: bool = False
    ) -> dict[str, Any]:
        row = await self.owned(who, job_id)
        if row.state in ENDED:
            return {"job_id": job_id, "state": str(row.state)}
        if row.slurm_id is not None and not keep_slurm_job:
            await self.cancel_in_slurm(SlurmId(row.slurm_id))
        why = reason or f"cancelled by {who.user}"
        await self.end_job(job_id, state=JobState.CANCELLED, reason=why, exit_code=None)
        return {"job_id": job_id, "state": str(JobState.CANCELLED)}

    async def cancel_in_slurm(self, slurm_id: SlurmId) -> None:
        """End the Slurm job, if there is one; what Slurm refuses is in the log."""
        try:
            await asyncio.to_thread(self.port.cancel, slurm_id)
        except SlurmRejected as problem:
            say(log, "slurm_refused_to_cancel", slurm_id=slurm_id, reason=problem)
        else:
            self._parts.watch.cancelled.setdefault(slurm_id, self.now_us())

    async def end_job(
        self, job_id: JobId, *, state: JobState, reason: str, exit_code: int | None
    ) -> None:
        """A job is over: everything of it goes except its bill and its checkpoints.

        If it fails, the database being away, the job stays and is ended by intake's next look.
        """

        async def end() -> None:
            await self._end_job(job_id, state=state, reason=reason, exit_code=exit_code)

        await self.once(f"end of job {job_id}", end)

    async def _end_job(
        self, job_id: JobId, *, state: JobState, reason: str, exit_code: int | None
    ) -> None:
        live = self.state.jobs.get(job_id)
        self.state.obstacles.pop(job_id, None)
        if live is not None:
            live.ended = True
            if self._parts.habits is not None:
                well = state is JobState.COMPLETED
                self._parts.habits.ended(live, well=well, at_us=self.now_us())
            self._drop_all(live)
        await self.store.run(
            queue.finish,
            job_id,
            state=state,
            reason=reason,
            exit_code=exit_code,
            now_us=self.now_us(),
        )
        if live is not None:
            self._drop_all(live)  # what was being accepted when it ended
            self.state.remember(live)
            self.state.jobs.pop(job_id, None)
        self.shell.tick(flush=True)
        await self.writer.drain()
        await self.store.run(queue.close_bill, job_id)

    def _drop_all(self, job: LiveJob) -> None:
        # A daemon that was killed may have ended a session and not what belongs to it.
        for sampler in [s for s in self.state.samplers.values() if s.job == job.id]:
            self.close_sampler(sampler)
        for deployment in [d for d in self.state.deployments.values() if d.job == job.id]:
            self.drop_deployment(deployment)
        for session in [s for s in self.state.sessions.values() if s.job == job.id]:
            self.end_session(session, reason="the job ended")
            del self.state.sessions[session.id]
        for snapshot in [s for s in self.state.snapshots.values() if s.job == job.id]:
            self.drop_snapshot(snapshot)
        for deployment in [d for d in self.state.deployments.values() if d.job == job.id]:
            del self.state.deployments[deployment.id]
        for sampler in [s for s in self.state.samplers.values() if s.job == job.id]:
            del self.state.samplers[sampler.id]
        for call in [c for c, e in self.shell.entries.items() if e.call.job == job.id]:
            self.shell.discard(call)
        for token in [t for t, owner in self.state.tokens.items() if owner == job.id]:
            del self.state.tokens[token]

    async def jobs(
        self, who: Principal, *, user: str | None, states: Sequence[str], ended: bool
    ) -> list[dict[str, Any]]:
        wanted = _states(states)
        rows = await self.store.read(
            job_views,
            partition=self.settings.partition,
            user=user,
            states=wanted,
            ended=ended,
            now_us=self.now_us(),
        )
        tails = tail_views(self.shell.core.views(), self.asker())
        for row in rows:
            live = self.state.jobs.get(JobId(row["job_id"]))
            row["wpgs"] = sorted(live.homes.values()) if live is not None else []
            row["beside"] = tails.get(JobId(row["job_id"]), [])
            self._say_more(row)
        return rows

    def _say_more(self, row: dict[str, Any]) -> None:
        """What only the living daemon knows of a job's row."""
        row["max_slowdown"] = row["max_slowdown"] or self.settings.sharing.max_slowdown
        if row["state"] != JobState.PENDING:
            return
        if self.state.draining:
            row["reason_word"] = WORDS[ObstacleKind.DRAINING]
        elif found := self.state.obstacles.get(JobId(row["job_id"])):
            row["reason_word"] = found[0].word

    def _habits(self, job_id: JobId) -> dict[str, Any] | None:
        book, live = self._parts.habits, self.state.jobs.get(job_id)
        return None if book is None or live is None else book.view(live)

    def _obstacle(self, each: Wait, now_us: int) -> dict[str, Any]:
        job = each.job if isinstance(each, Obstacle) else None
        number = None if job is None else self.state.number(job)
        return each.view(now_us) | {"slurm_id": number}

    async def explain_job(self, who: Principal, job_id: JobId) -> dict[str, Any]:
        row = await self.owned(who, job_id)
        views = await self.store.read(
            job_views,
            partition=self.settings.partition,
            user=None,
            states=(),
            ended=True,
            now_us=self.now_us(),
            job_id=job_id,
        )
        story = await self.store.read(queue.story, job_id)
        waiting = [
            sentence
            for entry in self.shell.entries.values()
            if entry.call.job == job_id and not entry.ended.is_set()
            if (sentence := self.why_call_waits(entry.call.id))
        ]
        sentences = list(
            dict.fromkeys([*self.why_not_admitted(row), *await self.standing(row), *waiting])
        ) or [_how(row)]
        for view in views:
            self._say_more(view)
        now_us = self.now_us()
        return {
            "job": views[0] if views else {},
            "obstacles": [
                self._obstacle(each, now_us) for each in self.state.obstacles.get(job_id, ())
            ],
            "habits": self._habits(job_id),
            "sentences": sentences[:20],
            "story": [
                {"at_us": line.at_us, "kind": line.kind, "text": line.text} for line in story
            ],
            "deployments": [
                {
                    "id": live.id,
                    "model": live.model,
                    "wpg": live.wpg,
                    "calls": len(live.calls),
                    "images": self.image_story(live.id),
                }
                for live in self.state.deployments.values()
                if live.job == job_id
            ],
        }

    async def nodes(self, who: Principal) -> dict[str, Any]:
        hub, keeper = self._parts.hub, self._parts.holds
        wpgs = [view | self._agent_side(view["id"]) for view in wpg_views(self.shell, self.asker())]
        held = keeper.views() if keeper is not None else []
        used = await asyncio.to_thread(_bytes_below, self.settings.host_dir)
        return {
            "partition": self.settings.partition,
            "epoch": self._parts.epoch,
            "version": __version__,
            "draining": self.state.draining,
            "holds": held,
            "excluded_nodes": keeper.excluded() if keeper is not None else [],
            "trouble": [
                sentence
                for sentence in (
                    self._parts.watch.trouble,
                    keeper.trouble if keeper is not None else "",
                    self.state.trouble,
                    self.writer.trouble,
                    *(f"{node}: {stock.trouble}" for node, stock in self.tier_troubles()),
                    *(str(hold["trouble"]) for hold in held),
                    *(sentence for wpg in wpgs for sentence in wpg["trouble"]),
                )
                if sentence
            ],
            "agents": [
                {
                    "name": agent.name,
                    "node": agent.place.node,
                    "pid": agent.pid,
                    "heard_us": agent.heard_us,
                }
                for agent in (hub.agents.values() if hub is not None else ())
                if not agent.refused
            ],
            "wpgs": wpgs,
            "models": [
                {
                    "name": model.name,
                    "parameters": model.parameters,
                    "dtype": model.dtype,
                    "max_context_length": model.max_context_length,
                }
                for model in self.models.values()
            ],
            "qos": sorted({NORMAL, *self.standings.queue.limits.qos}),
            "host_bytes": {"used": used, "limit": self.settings.host_bytes},
        }

    def _agent_side(self, wpg: str) -> dict[str, Any]:
        hub = self._parts.hub
        view = hub.wpgs.get(wpg) if hub is not None else None
        if view is None:
            return {"state": "starting", "pids": [], "reason": "no agent has said hello yet"}
        facts: dict[str, Any] = {
            "pids": view.pids,
            "reason": view.reason,
            "node": view.node,
            "hold": self.books.holds.get(WpgId(wpg), ""),
        }
        return facts if view.state == "up" else facts | {"state": view.state}

    async def timeline(
        self, who: Principal, *, since_us: int, until_us: int
    ) -> list[dict[str, Any]]:
        self.shell.tick(flush=True)
        await self.writer.drain()
        rows = await self.store.read(
            ledger.between,
            sorted(set(self.books.holds.values())),
            since_us=since_us,
            until_us=until_us,
        )
        jobs = sorted({row.job_id for row in rows if row.job_id is not None})
        numbers = await self.store.read(queue.numbers, jobs)
        return [
            {
                "wpg": row.wpg,
                "activity": str(row.activity),
                "job_id": row.job_id,
                "slurm_id": None if row.job_id is None else numbers.get(row.job_id),
                "call_id": row.call_id,
                "kind": self._kind(row.call_id),
                "start_us": row.start_us,
                "stop_us": row.stop_us,
                "gpu_us": row.gpu_us,
            }
            for row in rows
        ]

    async def image_moves(
        self, who: Principal, *, since_us: int, until_us: int
    ) -> list[dict[str, Any]]:
        hub = self._parts.hub
        return hub.stories.between(since_us, until_us) if hub is not None else []

    def _kind(self, call_id: str | None) -> str:
        entry = self.shell.entries.get(CallId(call_id)) if call_id is not None else None
        return str(entry.call.kind) if entry is not None else ""

    async def drain(self, who: Principal, *, on: bool) -> dict[str, Any]:
        if not who.admin:
            raise Denied("only the service user or root may drain a partition")
        await self.store.run(holds.set_partition_draining, self.settings.partition, on=on)
        self.state.draining = on
        return {"draining": on}

    async def release(self, who: Principal) -> dict[str, Any]:
        """Give the hold back and end the daemon."""
        if not who.admin:
            raise Denied("only the service user or root may release the hold")
        self._parts.release.set()
        keeper = self._parts.holds
        return {"released": sorted(keeper.live) if keeper is not None else []}


def _bytes_below(folder: Path) -> int:
    """What the files take; some go while they are counted."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += (Path(path) / name).lstat().st_size
    return found


def _states(words: Sequence[str]) -> list[JobState]:
    try:
        return [JobState(word.lower()) for word in words]
    except ValueError as error:
        known = ", ".join(JobState)
        raise BadInput(f"unknown job state in {', '.join(words)}; known: {known}") from error


def _how(row: JobRow) -> str:
    if row.state in ENDED:
        return f"it is {row.state}: {row.reason or 'its controller ended'}"
    return row.reason or f"it is {row.state} and waits for nothing"


def _open_session(session: Any, /, job: JobId, number: int, **more: Any) -> SessionRow:
    name = f"{queue.called(session, job)}-{number}"
    return deployments.open_session(session, session_id=name, job_id=job, **more)


def _finish_session(session: Any, session_id: str, reason: str, now_us: int) -> None:
    deployments.finish_session(session, session_id, reason=reason, now_us=now_us)
