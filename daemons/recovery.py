"""Rebuilds what a daemon needs to know: from the database at its start, then, of each agent,
from the agent's first hello. Kill -9 and restart are a pause for everybody else.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import Call, FunctionKind, Pool
from plexrl_slurm.daemons import shared_tier
from plexrl_slurm.daemons.damaged_images import on_disk
from plexrl_slurm.daemons.job_views import live_job
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.service_training import training_deployment
from plexrl_slurm.daemons.shell import Entry
from plexrl_slurm.daemons.state import (
    LiveDeployment,
    LiveJob,
    LiveSession,
    LiveSnapshot,
    Sampler,
)
from plexrl_slurm.db import calls, deployments, holds, queue, snapshots, views
from plexrl_slurm.db.models import CallRow, CallState, DeploymentRow, SnapshotState
from plexrl_slurm.logs import say
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

#: How long a daemon may be silent before another may take its claims.
LEASE_US = 60_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One deployment and its calls, as the database has them."""

    row: DeploymentRow
    calls: list[CallRow]
    #: First seq that has not ended.
    applied: int


class Recovery:
    """One a daemon."""

    def __init__(self, parts: Parts, service: PartitionService) -> None:
        self._parts, self._service = parts, service
        self._found: dict[DeploymentId, _Found] = {}

    # -- from the database -------------------------------------------------------------------
    async def read(self) -> None:
        """Fill the state; nothing is told to the core yet."""
        parts, now = self._parts, self._service.now_us()
        parts.spool.mend_journals()
        parts.state.draining = await parts.store.run(
            holds.partition_draining, parts.settings.partition
        )
        rows = await parts.store.run(
            queue.adopt,
            partition=parts.settings.partition,
            owner=str(parts.epoch),
            lease_us=LEASE_US,
            now_us=now,
        )
        for row in rows:
            job = live_job(row, parts.settings.queue.qos_named(row.options))
            parts.state.jobs[job.id] = job
            parts.placer.restore(job, row.homes, row.models)
            if row.token_sha256 is not None:
                parts.state.tokens[row.token_sha256] = job.id
            await self._read_job(job)
        await asyncio.to_thread(
            shared_tier.sweep,
            parts.settings,
            deployments=list(parts.state.deployments),
            snapshots=list(parts.state.snapshots),
        )
        swept = parts.spool.sweep(
            calls={
                call for live in parts.state.deployments.values() for call in live.calls.values()
            },
            sessions=parts.state.samplers.keys(),
        )
        say(
            log,
            "recovered",
            jobs=len(rows),
            deployments=len(self._found),
            samplers=len(parts.state.samplers),
            swept=swept,
        )

    async def _read_job(self, job: LiveJob) -> None:
        state, store = self._parts.state, self._parts.store
        now = self._service.now_us()
        sessions = await store.run(views.sessions_of, job.id)
        job.sessions = max((int(row.id.rpartition("-")[2]) for row in sessions), default=0)
        for row in sessions:
            state.sessions[row.id] = LiveSession(
                id=row.id,
                job=job.id,
                # Clients could not be heard while no daemon was there.
                heartbeat_us=now,
                finished=row.finished_us is not None,
                opened_us=row.created_us,
            )
        # What a finished session had goes with it, though the daemon was killed in between.
        finished = {row.id for row in sessions if row.finished_us is not None}
        for found in await store.run(_deployments, job.id):
            if found.row.session_id not in finished and self._fits(job, found.row.base_model):
                self._remember(job, found)
        for snapshot in await store.run(snapshots.live_snapshots, job.id):
            if not self._fits(job, snapshot.base_model):
                continue
            job.homes.setdefault(Pool.ROLLOUT, WpgId(snapshot.wpg))
            state.snapshots[DeploymentId(snapshot.id)] = LiveSnapshot(
                id=DeploymentId(snapshot.id),
                job=job.id,
                model=snapshot.base_model,
                uri=snapshot.uri,
                path=snapshot.path,
                wpg=WpgId(snapshot.wpg),
                content=snapshot.content,
                bytes=snapshot.bytes,
                deployment=_maybe(snapshot.deployment_id),
                ready=snapshot.state is SnapshotState.READY,
            )
        for sampler in await store.run(snapshots.open_sampling_sessions, job_id=job.id):
            if sampler.session_id in finished:
                continue
            self._remember_sampler(
                Sampler(
                    id=sampler.id,
                    session=sampler.session_id,
                    job=job.id,
                    snapshot=DeploymentId(sampler.snapshot_id),
                    seed_name=_seed_name(sampler.id, sampler.seq),
                    last_used_us=now,
                )
            )

    def _fits(self, job: LiveJob, model: str) -> bool:
        """Whether the partition still has it; if not, intake ends the job."""
        if model not in self._parts.settings.models:
            job.unfit = f"model {model}, which it uses, is no longer in the partition's catalogue"
        return not job.unfit

    def _remember(self, job: LiveJob, found: _Found) -> None:
        row = found.row
        live = LiveDeployment(
            id=DeploymentId(row.id),
            job=job.id,
            session=row.session_id,
            model=row.base_model,
            rank=row.rank,
            wpg=WpgId(row.wpg),
            user_metadata=row.user_metadata,
            last_used_us=self._service.now_us(),
        )
        job.homes.setdefault(Pool.TRAIN, live.wpg)
        self._parts.state.deployments[live.id] = live
        self._found[live.id] = found
        if row.durable_seq is not None:
            self._parts.shell.durable[live.id] = Durable(
                progress=(row.durable_seq, row.durable_part or 0), path=row.durable_path
            )
        for call in found.calls:
            live.calls[call.seq] = CallId(call.id)
            if call.body_kept:
                self._parts.books.remember(live.id, call.seq, CallId(call.id))
            if call.ended_us is None or call.body_kept:
                entry = self._service.entry_of_row(call)
                self._mark_doomed(entry)
                self._parts.shell.entries[entry.call.id] = entry
                if call.ended_us is not None:
                    self._resolve(entry)

    def _mark_doomed(self, entry: Entry) -> None:
        """Whether a call was accepted only to fail stands in its body."""
        body = self._parts.spool.read_body(entry.call.id)
        if body is not None and isinstance(wire.decode_body(body), wire.Doomed):
            entry.call = _doomed(entry.call)

    def _resolve(self, entry: Entry) -> None:
        result = self._parts.spool.read_result(entry.call.id)
        if result is None:
            entry.resolve(wire.Failed("the result was not kept: the spool was full", "server"))
            return
        decoded = wire.decode_result(result)
        entry.resolve(entry.translate(decoded) if entry.translate else decoded)

    def _remember_sampler(self, sampler: Sampler) -> None:
        state = self._parts.state
        snapshot = state.snapshots.get(sampler.snapshot)
        if snapshot is None:
            return
        state.samplers[sampler.id] = sampler
        snapshot.samplers.add(sampler.id)
        for line in self._parts.spool.journalled_samples(sampler.id):
            sampler.calls[line.seq] = CallId(line.call)
            self._service.lost_samples[CallId(line.call)] = (sampler, line)

    # -- from an agent -----------------------------------------------------------------------
    async def hello(self, hello: tm.Hello, wpgs: Collection[WpgId]) -> tuple[list[str], list[str]]:
        """Tell the core of everything that lives on these WPGs of an agent; see ``AgentHub``."""
        state, shell = self._parts.state, self._parts.shell
        for held in hello.wpgs:
            for call, _ in held.running:
                self._running_again(CallId(call))
        for done in hello.finished:
            if done.what == "run":
                await self._late(done)
        images = {image.deployment: image.progress for image in hello.images}
        await self._look_at_durable(wpgs)
        for live in state.deployments.values():
            if live.dropped or live.wpg not in wpgs:
                continue
            image = _newest(images.get(live.id), shell.durable_progress(live.id))
            if live.id in shell.deployments:
                self._update_image(live, image)
            else:
                self._place(live, image)
        for snapshot in list(state.snapshots.values()):
            if snapshot.wpg in wpgs:
                self.place_snapshot(snapshot)
        return (
            [live.id for live in state.deployments.values() if not live.dropped],
            [snapshot.id for snapshot in state.snapshots.values() if not snapshot.dropped],
        )

    async def _look_at_durable(self, wpgs: Collection[WpgId]) -> None:
        """An agent may have set durable images aside whose report was lost."""
        shell = self._parts.shell
        living = self._parts.state.deployments.values()
        here = [live.id for live in living if live.wpg in wpgs and not live.dropped]
        known = [(name, shell.durable[name]) for name in here if name in shell.durable]
        for name, found in (await asyncio.to_thread(on_disk, known)).items():
            if found is not None:
                shell.durable[name] = found
            else:
                shell.durable.pop(name, None)

    def place_lost(self, wpg: WpgId) -> None:
        """Tell the core of what lives on a WPG that no agent will speak for: it is gone."""
        for live in self._parts.state.deployments.values():
            known = live.id in self._parts.shell.deployments
            if live.wpg == wpg and not live.dropped and not known:
                self.place_alone(live)
        for snapshot in list(self._parts.state.snapshots.values()):
            if snapshot.wpg == wpg:
                self.place_snapshot(snapshot)

    def place_alone(self, live: LiveDeployment) -> None:
        """Tell the core of a deployment of which only the durable tier has anything."""
        self._place(live, self._parts.shell.durable_progress(live.id))

    def place_snapshot(self, snapshot: LiveSnapshot) -> None:
        """Tell the core of a snapshot, unless it knows."""
        known = snapshot.id in self._parts.shell.deployments
        if snapshot.ready and not snapshot.dropped and not known:
            self._service.place_snapshot(snapshot)

    def _running_again(self, call: CallId) -> None:
        """A sample that the agent still works on: take it over instead of running it twice."""
        lost = self._service.lost_samples.pop(call, None)
        if lost is not None:
            self._service.begin_sample(*lost)

    async def _late(self, done: tm.Done) -> None:
        """A run that ended while no daemon was there; the core never hears of it."""
        shell, call = self._parts.shell, CallId(done.call)
        lost = self._service.lost_samples.pop(call, None)
        if lost is not None:
            sampler, line = lost
            if done.ok:
                entry = Entry(call=_sample_call(sampler, line.call, line.seq), sample=line.body)
                entry.resolve(wire.decode_result(done.result))
                shell.entries[call] = entry
            else:
                self._service.begin_sample(sampler, line)
            return
        entry_or_none = shell.entries.get(call)
        if entry_or_none is None or entry_or_none.ended.is_set():
            return
        entry = entry_or_none
        shell.keep_part(call, done.part, ok=done.ok, result=done.result, error=done.error)
        if not done.ok or done.part == entry.call.parts - 1:
            shell.finish_late(entry, ok=done.ok)
            found = self._found.get(entry.call.deployment)
            if found is not None:
                self._found[entry.call.deployment] = _Found(
                    row=found.row, calls=found.calls, applied=max(found.applied, entry.call.seq + 1)
                )

    def _place(self, live: LiveDeployment, image: tuple[int, int] | None) -> None:
        parts = self._parts
        found = self._found.get(live.id)
        job = parts.state.jobs[live.job]
        model = parts.settings.models[live.model]
        if found is None:
            # It came after this daemon's start and was placed then.
            return
        applied = (found.applied, self._parts_done(live, found.applied))
        entries = [
            entry for entry in parts.shell.entries.values() if entry.call.deployment == live.id
        ]
        # A call that failed has no effect on the state but that of its first parts, if any.
        failed = {row.id for row in found.calls if row.state is CallState.FAILED}
        ended = [
            self._without_effect(entry.call) if entry.call.id in failed else entry.call
            for entry in entries
            if entry.ended.is_set() or entry.late
        ]
        waiting = [entry for entry in entries if not (entry.ended.is_set() or entry.late)]
        parts.shell.place(
            training_deployment(live, job, model),
            image=image,
            applied=applied,
            done=sorted(ended, key=lambda call: call.seq),
        )
        for entry in sorted(waiting, key=lambda entry: entry.call.seq):
            parts.shell.submit(entry)

    def _without_effect(self, call: Call) -> Call:
        part = 0
        while self._parts.spool.read_result(call.id, part=part) is not None:
            part += 1
        return replace(call, parts=part) if part else _doomed(call)

    def _parts_done(self, live: LiveDeployment, seq: int) -> int:
        """Parts of the first unfinished call that have ended."""
        call = live.calls.get(seq)
        if call is None:
            return 0
        part = 0
        while self._parts.spool.read_result(call, part=part) is not None:
            part += 1
        return part

    def _update_image(self, live: LiveDeployment, image: tuple[int, int] | None) -> None:
        """An agent that was started again found other images than the core believes in."""
        self._parts.shell.image_found(live.id, image)


