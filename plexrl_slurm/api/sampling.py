"""The Tinker protocol, part three: sampling, and the futures of all calls.

A result can be fetched again and again. An unknown future is 410 for a sample, upon which the
SDK samples anew, and 404 otherwise: to a training client both are the end, and 404 says why.
"""

from fastapi import APIRouter, Request, Response

from plexrl_slurm import wire
from plexrl_slurm.api import requests as ask
from plexrl_slurm.api import validate
from plexrl_slurm.api.auth import Who
from plexrl_slurm.api.border import catalogue_name, future, service_of
from plexrl_slurm.api.errors import as_json, refusal
from plexrl_slurm.api.futures import LongPolls, answer
from plexrl_slurm.api.service import Service
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, NotFound

router = APIRouter(prefix="/api/v1")


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, who: Who) -> Response:
    """A sampling session on a named snapshot or a base model."""
    asked = await ask.read(ask.CreateSamplingSession, request)
    service = service_of(request)
    base = asked.base_model
    session = await service.create_sampling_session(
        who,
        session_id=asked.session_id,
        sampling_session_seq_id=asked.sampling_session_seq_id,
        model_path=asked.model_path,
        base_model=None if base is None else catalogue_name(service.models, base),
    )
    return as_json({"type": "create_sampling_session", "sampling_session_id": session})


@router.get("/samplers/{sampling_session_id}")
async def sampler(sampling_session_id: str, request: Request, who: Who) -> Response:
    """What a sampling session samples."""
    info = await service_of(request).sampler_info(who, sampling_session_id)
    return as_json(
        {
            "sampler_id": info.sampling_session_id,
            "base_model": info.base_model,
            "model_path": info.model_path,
        }
    )


@router.post("/asample")
async def asample(request: Request, who: Who) -> Response:
    """Completions of one prompt; every sample is promised its sequence id at once."""
    service = service_of(request)
    raw, whole = await ask.body_of(request)
    if not whole:
        raise BadInput(f"the request is larger than {ask.BODY_LIMIT >> 20} MiB: shorten the prompt")
    body: wire.Sample | wire.Doomed
    seed_given = False
    identity: ask.Asample | ask.SamplingCall
    try:
        identity = asked = ask.parse(ask.Asample, raw)
        info = await service.sampler_info(who, asked.sampling_session_id)
        body = validate.sample_of(asked, _sampled_model(service, info.base_model))
        seed_given = asked.sampling_params.seed is not None
    except BadInput as error:
        identity = ask.parse(ask.SamplingCall, raw)
        body = wire.Doomed(str(error))
    call = await service.sample(
        who,
        sampling_session_id=identity.sampling_session_id,
        seq_id=identity.seq_id,
        body=body,
        seed_given=seed_given,
    )
    count = body.num_samples if isinstance(body, wire.Sample) else 1
    return future(call, sample_sequence_ids=[f"{call}:{index}" for index in range(count)])


def _sampled_model(service: Service, name: str) -> ModelSpec:
    model = service.models.get(name)
    if model is None:
        raise BadInput(f"the model {name} is no longer in this partition's catalogue")
    return model


# ---- futures ------------------------------------------------------------------------------


@router.post("/retrieve_future")
async def retrieve_future(request: Request, who: Who) -> Response:
    """Wait for a call to end; "try again" after a while."""
    asked = await ask.read(ask.RetrieveFuture, request)
    polls: LongPolls = request.app.state.polls
    waiting = service_of(request).outcome(who, asked.request_id, wait_s=polls.wait_s)
    try:
        outcome = await polls.wait(waiting)
    except NotFound as error:
        # 410 makes the SDK submit a sample anew; to a training call it says less than 404 does.
        if request.headers.get("x-tinker-request-type") == "Sample":
            return refusal(410, str(error))
        raise
    return answer(outcome, request_id=asked.request_id)


@router.post("/cancel_future")
async def cancel_future(request: Request, who: Who) -> Response:
    """Nobody waits for this sample any more."""
    asked = await ask.read(ask.RetrieveFuture, request)
    await service_of(request).cancel(who, asked.request_id)
    return as_json({})
