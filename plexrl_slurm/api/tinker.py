"""The Tinker protocol, part two: models and their training calls (docs/api.md).

A training call is never refused once its ``seq_id`` is known: it is accepted and fails in its
turn. The SDK counts on; a number that we never heard of would hold up every later call.
"""

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from plexrl_slurm import wire
from plexrl_slurm.api import proto, validate
from plexrl_slurm.api import requests as ask
from plexrl_slurm.api.auth import Who
from plexrl_slurm.api.border import catalogue_name, future, service_of
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.service import Principal, Service
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput

router = APIRouter(prefix="/api/v1")

#: Checking a larger forward_backward would hold up everybody's polls: a thread does it.
_THREAD_FROM_BYTES: Final = 128 << 10


@router.post("/create_model")
async def create_model(request: Request, who: Who) -> Response:
    """Rank 0 is full-parameter training; another rank fails the future."""
    asked = await ask.read(ask.CreateModel, request)
    _check_optimizer(asked.optimizer_config)
    lora = asked.lora_config or ask.LoraConfig()
    if lora.rank == 0 and not (lora.train_mlp and lora.train_attn and lora.train_unembed):
        raise BadInput(
            "rank 0 trains every parameter: leave train_mlp, train_attn and train_unembed true"
        )
    service = service_of(request)
    call, model_id = await service.create_model(
        who,
        session_id=asked.session_id,
        model_seq_id=asked.model_seq_id,
        base_model=catalogue_name(service.models, asked.base_model),
        rank=lora.rank,
        seed=lora.seed,
        user_metadata=asked.user_metadata or {},
    )
    return future(call, model_id=model_id)


def _check_optimizer(config: ask.OptimizerConfig | None) -> None:
    if config is not None and config.type != "adamw":
        raise BadInput(f"the optimizer {config.type!r} is not offered here: leave it at adamw")


@router.post("/get_info")
async def get_info(request: Request, who: Who) -> Response:
    """``tokenizer_id`` is the model's folder, so that ``get_tokenizer`` needs no network."""
    asked = await ask.read(ask.GetInfo, request)
    info = await service_of(request).model_info(who, asked.model_id)
    return as_json(
        {
            "type": "get_info",
            "model_id": info.model_id,
            "model_name": info.model.name,
            "is_lora": info.rank > 0,
            "lora_rank": info.rank,
            "model_data": {
                "arch": info.model.architecture,
                "model_name": info.model.name,
                "tokenizer_id": info.model.path,
            },
        }
    )


@router.post("/forward_backward")
async def forward_backward(request: Request, who: Who) -> Response:
    """Also ``forward``, which is the same without gradients."""
    service = service_of(request)
    raw, whole = await ask.body_of(request)
    encoding = request.headers.get("content-encoding", "")
    raw, all_unpacked = proto.unpacked(raw, encoding, ask.BODY_LIMIT)
    try:
        if not (whole and all_unpacked):
            raise BadInput(
                f"the request is larger than {ask.BODY_LIMIT >> 20} MiB: "
                "give fewer or shorter sequences"
            )
        message = proto.request_of(raw)
    except BadInput as error:
        identity = proto.identity_of(raw)
        if identity is None:
            raise
        return await _doomed(service, who, *identity, error)
    model_id, seq_id = message.model_id, message.seq_id
    _check_seq(seq_id)
    info = await service.model_info(who, model_id)
    body: wire.ForwardBackward | wire.Doomed
    try:
        if len(raw) < _THREAD_FROM_BYTES:
            body = _read_forward_backward(message, info.model)
        else:
            body = await asyncio.to_thread(_read_forward_backward, message, info.model)
    except BadInput as error:
        body = wire.Doomed(str(error))
    call = await service.submit(who, model_id=model_id, seq_id=seq_id, body=body)
    return future(call, model_id=model_id)


def _read_forward_backward(message: Any, model: ModelSpec) -> wire.ForwardBackward:
    return validate.checked_forward_backward(proto.forward_backward_of(message), model)


async def _doomed(
    service: Service, who: Principal, model_id: str, seq_id: int, error: BadInput
) -> Response:
    """Accept a call that cannot run, so that those behind it do not wait for it for ever."""
    _check_seq(seq_id)
    body = wire.Doomed(str(error))
    call = await service.submit(who, model_id=model_id, seq_id=seq_id, body=body)
    return future(call, model_id=model_id)


def _check_seq(seq_id: int) -> None:
    if seq_id < 1:
        raise BadInput(f"seq_id is {seq_id}: a model's calls are numbered from 1")


