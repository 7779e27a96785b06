"""The Tinker protocol, part four: training runs and checkpoints, as the ``tinker`` CLI lists them.

Only one's own are listed. A checkpoint's id is ``weights/NAME`` or ``sampler_weights/NAME``.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeAlias

from fastapi import APIRouter, Query, Request, Response

from plexrl_slurm.api import requests as ask
from plexrl_slurm.api.auth import Who
from plexrl_slurm.api.border import service_of
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.service import CheckpointInfo, ModelInfo, Principal
from plexrl_slurm.core.errors import NotFound

router = APIRouter(prefix="/api/v1")

Count: TypeAlias = Annotated[int, Query(ge=0)]

_TYPES: Final = {"weights": "training", "sampler_weights": "sampler"}


def _time(us: int) -> str:
    return datetime.fromtimestamp(us / 1_000_000, UTC).isoformat()


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    # The SDK reads text only.
    return {key: value if isinstance(value, str) else str(value) for key, value in metadata.items()}


def _checkpoint(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{info.kind}/{info.name}",
        "checkpoint_type": _TYPES[info.kind],
        "time": _time(info.created_us),
        "tinker_path": info.uri,
        "size_bytes": info.bytes,
        "public": False,
        "user_metadata": _texts(info.user_metadata),
    }


def _run(who: Principal, info: ModelInfo, checkpoints: Sequence[CheckpointInfo]) -> dict[str, Any]:
    newest = {
        kind: max(
            (each for each in checkpoints if each.model_id == info.model_id and each.kind == kind),
            key=lambda each: each.created_us,
            default=None,
        )
        for kind in _TYPES
    }
    times = [each.created_us for each in newest.values() if each is not None]
    training, sampler = newest["weights"], newest["sampler_weights"]
    return {
        "training_run_id": info.model_id,
        "base_model": info.model.name,
        "model_owner": who.user,
        "is_lora": info.rank > 0,
        "lora_rank": info.rank or None,
        "last_request_time": _time(max([info.last_used_us, *times])),
        "last_checkpoint": None if training is None else _checkpoint(training),
        "last_sampler_checkpoint": None if sampler is None else _checkpoint(sampler),
        "user_metadata": _texts(info.user_metadata),
    }


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


@router.get("/training_runs")
async def training_runs(
    request: Request, who: Who, limit: Count = 20, offset: Count = 0
) -> Response:
    """One page of runs; the SDK insists on the cursor."""
    service = service_of(request)
    runs = await service.training_runs(who)
    checkpoints = await service.checkpoints(who, model_id=None)
    page = runs[offset : offset + limit]
    return as_json(
        {
            "training_runs": [_run(who, info, checkpoints) for info in page],
            "cursor": _cursor(offset, limit, len(runs)),
        }
    )


@router.get("/training_runs/{run_id}")
async def training_run(run_id: str, request: Request, who: Who) -> Response:
    """One run, ended ones too."""
    service = service_of(request)
    runs = await service.training_runs(who)
    info = next((each for each in runs if each.model_id == run_id), None)
    if info is None:
        raise NotFound("training run", run_id)
    checkpoints = await service.checkpoints(who, model_id=run_id)
    return as_json(_run(who, info, checkpoints))


@router.get("/training_runs/{run_id}/checkpoints")
async def checkpoints_of_run(run_id: str, request: Request, who: Who) -> Response:
    """All of one run's checkpoints, unpaged."""
    found = await service_of(request).checkpoints(who, model_id=run_id)
    return as_json({"checkpoints": [_checkpoint(each) for each in found]})


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def delete_checkpoint(
    run_id: str, kind: str, name: str, request: Request, who: Who
) -> Response:
    """Delete it for good."""
    await service_of(request).delete_checkpoint(who, f"tinker://{run_id}/{kind}/{name}")
    return as_json({})


@router.get("/checkpoints")
async def checkpoints(
    request: Request, who: Who, limit: Count = 100, offset: Count = 0
) -> Response:
    """One page of all one's checkpoints."""
    found = await service_of(request).checkpoints(who, model_id=None)
    page = found[offset : offset + limit]
    return as_json(
        {
            "checkpoints": [_checkpoint(each) for each in page],
            "cursor": _cursor(offset, limit, len(found)),
        }
    )


@router.post("/weights_info")
async def weights_info(request: Request, who: Who) -> Response:
    """What a checkpoint is of; asked before loading one."""
    asked = await ask.read(ask.WeightsInfo, request)
    info = await service_of(request).checkpoint(who, asked.tinker_path)
    return as_json(
        {
            "base_model": info.base_model,
            "is_lora": info.rank > 0,
            "lora_rank": info.rank or None,
        }
    )
