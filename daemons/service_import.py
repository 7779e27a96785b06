"""Weights from outside become a checkpoint of a job: checked, uploaded in pieces, published."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.api.service import Import, Principal
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, NotFound, StorageFull, UnknownModel
from plexrl_slurm.core.ids import DeploymentId, JobId, WpgId
from plexrl_slurm.daemons.service_base import Parts, file_name
from plexrl_slurm.daemons.service_state import StateCalls
from plexrl_slurm.db import checkpoints, deployments, queue
from plexrl_slurm.db.models import CheckpointKind
from plexrl_slurm.memory.checkpoint import MANIFEST, Manifest, RankFile, encoded
from plexrl_slurm.memory.files import publish_folder, storage_errors, write_bytes
from plexrl_slurm.memory.saved import LONGEST_PIECE, is_weights
from plexrl_slurm.model_folder import tensors_of
from plexrl_slurm.model_match import check_match

_FILE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.safetensors")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
#: Whoever sends nothing for so long has given up.
_PATIENCE_US: Final = 600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """An import that is under way."""

    asked: Import
    model: ModelSpec
    folder: Path
    job: JobId
    #: What its names begin with.
    called: str
    uid: int


class ImportCalls(StateCalls):
    """See :class:`plexrl_slurm.api.service.Service`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._coming: dict[str, _Coming] = {}
        #: When each of them was heard of last.
        self._heard_us: dict[str, int] = {}
        #: Names of imports that gave way to newer ones, the last few.
        self._replaced: dict[str, str] = {}
        # What an earlier daemon was sent in part nobody can finish.
        shutil.rmtree(self._imports, ignore_errors=True)

    @property
    def _imports(self) -> Path:
        return self.settings.state_dir / "imports"

    async def begin_import(self, who: Principal, job_id: JobId, asked: Import) -> dict[str, Any]:
        row = await self.owned(who, job_id)
        if not _NAME.fullmatch(asked.name):
            raise BadInput(
                f"checkpoint name {asked.name!r} cannot be used: letters, digits, dot, dash and "
                f"underscore only, at most 128"
            )
        for name in asked.files:
            if not _FILE.fullmatch(name):
                raise BadInput(f"{name!r} is no name of a safetensors file: rename it")
        model = await asyncio.to_thread(self._model_for, asked)
        called = await self.store.read(queue.called, job_id)
        uri = _uri(called, model, asked.name)
        if await self.store.run(checkpoints.find_checkpoint, uri) is not None:
            raise BadInput(f"checkpoint {uri} exists: choose another --name")
        total = sum(asked.files.values())
        known = os.statvfs(self.settings.state_dir)
        if total > known.f_bavail * known.f_frsize:
            raise StorageFull(str(self.settings.state_dir), total, known.f_bavail * known.f_frsize)
        self._make_way(job_id, asked.name)
        number = uuid.uuid4().hex
        folder = self._imports / number
        folder.mkdir(parents=True, mode=0o700)
        self._coming[number] = _Coming(
            asked=asked, model=model, folder=folder, job=job_id, called=called, uid=row.uid
        )
        self._heard_us[number] = self.now_us()
        return {
            "import_id": number, "piece_bytes": LONGEST_PIECE, "model": model.name, "uri": uri,
        }  # fmt: skip

    def _make_way(self, job: JobId, name: str) -> None:
        """Drop what was given up, and an older import of the same name: it was begun anew."""
        now = self.now_us()
        for number, each in list(self._coming.items()):
            if each.job == job and each.asked.name == name:
                self._replaced[number] = name
                self._drop(number)
            elif now - self._heard_us[number] > _PATIENCE_US:
                self._drop(number)
        for number in list(self._replaced)[:-100]:
            del self._replaced[number]

    def _model_for(self, asked: Import) -> ModelSpec:
        if asked.model:
            model = self.model_named(asked.model)
            if model is None:
                raise UnknownModel(asked.model, tuple(sorted(self.models)))
            check_match(asked.config, asked.tensors, model)
            return model
        fits, problem = [], BadInput("the partition's catalogue is empty")
        for model in self.models.values():
            try:
                check_match(asked.config, asked.tensors, model)
                fits.append(model)
            except BadInput as found:
                problem = found
        if len(fits) == 1:
            return fits[0]
        if len(self.models) == 1:
            raise problem
        names = ", ".join(each.name for each in fits) or "none of the catalogue"
        raise BadInput(f"the weights fit {names}: say which with --model")

    async def import_piece(
        self, who: Principal, job_id: JobId, import_id: str, *, name: str, offset: int, data: bytes
    ) -> dict[str, Any]:
        coming = await self._mine(who, job_id, import_id)
        size = coming.asked.files.get(name)
        if size is None or offset + len(data) > size:
            raise BadInput(f"import {import_id} has no bytes {offset + len(data)} of {name!r}")
        await asyncio.to_thread(_write, coming.folder / name, offset, data)
        return {"bytes": len(data)}

    async def finish_import(
        self, who: Principal, job_id: JobId, import_id: str, *, sha256: Mapping[str, str]
    ) -> dict[str, Any]:
        coming = await self._mine(who, job_id, import_id)
        try:
            path = self._path(coming)
            size = await asyncio.to_thread(_publish, coming, dict(sha256), path)
            await self.store.run(_record, coming, path, size, self.now_us())
        finally:
            self._drop(import_id)
        uri = _uri(coming.called, coming.model, coming.asked.name)
        return {"uri": uri, "model": coming.model.name, "bytes": size}

    def _path(self, coming: _Coming) -> Path:
        run = file_name(_run(coming.called, coming.model))
        return self.settings.state_dir / "checkpoints" / run / "weights" / coming.asked.name

    async def _mine(self, who: Principal, job_id: JobId, import_id: str) -> _Coming:
        await self.owned(who, job_id)
        coming = self._coming.get(import_id)
        if coming is not None and coming.job == job_id:
            self._heard_us[import_id] = self.now_us()
            return coming
        if (name := self._replaced.get(import_id)) is not None:
            raise BadInput(
                f"another import as {name!r} for job {job_id} has begun since, and this one is "
                f"dropped: run one at a time, or choose another --name"
            )
        raise NotFound("import", import_id)

    def _drop(self, import_id: str) -> None:
        coming = self._coming.pop(import_id, None)
        self._heard_us.pop(import_id, None)
        if coming is not None:
            shutil.rmtree(coming.folder, ignore_errors=True)


