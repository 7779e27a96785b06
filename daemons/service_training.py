"""Training half of the service: models, training calls, checkpoints, publishing."""

import asyncio
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.api.service import (
    CheckpointInfo,
    ModelInfo,
    ModelReady,
    Outcome,
    Principal,
    SnapshotReady,
)
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, ModelTooLarge, NotFound, UnknownModel
from plexrl_slurm.core.ids import CallId, DeploymentId
from plexrl_slurm.core.messages import Call, Deployment, FunctionKind, Pool
from plexrl_slurm.daemons import shared_tier
from plexrl_slurm.daemons.entries import Entry
from plexrl_slurm.daemons.parts import cuts, tokens_of
from plexrl_slurm.daemons.service_base import ServiceBase, file_name
from plexrl_slurm.daemons.state import LiveDeployment, LiveJob, LiveSnapshot, Sampler
from plexrl_slurm.db import calls, checkpoints, deployments, snapshots
from plexrl_slurm.db.models import CheckpointKind, CheckpointRow
from plexrl_slurm.model_fingerprint import fingerprint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_KINDS: Mapping[type[Any], FunctionKind] = {
    wire.Create: FunctionKind.CREATE,
    wire.OptimStep: FunctionKind.OPTIM_STEP,
    wire.SaveState: FunctionKind.SAVE_STATE,
    wire.LoadState: FunctionKind.LOAD_STATE,
    wire.Publish: FunctionKind.PUBLISH,
    wire.Doomed: FunctionKind.FORWARD,
}


def kind_of(body: wire.Body) -> FunctionKind:
    """The function a body asks for."""
    if isinstance(body, wire.ForwardBackward):
        return FunctionKind.FORWARD if body.forward_only else FunctionKind.FORWARD_BACKWARD
    return _KINDS[type(body)]


def training_deployment(row: LiveDeployment, job: LiveJob, model: ModelSpec) -> Deployment:
    """What the core is told of a training deployment."""
    return Deployment(
        id=row.id,
        job=row.job,
        pool=Pool.TRAIN,
        wpg=row.wpg,
        image_bytes=model.train_bytes,
        content=row.id,
        priority=max(1, job.priority),
    )


