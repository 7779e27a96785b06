"""State under ``/plexrl/v1``: images by tier, what jobs saved, and its files (docs/api.md)."""

from typing import Annotated, Final, TypeAlias

from fastapi import APIRouter, Query, Request, Response

from plexrl_slurm.api.auth import Who
from plexrl_slurm.api.border import service_of
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.jobs import JobNumber
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
