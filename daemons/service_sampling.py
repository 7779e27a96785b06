"""Sampling half of the service: samplers, sample calls, ends of publishes, collection."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from plexrl_slurm import wire
from plexrl_slurm.api.service import Principal, SamplerInfo
from plexrl_slurm.core import content
from plexrl_slurm.core.errors import BadInput, NotFound, UnknownModel
from plexrl_slurm.core.ids import CallId, DeploymentId, WpgId
from plexrl_slurm.core.messages import Call, Deployment, FunctionKind, Pool
from plexrl_slurm.daemons import shared_tier
from plexrl_slurm.daemons.entries import Entry
from plexrl_slurm.daemons.orders import Weights
from plexrl_slurm.daemons.parts import tokens_of
from plexrl_slurm.daemons.service_base import file_name
from plexrl_slurm.daemons.service_training import TrainingCalls, session_number
from plexrl_slurm.daemons.spool import SampleLine
from plexrl_slurm.daemons.state import LiveSession, LiveSnapshot, Sampler
from plexrl_slurm.db import checkpoints, snapshots
from plexrl_slurm.db.models import CheckpointKind
from plexrl_slurm.model_fingerprint import fingerprint

#: Ephemeral samplers of a model that are never collected while their session lives.
KEPT_SAMPLERS = 2
#: An older one is collected when nobody has used it for so long.
SAMPLER_IDLE_US = 300_000_000
#: The same while snapshots take more than their share of the host tier.
CROWDED_IDLE_US = 30_000_000
#: The share: one part of so many.
SNAPSHOT_SHARE = 4
#: A sampler that has accepted more calls forgets those that are over and fetched.
REMEMBERED_CALLS = 4096


class SamplingCalls(TrainingCalls):
    """See :class:`plexrl_slurm.api.service.Service`."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        #: Samples accepted by an earlier daemon whose results it took with it.
        self.lost_samples: dict[CallId, tuple[Sampler, SampleLine]] = {}
        self.shell.sampled_at = self._sampled_at

    def _sampled_at(self, snapshot: DeploymentId) -> WpgId | None:
        live = self.state.snapshots.get(snapshot)
        return None if live is None or live.dropped or live.path else live.wpg

    async def create_sampling_session(
        self,
        who: Principal,
        *,
        session_id: str,
        sampling_session_seq_id: int,
        model_path: str | None,
        base_model: str | None,
    ) -> str:
        self.job_of(who)
        session = self.session_of(who, session_id)
        if session.finished:
            raise BadInput(f"session {session_id} is finished: make a new ServiceClient")
        new_id = f"{session.id}.b{sampling_session_seq_id}"
        if new_id in self.state.samplers:
            return new_id

        async def accept() -> str:
            if model_path is not None:
                snapshot = await self._named_snapshot(who, session, model_path)
            else:
                snapshot = await self._base_snapshot(who, session, base_model)
            sampler = Sampler(
                id=new_id,
                session=session.id,
                job=session.job,
                snapshot=snapshot.id,
                seed_name=f"{session_number(session.id)}:session {sampling_session_seq_id}",
                last_used_us=self.now_us(),
            )
            await self.store.run(
                snapshots.open_sampling_session,
                sampler_id=new_id,
                session_id=session.id,
                seq=sampling_session_seq_id,
                snapshot_id=snapshot.id,
                job_id=session.job,
                now_us=self.now_us(),
            )
            if session.finished or snapshot.dropped:
                raise BadInput(f"session {session.id} has ended: make a new ServiceClient")
            snapshot.samplers.add(new_id)
            self.state.samplers[new_id] = sampler
            return new_id

        return await self.once(new_id, accept)

    async def _base_snapshot(
        self, who: Principal, session: LiveSession, base_model: str | None
    ) -> LiveSnapshot:
        model = self.model_named(base_model)
        if model is None:
            raise UnknownModel(base_model or "", tuple(sorted(self.models)))
        job = self.job_of(who)
        weights = await asyncio.to_thread(fingerprint, Path(model.path))
        return await self._standing(
            session,
            LiveSnapshot(
                id=DeploymentId(f"{session.id}.base.{file_name(model.name)}"),
                job=job.id,
                model=model.name,
                uri=None,
                path=model.path,
                wpg=self.home_of(job, Pool.ROLLOUT, model),
                content=content.text(content.of_base(model.name, weights)),
                bytes=model.weights_bytes,
                deployment=None,
                ready=True,
            ),
        )

    async def _named_snapshot(self, who: Principal, session: LiveSession, uri: str) -> LiveSnapshot:
        for snapshot in self.state.snapshots.values():
            if snapshot.uri == uri and snapshot.job == who.job and not snapshot.dropped:
                return snapshot
        row = await self.store.run(checkpoints.find_checkpoint, uri)
        if row is None or row.uid != who.uid:
            raise NotFound("sampler checkpoint", uri)
        if row.kind is not CheckpointKind.SAMPLER_WEIGHTS:
            raise BadInput(
                f"{uri} is training state; sample from what save_weights_for_sampler gave "
                f"(tinker://…/sampler_weights/NAME)"
            )
        model = self.model_named(row.base_model)
        if model is None:
            raise UnknownModel(row.base_model, tuple(sorted(self.models)))
        job = self.job_of(who)
        return await self._standing(
            session,
            LiveSnapshot(
                id=DeploymentId(f"{session.id}.ck{row.id}"),
                job=job.id,
                model=model.name,
                uri=None,
                path=row.path,
                wpg=self.home_of(job, Pool.ROLLOUT, model),
                content=f"{row.path} {row.created_us}",
                bytes=model.weights_bytes,
                deployment=None,
                ready=True,
            ),
        )

    async def _standing(self, session: LiveSession, snapshot: LiveSnapshot) -> LiveSnapshot:
        """A snapshot whose weights are on disk already; once for each session."""

        async def record() -> LiveSnapshot:
            known = self.state.snapshots.get(snapshot.id)
            if known is not None:
                return known
            if not await asyncio.to_thread(Path(snapshot.path).exists):
                raise BadInput(f"the weights at {snapshot.path} are gone: save them again")
            await self.store.run(self._record_snapshot, snapshot, None, 0, None)
            if session.finished:
                raise BadInput(f"session {session.id} has ended: make a new ServiceClient")
            self.state.snapshots[snapshot.id] = snapshot
            self.place_snapshot(snapshot)
            return snapshot

        return await self.once(f"snapshot {snapshot.id}", record)

    def place_snapshot(self, snapshot: LiveSnapshot) -> None:
        """Tell the core of a snapshot that is ready."""
        job = self.state.jobs[snapshot.job]
        self.shell.place(
            Deployment(
                id=snapshot.id,
                job=snapshot.job,
                pool=Pool.ROLLOUT,
                wpg=snapshot.wpg,
                image_bytes=snapshot.bytes,
                content=snapshot.content,
                priority=max(1, job.priority),
            ),
            image=(0, 0),
            applied=(0, 0),
            done=[],
            weights=Weights(model=snapshot.model, path=snapshot.path),
        )

    async def sampler_info(self, who: Principal, sampling_session_id: str) -> SamplerInfo:
        sampler = self.sampler_of(who, sampling_session_id)
        snapshot = self.state.snapshots.get(sampler.snapshot)
        if snapshot is None:
            raise BadInput(_collected(sampler))
        return SamplerInfo(
            sampling_session_id=sampler.id, base_model=snapshot.model, model_path=snapshot.uri
        )

    async def sample(
        self,
        who: Principal,
        *,
        sampling_session_id: str,
        seq_id: int,
        body: wire.Sample | wire.Doomed,
        seed_given: bool,
    ) -> CallId:
        sampler = self.sampler_of(who, sampling_session_id)
        if (known := sampler.calls.get(seq_id)) is not None:
            return known
        call_id = CallId(f"{sampler.id}.{seq_id}")
        if call_id in self.shell.entries or call_id in self.lost_samples:
            return call_id
        snapshot = self.state.snapshots.get(sampler.snapshot)
        if sampler.closed or snapshot is None or snapshot.dropped:
            return self.failed_at_once(sampler.job, call_id, _collected(sampler))
        if isinstance(body, wire.Sample) and not seed_given:
            body = _with_seed(body, self._seed(sampler, seq_id))
        line = SampleLine(call_id, seq_id, body)
        self.spool.journal_sample(sampler.id, line)
        self.begin_sample(sampler, line)
        return call_id

    def begin_sample(self, sampler: Sampler, line: SampleLine) -> None:
        """Hand a journalled sample call to the core."""
        sampler.calls[line.seq] = CallId(line.call)
        sampler.last_used_us = self.now_us()
        sampler.waiting += 1
        call = Call(
            id=CallId(line.call),
            deployment=sampler.snapshot,
            job=sampler.job,
            kind=FunctionKind.SAMPLE,
            seq=line.seq,
            tokens=tokens_of(line.body),
            doomed=isinstance(line.body, wire.Doomed),
        )
        self.shell.submit(Entry(call=call, sample=line.body))

    def _seed(self, sampler: Sampler, seq: int) -> int:
        """Seed of a sample call: the same whenever the same controller is run again."""
        job = self.state.jobs[sampler.job]
        text = f"{job.seed}/{sampler.seed_name}/{seq}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    # -- ends --------------------------------------------------------------------------------
    def call_ended(self, entry: Entry, result: wire.Result, ok: bool) -> None:
        """What the end of a call means: snapshots become ready, checkpoints exist."""
        call = entry.call
        match call.kind:
            case FunctionKind.SAMPLE:
                self._sample_ended(call)
            case FunctionKind.PUBLISH:
                self._publish_ended(entry, result, ok)
            case FunctionKind.SAVE_STATE if ok and isinstance(result, wire.Saved):
                self._checkpoint_exists(call, result, CheckpointKind.WEIGHTS)
            case _:
                pass

    def _sample_ended(self, call: Call) -> None:
        snapshot = self.state.snapshots.get(call.deployment)
        for sampler_id in snapshot.samplers if snapshot is not None else ():
            sampler = self.state.samplers[sampler_id]
            if sampler.calls.get(call.seq) == call.id:
                sampler.waiting -= 1
                sampler.last_used_us = self.now_us()

    def _publish_ended(self, entry: Entry, result: wire.Result, ok: bool) -> None:
        snapshot = self.state.snapshots.get(DeploymentId(entry.publish))
        if snapshot is None:
            return
        if not ok or not isinstance(result, wire.Saved):
            why = result.message if isinstance(result, wire.Failed) else "they were not written"
            self.shell.drop(snapshot.id, reason=f"the weights could not be published: {why}")
            for sampler_id in list(snapshot.samplers):
                self.close_sampler(self.state.samplers[sampler_id])
            self.drop_snapshot(snapshot)
            self.writer.add(snapshots.snapshot_failed, snapshot.id)
            return
        snapshot.ready, snapshot.bytes = True, result.bytes
        snapshot.content = result.content or snapshot.content
        self.writer.add(_snapshot_ready, snapshot.id, result.bytes, snapshot.content, self.now_us())
        if snapshot.uri is not None:
            self._checkpoint_exists(entry.call, result, CheckpointKind.SAMPLER_WEIGHTS)
        if snapshot.path and self._parts.hub is not None:
            # It is sampled from its durable copy.
            self._parts.hub.drop(deployments=[], snapshots=[snapshot.id])
        self.place_snapshot(snapshot)

    def _checkpoint_exists(self, call: Call, result: wire.Saved, kind: CheckpointKind) -> None:
        live, job = self.state.deployments[call.deployment], self.state.jobs[call.job]
        name = result.uri.rsplit("/", 1)[1]
        self.writer.add(
            _add_checkpoint,
            {
                "job_id": call.job,
                "uid": job.uid,
                "uri": result.uri,
                "kind": kind,
                "name": name,
                "deployment_id": live.id,
                "base_model": live.model,
                "rank": live.rank,
                "path": str(self._folder(live, str(kind), name)),
                "bytes": result.bytes,
                "user_metadata": live.user_metadata,
                "now_us": self.now_us(),
                "overwrite": True,
            },
        )

    # -- collection --------------------------------------------------------------------------
    def close_sampler(self, sampler: Sampler) -> None:
        """Nobody will sample from it again; its snapshot goes with its last sampler."""
        if sampler.closed:
            return
        sampler.closed = True
        sampler.calls.clear()
        for call in [c for c, (owner, _) in self.lost_samples.items() if owner is sampler]:
            del self.lost_samples[call]
        self.spool.close_journal(sampler.id)
        self.writer.add(_close_sampler, sampler.id, self.now_us(), lazy=True)
        snapshot = self.state.snapshots.get(sampler.snapshot)
        if snapshot is None:
            return
        snapshot.samplers.discard(sampler.id)
        if not snapshot.samplers and snapshot.uri is None:
            self.drop_snapshot(snapshot)

    def drop_snapshot(self, snapshot: LiveSnapshot) -> None:
        """Its bytes in the host tier go; a durable copy stays."""
        if snapshot.dropped:
            return
        snapshot.dropped = True
        self.shell.drop(snapshot.id)
        if self._parts.hub is not None:
            self._parts.hub.drop(deployments=[], snapshots=[snapshot.id])
        # No agent may be there.
        shared_tier.drop_snapshot(self.settings, snapshot.id)
        self.writer.add(snapshots.drop_snapshot, snapshot.id, lazy=True)
        del self.state.snapshots[snapshot.id]

    def collect_samplers(self) -> None:
        """Close ephemeral samplers that nobody has used for long; clients never close them."""
        by_model: dict[DeploymentId, list[Sampler]] = {}
        for sampler in self.state.samplers.values():
            snapshot = self.state.snapshots.get(sampler.snapshot)
            if sampler.closed or snapshot is None or snapshot.deployment is None:
                continue
            if snapshot.uri is None:
                by_model.setdefault(snapshot.deployment, []).append(sampler)
        held = sum(
            snapshot.bytes for snapshot in self.state.snapshots.values() if not snapshot.path
        )
        crowded = held > self.settings.host_bytes // SNAPSHOT_SHARE
        before = self.now_us() - (CROWDED_IDLE_US if crowded else SAMPLER_IDLE_US)
        for samplers in by_model.values():
            samplers.sort(key=lambda sampler: sampler.last_used_us)
            for sampler in samplers[:-KEPT_SAMPLERS]:
                if sampler.waiting == 0 and sampler.last_used_us < before:
                    self.close_sampler(sampler)
        for sampler in self.state.samplers.values():
            if len(sampler.calls) > REMEMBERED_CALLS:
                self._forget_calls(sampler)

    def _forget_calls(self, sampler: Sampler) -> None:
        entries, lost = self.shell.entries, self.lost_samples
        sampler.calls = {
            seq: call for seq, call in sampler.calls.items() if call in entries or call in lost
        }


def _collected(sampler: Sampler) -> str:
    return (
        f"sampler {sampler.id} is closed, or was collected because newer ones were used instead: "
        f"save the weights for sampling again"
    )


def _with_seed(body: wire.Sample, seed: int) -> wire.Sample:
    return msgspec.structs.replace(body, seed=seed)


def _snapshot_ready(
    session: Any, snapshot: DeploymentId, size: int, content: str, now_us: int
) -> None:
    snapshots.snapshot_ready(session, snapshot, bytes=size, content=content, now_us=now_us)


def _add_checkpoint(session: Any, values: dict[str, Any]) -> None:
    checkpoints.add_checkpoint(session, **values)


def _close_sampler(session: Any, sampler: str, now_us: int) -> None:
    snapshots.close_sampling_session(session, sampler, now_us=now_us)