class TrainingCalls(ServiceBase):
    """See :class:`plexrl_slurm.api.service.Service`."""

    # -- models ------------------------------------------------------------------------------
    async def create_model(
        self,
        who: Principal,
        *,
        session_id: str,
        model_seq_id: int,
        base_model: str | None,
        rank: int,
        seed: int | None,
        user_metadata: Mapping[str, Any],
        load_from: str | None = None,
        optimizer: bool = False,
    ) -> tuple[CallId, str]:
        job, session = self.job_of(who), self.session_of(who, session_id)
        model_id = DeploymentId(f"{session.id}:train:{model_seq_id}")
        call_id = CallId(f"{file_name(model_id)}.0")
        if session.finished:
            message = f"session {session_id} is finished: make a new ServiceClient"
            return self.failed_at_once(job.id, call_id, message), model_id
        if (known := self.state.deployments.get(model_id)) is not None:
            return known.calls[0], model_id
        checkpoint: CheckpointRow | None = None
        if load_from is not None:
            checkpoint = await self._owned_checkpoint(who, load_from, CheckpointKind.WEIGHTS)
            if checkpoint is None:
                message = f"no checkpoint {load_from!r} that you may load: see list_checkpoints"
                return self.failed_at_once(job.id, call_id, message), model_id
            base_model = base_model or checkpoint.base_model
        model = self.model_named(base_model)
        if model is None:
            message = str(UnknownModel(base_model or "", tuple(sorted(self.models))))
            return self.failed_at_once(job.id, call_id, message), model_id
        if rank != 0:
            message = (
                f"rank {rank} asks for LoRA, which this version does not train yet: "
                f"use rank=0, which trains all parameters"
            )
            return self.failed_at_once(job.id, call_id, message), model_id
        try:
            wpg = self.home_of(job, Pool.TRAIN, model)
        except (BadInput, ModelTooLarge) as problem:
            return self.failed_at_once(job.id, call_id, str(problem)), model_id
        body = wire.Create(
            base_model=model.name,
            seed=seed if seed is not None else job.seed + model_seq_id,
            load_path=checkpoint.path if checkpoint else "",
            load_uri=checkpoint.uri if checkpoint else "",
            optimizer=optimizer,
            fingerprint=await asyncio.to_thread(fingerprint, Path(model.path)),
        )
        if (known := self.state.deployments.get(model_id)) is not None:
            return known.calls[0], model_id

        async def accept() -> CallId:
            live = LiveDeployment(
                id=model_id,
                job=job.id,
                session=session.id,
                model=model.name,
                rank=rank,
                wpg=wpg,
                user_metadata=dict(user_metadata),
                last_used_us=self.now_us(),
            )
            call = Call(
                id=call_id, deployment=model_id, job=job.id, kind=FunctionKind.CREATE, seq=0
            )
            data = wire.encode(body)
            self.spool.write_body(call_id, data)
            await self.store.run(self._record_model, live, body, model_seq_id, model, call)
            self.state.deployments[model_id] = live
            live.calls[0] = call_id
            self.books.remember(model_id, 0, call_id)
            entry = Entry(call=call, data=data, translate=self.translator(live, call))
            if session.finished:
                self.shell.refuse(entry, f"session {session.id} has ended")
                self.drop_deployment(live)
                return call_id
            self.shell.place(
                training_deployment(live, job, model), image=None, applied=(0, 0), done=[]
            )
            self.shell.submit(entry)
            return call_id

        return await self.once(call_id, accept), model_id

    def _record_model(
        self,
        session: Any,
        live: LiveDeployment,
        body: wire.Create,
        model_seq_id: int,
        model: ModelSpec,
        call: Call,
    ) -> None:
        deployments.create_deployment(
            session,
            deployment_id=live.id,
            job_id=live.job,
            session_id=live.session,
            model_seq_id=model_seq_id,
            base_model=model.name,
            wpg=live.wpg,
            rank=live.rank,
            seed=body.seed,
            user_metadata=live.user_metadata,
            image_bytes=model.train_bytes,
            now_us=live.last_used_us,
        )
        calls.record_call(session, call, now_us=live.last_used_us)

    async def model_info(self, who: Principal, model_id: str) -> ModelInfo:
        return self._info(self.deployment_of(who, model_id))

    async def training_runs(self, who: Principal) -> list[ModelInfo]:
        return [
            self._info(live)
            for live in self.state.deployments.values()
            if live.job == who.job or (who.job is None and self._may_see(who, live))
        ]

    def _may_see(self, who: Principal, live: LiveDeployment) -> bool:
        job = self.state.jobs.get(live.job)
        return who.admin or (job is not None and job.uid == who.uid)

    def _info(self, live: LiveDeployment) -> ModelInfo:
        return ModelInfo(
            model_id=live.id,
            model=self.models[live.model],
            rank=live.rank,
            user_metadata=live.user_metadata,
            last_used_us=live.last_used_us,
        )

    async def unload_model(self, who: Principal, model_id: str) -> CallId:
        live = self.deployment_of(who, model_id)
        call_id = CallId(f"{file_name(live.id)}.unload")
        self.drop_deployment(live)
        call = Call(id=call_id, deployment=live.id, job=live.job, kind=FunctionKind.CREATE, seq=0)
        entry = Entry(call=call, forgotten=True)
        entry.resolve(ModelReady(model_id=live.id))
        self.shell.entries[call_id] = entry
        return call_id

    def drop_deployment(self, live: LiveDeployment) -> None:
        """Forget a training deployment: its calls fail, its images go."""
        if live.dropped:
            return
        live.dropped = True
        self.shell.drop(live.id)
        self.books.forget_all(live.id)
        for call in live.calls.values():
            self.shell.forget(call)
            entry = self.shell.entries.get(call)
            self.spool.drop_result(call)
            if entry is not None and entry.call.parts > 1:
                self.spool.drop_result(call, parts=entry.call.parts)
        if self._parts.hub is not None:
            self._parts.hub.drop(deployments=[live.id], snapshots=[])
        shared_tier.drop_images(self.settings, live.id)
        self.writer.add(_drop_deployment, live.id, self.now_us(), lazy=True)

    # -- calls -------------------------------------------------------------------------------
    async def submit(
        self, who: Principal, *, model_id: str, seq_id: int, body: wire.Body
    ) -> CallId:
        return await self._accept(self.deployment_of(who, model_id), seq_id, body)

    async def _accept(
        self, live: LiveDeployment, seq: int, body: wire.Body, *, publish: str = ""
    ) -> CallId:
        if (known := live.calls.get(seq)) is not None:
            return known
        call_id = CallId(f"{file_name(live.id)}.{seq}")
        if live.dropped or seq < 1:
            why = "is unloaded" if live.dropped else f"takes calls from seq 1 on, not {seq}"
            return self.failed_at_once(live.job, call_id, f"model {live.id} {why}")

        async def accept() -> CallId:
            data = wire.encode(body)
            parts = len(cuts(body, max_tokens=self.settings.max_part_tokens))
            call = Call(
                id=call_id,
                deployment=live.id,
                job=live.job,
                kind=kind_of(body),
                seq=seq,
                tokens=tokens_of(body),
                parts=parts,
                doomed=isinstance(body, wire.Doomed),
            )
            self.spool.write_body(call_id, data)
            live.last_used_us = self.now_us()
            await self.store.run(calls.record_call, call, now_us=live.last_used_us)
            live.calls[seq] = call_id
            self.books.remember(live.id, seq, call_id)
            entry = Entry(
                call=call, data=data, publish=publish, translate=self.translator(live, call)
            )
            if live.dropped:
                self.shell.refuse(entry, f"model {live.id} is unloaded")
            else:
                self.shell.submit(entry)
            return call_id

        return await self.once(call_id, accept)

    def translator(self, live: LiveDeployment, call: Call) -> Any:
        """What a result of ``call`` means to its caller, beyond itself."""

        def translate(result: wire.Result) -> Outcome:
            if isinstance(result, wire.Failed):
                return result
            if call.kind is FunctionKind.CREATE:
                return ModelReady(model_id=live.id)
            if call.kind is FunctionKind.PUBLISH:
                snapshot = self.state.snapshots.get(snapshot_id(live.id, call.seq))
                if snapshot is not None and snapshot.uri is not None:
                    return SnapshotReady(uri=snapshot.uri, sampling_session_id=None)
                sampler = sampler_id(live.session, live.id, call.seq)
                return SnapshotReady(uri=None, sampling_session_id=sampler)
            return result

        return translate

    # -- checkpoints -------------------------------------------------------------------------
    async def save_state(
        self, who: Principal, *, model_id: str, seq_id: int, name: str | None, overwrite: bool
    ) -> CallId:
        live = self.deployment_of(who, model_id)
        name = name or f"{seq_id:06d}"
        uri = f"tinker://{live.id}/weights/{name}"
        body: wire.Body = wire.SaveState(path=str(self._folder(live, "weights", name)), uri=uri)
        if problem := await self._bad_name(uri, name, overwrite):
            body = wire.Doomed(problem)
        return await self._accept(live, seq_id, body)

    async def load_state(
        self, who: Principal, *, model_id: str, seq_id: int, uri: str, optimizer: bool
    ) -> CallId:
        live = self.deployment_of(who, model_id)
        found = await self._owned_checkpoint(who, uri, CheckpointKind.WEIGHTS)
        body: wire.Body = wire.Doomed(
            f"no checkpoint {uri!r} that you may load: load_state takes the path that "
            f"save_state gave (tinker://…/weights/NAME)"
        )
        if found is not None:
            body = wire.LoadState(path=found.path, uri=uri, optimizer=optimizer)
        return await self._accept(live, seq_id, body)

    async def publish(
        self,
        who: Principal,
        *,
        model_id: str,
        seq_id: int,
        name: str | None,
        sampling_session_seq_id: int | None,
    ) -> CallId:
        live, job = self.deployment_of(who, model_id), self.job_of(who)
        if (known := live.calls.get(seq_id)) is not None:
            return known
        uri = f"tinker://{live.id}/sampler_weights/{name}" if name else ""
        if name and (problem := await self._bad_name(uri, name, True)):
            return await self._accept(live, seq_id, wire.Doomed(problem))
        path = str(self._folder(live, "sampler_weights", name)) if name else ""
        model = self.models[live.model]
        try:
            wpg = self.home_of(job, Pool.ROLLOUT, model)
        except (BadInput, ModelTooLarge) as problem:
            return await self._accept(live, seq_id, wire.Doomed(str(problem)))
        snapshot = LiveSnapshot(
            id=snapshot_id(live.id, seq_id),
            job=live.job,
            model=live.model,
            uri=uri or None,
            path=path,
            wpg=wpg,
            content=snapshot_id(live.id, seq_id),
            bytes=model.weights_bytes,
            deployment=live.id,
            ready=False,
        )
        sampler = None if name else self._ephemeral(live, snapshot, seq_id)

        async def record() -> None:
            await self.store.run(
                self._record_snapshot, snapshot, sampler, seq_id, sampling_session_seq_id
            )
            if live.dropped:
                self.writer.add(snapshots.snapshot_failed, snapshot.id)
                return
            self.state.snapshots[snapshot.id] = snapshot
            if sampler is not None:
                snapshot.samplers.add(sampler.id)
                self.state.samplers[sampler.id] = sampler

        if snapshot.id not in self.state.snapshots and not live.dropped:
            await self.once(f"snapshot {snapshot.id}", record)
        body = wire.Publish(snapshot=snapshot.id, path=path, uri=uri)
        return await self._accept(live, seq_id, body, publish=snapshot.id)

    def _ephemeral(self, live: LiveDeployment, snapshot: LiveSnapshot, seq: int) -> Sampler:
        return Sampler(
            id=sampler_id(live.session, live.id, seq),
            session=live.session,
            job=live.job,
            snapshot=snapshot.id,
            seed_name=f"{session_number(live.session)}:{live.id.partition(':')[2]}@{seq}",
            last_used_us=self.now_us(),
        )

    def _record_snapshot(
        self,
        session: Any,
        snapshot: LiveSnapshot,
        sampler: Sampler | None,
        seq: int,
        sampler_seq: int | None,
    ) -> None:
        now = self.now_us()
        snapshots.create_snapshot(
            session,
            snapshot_id=snapshot.id,
            job_id=snapshot.job,
            deployment_id=snapshot.deployment,
            base_model=snapshot.model,
            seq=seq,
            wpg=snapshot.wpg,
            uri=snapshot.uri,
            path=snapshot.path,
            content=snapshot.content,
            bytes=snapshot.bytes,
            ready=snapshot.ready,
            now_us=now,
        )
        if sampler is not None:
            # A retry of the publish carries a new number; the deployment's seq is what counts.
            number = -(seq + 1) if sampler_seq is None else sampler_seq
            snapshots.open_sampling_session(
                session,
                sampler_id=sampler.id,
                session_id=sampler.session,
                seq=number,
                snapshot_id=snapshot.id,
                job_id=sampler.job,
                now_us=now,
            )

    async def _bad_name(self, uri: str, name: str, overwrite: bool) -> str:
        if not _NAME.fullmatch(name):
            return (
                f"checkpoint name {name!r} cannot be used: letters, digits, dot, dash and "
                f"underscore only, at most 128, beginning with a letter or digit"
            )
        if not overwrite and await self.store.run(checkpoints.find_checkpoint, uri) is not None:
            return f"checkpoint {uri} exists: choose another name or pass overwrite=True"
        return ""

    def _folder(self, live: LiveDeployment, kind: str, name: str) -> Path:
        return self.settings.state_dir / "checkpoints" / file_name(live.id) / kind / name

    async def _owned_checkpoint(
        self, who: Principal, uri: str, kind: CheckpointKind
    ) -> CheckpointRow | None:
        row = await self.store.run(checkpoints.find_checkpoint, uri)
        mine = row is not None and row.kind == kind and (who.admin or row.uid == who.uid)
        return row if mine else None

    async def checkpoints(self, who: Principal, *, model_id: str | None) -> list[CheckpointInfo]:
        wanted = DeploymentId(model_id) if model_id is not None else None
        rows = await self.store.run(checkpoints.list_checkpoints, uid=who.uid, deployment_id=wanted)
        return [_checkpoint_info(row) for row in rows]

    async def checkpoint(self, who: Principal, uri: str) -> CheckpointInfo:
        row = await self.store.run(checkpoints.find_checkpoint, uri)
        if row is None or not (who.admin or row.uid == who.uid):
            raise NotFound("checkpoint", uri)
        return _checkpoint_info(row)

    async def delete_checkpoint(self, who: Principal, uri: str) -> None:
        await self.checkpoint(who, uri)
        row = await self.store.run(checkpoints.find_checkpoint, uri)
        await self.store.run(checkpoints.delete_checkpoint, uri)
        if row is not None:
            await asyncio.to_thread(shutil.rmtree, row.path, ignore_errors=True)


def snapshot_id(model_id: str, seq: int) -> DeploymentId:
    """Name of the snapshot that call ``seq`` of ``model_id`` publishes."""
    return DeploymentId(f"{file_name(model_id)}.v{seq}")


def session_number(session: str) -> str:
    """Its number within its job: the same whenever the same controller is run again."""
    return session.rpartition("-")[2]


def sampler_id(session: str, model_id: str, seq: int) -> str:
    """Name of the sampling session that goes with an ephemeral publish."""
    return f"{session}.e{model_id.rsplit(':', 1)[1]}.{seq}"


def _drop_deployment(session: Any, deployment: DeploymentId, now_us: int) -> None:
    deployments.drop_deployment(session, deployment, now_us=now_us)


def _checkpoint_info(row: CheckpointRow) -> CheckpointInfo:
    return CheckpointInfo(
        uri=row.uri,
        kind=str(row.kind),
        name=row.name,
        model_id=row.deployment_id,
        base_model=row.base_model,
        rank=row.rank,
        bytes=row.bytes,
        created_us=row.created_us,
        user_metadata=row.user_metadata,
    )
