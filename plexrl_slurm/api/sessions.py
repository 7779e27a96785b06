"""The Tinker protocol, part one: what a client asks before it works, and its sessions."""

import uuid
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from plexrl_slurm.api import requests as ask
from plexrl_slurm.api.auth import Who
from plexrl_slurm.api.border import service_of
from plexrl_slurm.api.errors import as_json, refusal

router = APIRouter(prefix="/api/v1")

#: ``sample_enable_stuck_detection`` off: a wait for Slurm may outlast the SDK's two hours.
#: ``use_pyqwest_transport`` on: 600 samples at once take a quarter to a half of httpx' time.
CLIENT_CONFIG: Final[Mapping[str, Any]] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_enable_stuck_detection": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "use_pyqwest_transport": True,
}
DYNAMIC_CONFIG: Final[Mapping[str, Any]] = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


@router.get("/healthz")
async def healthz() -> Response:
    """Needs no key."""
    return as_json({"status": "ok"})


@router.post("/client/config")
async def client_config(who: Who) -> Response:
    """Flags that a client keeps for its life."""
    return as_json(CLIENT_CONFIG)


@router.post("/client/dynamic_config")
async def client_dynamic_config(who: Who) -> Response:
    """Flags that a client fetches again."""
    return as_json(DYNAMIC_CONFIG)


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request, who: Who) -> Response:
    """The catalogue."""
    models = [
        {
            "model_name": model.name,
            "max_context_length": model.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        for model in service_of(request).models.values()
    ]
    return as_json({"supported_models": models})


@router.post("/create_session")
async def create_session(request: Request, who: Who) -> Response:
    """A retried request carries the same idempotency key, and gets the same session."""
    asked = await ask.read(ask.CreateSession, request)
    metadata = dict(asked.user_metadata or {})
    session = await service_of(request).open_session(
        who,
        idempotency_key=request.headers.get("x-idempotency-key") or uuid.uuid4().hex,
        metadata=metadata,
    )
    return as_json({"type": "create_session", "session_id": session})


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, who: Who) -> Response:
    """410 ends the client's heartbeat loop, so it is sent for finished sessions only."""
    asked = await ask.read(ask.SessionHeartbeat, request)
    if await service_of(request).heartbeat(who, asked.session_id):
        return as_json({"type": "session_heartbeat"})
    return refusal(410, f"session {asked.session_id} is finished")


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, request: Request, who: Who) -> Response:
    """End it; the first reason wins."""
    asked = await ask.read(ask.FinishSession, request)
    reason = asked.reason.type + (f": {asked.detail}" if asked.detail else "")
    await service_of(request).finish_session(who, session_id, reason=reason)
    return as_json({})


@router.post("/telemetry")
async def telemetry(request: Request, who: Who) -> Response:
    """Accepted and dropped: it quotes users' code and data, which is no business of ours."""
    await ask.body_of(request)
    return as_json({"status": "accepted"})
