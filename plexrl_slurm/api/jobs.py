"""Job control under ``/plexrl/v1``: what the CLI asks over the unix socket (docs/api.md)."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from plexrl_slurm.api import requests as ask
from plexrl_slurm.api.auth import Admin, Who
from plexrl_slurm.api.border import service_of
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.service import JobSubmission
from plexrl_slurm.core.ids import JobId

router = APIRouter(prefix="/plexrl/v1")


class SubmitJob(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs``: the fields of :class:`JobSubmission`."""

    partition: str
    name: str
    script: str
    account: str = ""
    models: list[str] = []
    priority: int = 0
    seed: int = 0
    options: dict[str, str] = {}


class BindJob(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs/{id}/bind``."""

    slurm_id: str


class CancelJob(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs/{id}/cancel``."""

    reason: str = ""


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """``POST drain``."""

    on: bool


@router.get("/healthz")
async def healthz() -> Response:
    """Needs no key."""
    return as_json({"status": "ok"})


@router.post("/jobs")
async def submit_job(request: Request, who: Who) -> Response:
    """Queue a job; it cannot run before it is bound to its Slurm job."""
    asked = await ask.read(SubmitJob, request)
    job = JobSubmission(
        partition=asked.partition,
        name=asked.name,
        account=asked.account,
        models=tuple(asked.models),
        priority=asked.priority,
        seed=asked.seed,
        script=asked.script,
        options=asked.options,
    )
    return as_json(await service_of(request).submit_job(who, job))


@router.post("/jobs/{job_id}/bind")
async def bind_job(job_id: int, request: Request, who: Who) -> Response:
    """Tie a job to its Slurm job."""
    asked = await ask.read(BindJob, request)
    service = service_of(request)
    return as_json(await service.bind_job(who, JobId(job_id), slurm_id=asked.slurm_id))


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(job_id: int, request: Request, who: Who) -> Response:
    """End a job; its checkpoints stay."""
    asked = await ask.read(CancelJob, request)
    service = service_of(request)
    return as_json(await service.cancel_job(who, JobId(job_id), reason=asked.reason))


@router.get("/jobs")
async def jobs(
    request: Request,
    who: Who,
    user: str | None = None,
    state: Annotated[list[str] | None, Query()] = None,
    ended: bool = False,
) -> Response:
    """Jobs of one user or of all, of some states or of any."""
    rows = await service_of(request).jobs(who, user=user, states=state or [], ended=ended)
    return as_json(rows)


@router.get("/jobs/{job_id}/explain")
async def explain_job(job_id: int, request: Request, who: Who) -> Response:
    """Why a job is where it is."""
    return as_json(await service_of(request).explain_job(who, JobId(job_id)))


@router.get("/nodes")
async def nodes(request: Request, who: Who) -> Response:
    """WPGs and holds."""
    return as_json(await service_of(request).nodes(who))


@router.get("/timeline")
async def timeline(request: Request, who: Who, since_us: int, until_us: int) -> Response:
    """What every WPG did in a stretch of time."""
    rows = await service_of(request).timeline(who, since_us=since_us, until_us=until_us)
    return as_json(rows)


@router.post("/drain")
async def drain(request: Request, who: Admin) -> Response:
    """Admit nobody new, or admit again."""
    asked = await ask.read(Drain, request)
    return as_json(await service_of(request).drain(who, on=asked.on))


@router.post("/release")
async def release(request: Request, who: Admin) -> Response:
    """End every job, give the held GPUs back, and end the daemon."""
    return as_json(await service_of(request).release(who))