def _newest(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    return max(one, other) if one is not None and other is not None else one or other


def _doomed(call: Call) -> Call:
    return replace(call, doomed=True)


def _sample_call(sampler: Sampler, call: str, seq: int) -> Call:
    return Call(
        id=CallId(call),
        deployment=sampler.snapshot,
        job=sampler.job,
        kind=FunctionKind.SAMPLE,
        seq=seq,
    )


def _maybe(name: str | None) -> DeploymentId | None:
    return DeploymentId(name) if name is not None else None


def _seed_name(sampler: str, seq: int) -> str:
    """What ``service_sampling`` and ``service_training`` call it."""
    number, _, kind = sampler.rpartition("-")[2].partition(".")
    if kind.startswith("e"):
        model, _, version = kind[1:].partition(".")
        return f"{number}:train:{model}@{version}"
    return f"{number}:session {seq}"


def _deployments(session: Any, job: JobId) -> list[_Found]:
    found = []
    for row in deployments.deployments_of(session, job):
        if row.dropped_us is None:
            since = calls.ended_since(session, DeploymentId(row.id), seq=0)
            waiting = [
                call for call in calls.waiting_calls(session, job) if call.deployment_id == row.id
            ]
            found.append(
                _Found(row=row, calls=since + waiting, applied=views.progress_of(session, row.id))
            )
    return found