async def _identity(request: Request) -> tuple[bytes, ask.TrainingCall]:
    """A JSON training call's body and whose it is; after this, errors doom the call."""
    raw, whole = await ask.body_of(request)
    if not whole:
        raise BadInput(f"the request is larger than {ask.BODY_LIMIT >> 20} MiB")
    call = ask.parse(ask.TrainingCall, raw)
    _check_seq(call.seq_id)
    return raw, call


@router.post("/optim_step")
async def optim_step(request: Request, who: Who) -> Response:
    """One AdamW step."""
    raw, call = await _identity(request)
    body: wire.OptimStep | wire.Doomed
    try:
        asked = ask.parse(ask.OptimStep, raw)
        if asked.optimizer_params is not None:
            _check_optimizer(asked.optimizer_params)
        body = validate.optim_step_of(asked.adam_params or ask.AdamParams())
    except BadInput as error:
        body = wire.Doomed(str(error))
    accepted = await service_of(request).submit(
        who, model_id=call.model_id, seq_id=call.seq_id, body=body
    )
    return future(accepted, model_id=call.model_id)


@router.post("/save_weights")
async def save_weights(request: Request, who: Who) -> Response:
    """``save_state``. Checkpoints do not expire, so a time to live is ignored."""
    service = service_of(request)
    raw, call = await _identity(request)
    try:
        asked = ask.parse(ask.SaveWeights, raw)
        if asked.path is not None:
            validate.check_name(asked.path)
    except BadInput as error:
        return await _doomed(service, who, call.model_id, call.seq_id, error)
    accepted = await service.save_state(
        who,
        model_id=call.model_id,
        seq_id=call.seq_id,
        name=asked.path,
        overwrite=asked.overwrite,
    )
    return future(accepted, model_id=call.model_id)


@router.post("/load_weights")
async def load_weights(request: Request, who: Who) -> Response:
    """``load_state`` into a model, or a new model that starts from a checkpoint."""
    service = service_of(request)
    raw, whole = await ask.body_of(request)
    target = ask.parse(ask.LoadTarget, raw) if whole else ask.LoadTarget()
    if target.model_id is None or target.seq_id is None:
        asked = ask.parse(ask.LoadWeights, raw)
        return await _create_by_loading(service, who, asked)
    _check_seq(target.seq_id)
    try:
        asked = ask.parse(ask.LoadWeights, raw)
        validate.check_training_uri(asked.path)
    except BadInput as error:
        return await _doomed(service, who, target.model_id, target.seq_id, error)
    call = await service.load_state(
        who,
        model_id=target.model_id,
        seq_id=target.seq_id,
        uri=asked.path,
        optimizer=asked.optimizer,
    )
    return future(call, model_id=target.model_id)


async def _create_by_loading(service: Service, who: Principal, asked: ask.LoadWeights) -> Response:
    if asked.session_id is None or asked.model_seq_id is None:
        raise BadInput("load_weights needs model_id and seq_id, or session_id and model_seq_id")
    _check_optimizer(asked.optimizer_config)
    validate.check_training_uri(asked.path)
    base = asked.base_model
    call, model_id = await service.create_model(
        who,
        session_id=asked.session_id,
        model_seq_id=asked.model_seq_id,
        base_model=None if base is None else catalogue_name(service.models, base),
        rank=0,
        seed=None,
        user_metadata=asked.user_metadata or {},
        load_from=asked.path,
        optimizer=asked.optimizer,
    )
    return future(call, model_id=model_id)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, who: Who) -> Response:
    """A named snapshot, or an ephemeral one with its sampling session.

    ``kind="inflight"`` gets a snapshot too: its contract allows newer weights, never demands them.
    """
    service = service_of(request)
    raw, call = await _identity(request)
    try:
        asked = ask.parse(ask.SaveWeightsForSampler, raw)
        if asked.path is not None:
            validate.check_name(asked.path)
    except BadInput as error:
        return await _doomed(service, who, call.model_id, call.seq_id, error)
    accepted = await service.publish(
        who,
        model_id=call.model_id,
        seq_id=call.seq_id,
        name=asked.path,
        sampling_session_seq_id=asked.sampling_session_seq_id,
    )
    return future(accepted, model_id=call.model_id)


@router.post("/save_weights_external")
async def save_weights_external(request: Request, who: Who) -> Response:
    """Not offered, but it has a ``seq_id``, which must be consumed."""
    _, call = await _identity(request)
    error = BadInput(
        "save_weights_external is not offered here: save_weights_for_sampler writes safetensors"
    )
    return await _doomed(service_of(request), who, call.model_id, call.seq_id, error)


@router.post("/unload_model")
async def unload_model(request: Request, who: Who) -> Response:
    """Give a model's memory back."""
    asked = await ask.read(ask.GetInfo, request)
    call = await service_of(request).unload_model(who, asked.model_id)
    return future(call, model_id=asked.model_id)