def _session(called: str) -> str:
    """Jobs' own sessions begin with 1."""
    return f"{called}-0"


def _run(called: str, model: ModelSpec) -> DeploymentId:
    return DeploymentId(f"{_session(called)}:import:{file_name(model.name)}")


def _uri(called: str, model: ModelSpec, name: str) -> str:
    return f"tinker://{_run(called, model)}/weights/{name}"


def _write(path: Path, offset: int, data: bytes) -> None:
    with storage_errors(path.parent, len(data)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            with memoryview(data) as view:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, view[done:], offset + done)
        finally:
            os.close(descriptor)


def _publish(coming: _Coming, sums: Mapping[str, str], path: Path) -> int:
    """Look at what came, and give it its name; returns its bytes."""
    files = []
    for name, size in sorted(coming.asked.files.items()):
        with contextlib.suppress(FileNotFoundError), (coming.folder / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
            files.append(RankFile(name=name, bytes=size, sha256=digest))
        if not files or files[-1].name != name or files[-1].sha256 != sums.get(name):
            raise BadInput(f"{name} did not arrive as it was sent: import it again")
    catalogue = Path(coming.model.path)
    with storage_errors(coming.folder, 0):
        for file in sorted(catalogue.iterdir()):
            if file.is_file() and not is_weights(file.name):
                shutil.copyfile(file, coming.folder / file.name)
        if len(files) > 1:
            index = {
                name: file.name
                for file in files
                for name, _ in tensors_of(coming.folder, only=file.name)
            }
            text = json.dumps({"metadata": {}, "weight_map": index})
            write_bytes(coming.folder / "model.safetensors.index.json", text.encode())
        elif files[0].name != "model.safetensors":
            (coming.folder / files[0].name).rename(coming.folder / "model.safetensors")
            files = [RankFile("model.safetensors", files[0].bytes, files[0].sha256)]
    check_match(coming.asked.config, dict(tensors_of(coming.folder)), coming.model)
    manifest = Manifest(
        uri=_uri(coming.called, coming.model, coming.asked.name),
        architecture=coming.model.architecture,
        world=1,
        dtype=coming.model.dtype,
        step=0,
        files=tuple(files),
        weights_only=True,
    )
    write_bytes(coming.folder / MANIFEST, encoded(manifest))
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_folder(coming.folder, path)
    return manifest.bytes


def _record(session: Any, coming: _Coming, path: Path, size: int, now: int) -> None:
    """The checkpoint's row; and the run that it is said to be of, which never lived."""
    run = _run(coming.called, coming.model)
    home = deployments.open_session(
        session,
        session_id=_session(coming.called),
        job_id=coming.job,
        idempotency_key="imports",
        metadata={},
        now_us=now,
    ).id
    deployments.finish_session(session, home, reason="imported", now_us=now)
    known = deployments.deployments_of(session, coming.job)
    if all(each.id != run for each in known):
        deployments.create_deployment(
            session,
            deployment_id=run,
            job_id=coming.job,
            session_id=home,
            model_seq_id=sum(each.session_id == home for each in known),
            base_model=coming.model.name,
            wpg=WpgId(""),
            rank=0,
            seed=0,
            user_metadata={},
            image_bytes=0,
            now_us=now,
        )
        deployments.drop_deployment(session, run, now_us=now)
    checkpoints.add_checkpoint(
        session,
        job_id=coming.job,
        uid=coming.uid,
        uri=_uri(coming.called, coming.model, coming.asked.name),
        kind=CheckpointKind.WEIGHTS,
        name=coming.asked.name,
        deployment_id=run,
        base_model=coming.model.name,
        rank=0,
        path=str(path),
        bytes=size,
        user_metadata={"imported": "true"},
        now_us=now,
    )
