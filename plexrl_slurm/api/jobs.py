"""Job control under ``/plexrl/v1``: what the CLI asks over the unix socket (docs/api.md)."""

import re
from typing import Annotated, Final, TypeAlias

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from plexrl_slurm.api import requests as ask
from plexrl_slurm.api.auth import Admin, Who
from plexrl_slurm.api.border import service_of
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.service import JobSubmission
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId

router = APIRouter(prefix="/plexrl/v1")

_SLURM_NUMBER: Final = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
#: What a database column holds.
_LARGEST: Final = 2**63 - 1
#: Of a name that everybody's squeue shows.
_LONGEST_NAME: Final = 1024
_LONGEST_TEXT: Final = 4096
#: Models, and options, of one job: everybody's squeue reads the row.
_MOST: Final = 64

JobNumber: TypeAlias = Annotated[int, Path(ge=0, le=_LARGEST)]
Instant: TypeAlias = Annotated[int, Query(ge=0, le=_LARGEST)]


class SubmitJob(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs``: the fields of :class:`JobSubmission`."""

    partition: str
    name: str
    script: str
    account: str = ""
    models: Annotated[list[str], msgspec.Meta(max_length=_MOST)] = []
    priority: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    seed: Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)] = 0
    options: Annotated[dict[str, str], msgspec.Meta(max_length=_MOST)] = {}


class BindJob(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs/{id}/bind``."""

    slurm_id: str


class CancelJob(msgspec.Struct, forbid_unknown_fields=True):
    """``POST jobs/{id}/cancel``; its Slurm job ends too, unless it is to go on by itself."""

    reason: str = ""
    keep_slurm_job: bool = False


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
        name=_plain("job name", asked.name),
        account=_plain("account", asked.account) if asked.account else "",
        models=tuple(asked.models),
        priority=asked.priority,
        seed=asked.seed,
        script=_shown(asked.script),
        options={_shown(name): _shown(value) for name, value in asked.options.items()},
    )
    return as_json(await service_of(request).submit_job(who, job))


@router.post("/jobs/{job_id}/bind")
async def bind_job(job_id: JobNumber, request: Request, who: Who) -> Response:
    """Tie a job to its Slurm job."""
    asked = await ask.read(BindJob, request)
    if not _SLURM_NUMBER.fullmatch(asked.slurm_id):
        raise BadInput(
            f"slurm_id {_shown(asked.slurm_id)[:60]!r} is no Slurm job: give its number, or N_k of "
            f"an array's task"
        )
    service = service_of(request)
    return as_json(await service.bind_job(who, JobId(job_id), slurm_id=asked.slurm_id))


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(job_id: JobNumber, request: Request, who: Who) -> Response:
    """End a job; its checkpoints stay."""
    asked = await ask.read(CancelJob, request)
    service = service_of(request)
    answer = await service.cancel_job(
        who,
        JobId(job_id),
        reason=_shown(asked.reason),
        keep_slurm_job=asked.keep_slurm_job,
    )
    return as_json(answer)


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
async def explain_job(job_id: JobNumber, request: Request, who: Who) -> Response:
    """Why a job is where it is."""
    return as_json(await service_of(request).explain_job(who, JobId(job_id)))


@router.get("/priorities")
async def priorities(request: Request, who: Who) -> Response:
    """Who is next in the queue, and why."""
    return as_json(await service_of(request).priorities(who))


@router.get("/starts")
async def starts(request: Request, who: Who) -> Response:
    """When waiting jobs are expected to start."""
    return as_json(await service_of(request).starts(who))


@router.get("/nodes")
async def nodes(request: Request, who: Who) -> Response:
    """WPGs and holds."""
    return as_json(await service_of(request).nodes(who))


@router.get("/timeline")
async def timeline(request: Request, who: Who, since_us: Instant, until_us: Instant) -> Response:
    """What every WPG did in a stretch of time."""
    rows = await service_of(request).timeline(who, since_us=since_us, until_us=until_us)
    return as_json(rows)


@router.get("/timeline/images")
async def image_moves(request: Request, who: Who, since_us: Instant, until_us: Instant) -> Response:
    """Into which tiers images went in a stretch of time."""
    rows = await service_of(request).image_moves(who, since_us=since_us, until_us=until_us)
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


def _plain(what: str, text: str) -> str:
    """A name as it was given; raises ``BadInput`` if other users' terminals could not show it."""
    if not text.strip() or len(text) > _LONGEST_NAME or not text.isprintable():
        raise BadInput(
            f"{what} {_shown(text)[:60]!r} cannot be used: give 1 to {_LONGEST_NAME} printable "
            f"characters, on one line"
        )
    return text


def _shown(text: str) -> str:
    """A text for people, without what would move their cursor."""
    return "".join(each if each.isprintable() else "?" for each in text[:_LONGEST_TEXT])
