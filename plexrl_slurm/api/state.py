"""State under ``/plexrl/v1``: images by tier, what jobs saved, and its files (docs/api.md)."""

from typing import Annotated, Final, TypeAlias

import msgspec
from fastapi import APIRouter, Query, Request, Response

from plexrl_slurm.api import requests as ask
from plexrl_slurm.api.auth import Who
from plexrl_slurm.api.border import service_of
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.jobs import JobNumber
from plexrl_slurm.api.service import Import
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId

router = APIRouter(prefix="/plexrl/v1")

_LARGEST: Final = 2**63 - 1

Text: TypeAlias = Annotated[str, Query(max_length=1024)]
Number: TypeAlias = Annotated[int, Query(ge=0, le=_LARGEST)]


@router.get("/state")
async def partition_state(request: Request, who: Who) -> Response:
    """Every image, and what they take of every tier."""
    return as_json(await service_of(request).partition_state(who))


@router.get("/jobs/{job_id}/state")
async def job_state(job_id: JobNumber, request: Request, who: Who) -> Response:
    """Images and checkpoints of one job."""
    return as_json(await service_of(request).job_state(who, JobId(job_id)))


@router.get("/jobs/{job_id}/state/verify")
async def verify_state(job_id: JobNumber, request: Request, who: Who, uri: Text) -> Response:
    """Whether the files of a checkpoint are what its manifest says; reads all of them."""
    return as_json(await service_of(request).verify_state(who, JobId(job_id), uri=uri))


@router.get("/jobs/{job_id}/state/files")
async def state_files(job_id: JobNumber, request: Request, who: Who, uri: Text) -> Response:
    """The files that make named sampler weights a model folder."""
    return as_json(await service_of(request).state_files(who, JobId(job_id), uri=uri))


@router.get("/jobs/{job_id}/state/piece")
async def state_piece(
    job_id: JobNumber,
    request: Request,
    who: Who,
    uri: Text,
    name: Text,
    version: Text,
    offset: Number,
    length: Number,
) -> Response:
    """Some bytes of one of these files, as they are."""
    data = await service_of(request).state_piece(
        who, JobId(job_id), uri=uri, name=name, version=version, offset=offset, length=length
    )
    return Response(data, media_type="application/octet-stream")


class FinishImport(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs/{id}/state/import/{import}/finish``: checksums by file."""

    sha256: dict[str, str]


class Evict(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs/{id}/state/evict``; all deployments of the job unless one is named."""

    deployment: str = ""
    to: str = "nvme"


@router.post("/jobs/{job_id}/state/evict")
async def evict_state(job_id: JobNumber, request: Request, who: Who) -> Response:
    """Images leave host memory."""
    asked = await ask.read(Evict, request)
    answer = await service_of(request).evict_state(
        who, JobId(job_id), deployment=asked.deployment, to=asked.to
    )
    return as_json(answer)


@router.post("/jobs/{job_id}/state/import")
async def begin_import(job_id: JobNumber, request: Request, who: Who) -> Response:
    """Weights are to come."""
    asked = await ask.read(Import, request)
    return as_json(await service_of(request).begin_import(who, JobId(job_id), asked))


@router.put("/jobs/{job_id}/state/import/{import_id}")
async def import_piece(
    job_id: JobNumber, import_id: str, request: Request, who: Who, name: Text, offset: Number
) -> Response:
    """Some bytes of one of its files, as they are."""
    data, whole = await ask.body_of(request)
    if not whole:
        raise BadInput(f"a piece is larger than {ask.BODY_LIMIT >> 20} MiB: send less at once")
    answer = await service_of(request).import_piece(
        who, JobId(job_id), import_id, name=name, offset=offset, data=data
    )
    return as_json(answer)


@router.post("/jobs/{job_id}/state/import/{import_id}/finish")
async def finish_import(job_id: JobNumber, import_id: str, request: Request, who: Who) -> Response:
    """All of it has come."""
    asked = await ask.read(FinishImport, request)
    answer = await service_of(request).finish_import(
        who, JobId(job_id), import_id, sha256=asked.sha256
    )
    return as_json(answer)
