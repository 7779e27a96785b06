"""A service in memory: strict about order and ownership, with results one can work out by hand.

A model's only weight is a number, ``level``: 0 at first, and every optimizer step adds its
learning rate. A training token's logprob is ``-(token / 10) - level``; sample ``i`` of a prompt
is ``seed + i, seed + i + 1, …`` modulo the vocabulary.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plexrl_slurm import wire
from plexrl_slurm.api.service import (
    CheckpointInfo,
    JobSubmission,
    ModelInfo,
    ModelReady,
    Outcome,
    Pending,
    Principal,
    SamplerInfo,
    SnapshotReady,
)
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import (
    BadInput,
    DatabaseUnavailable,
    NotAdmitted,
    NotFound,
    PlexError,
    StorageFull,
    UnknownModel,
)
from plexrl_slurm.core.ids import CallId, JobId, SlurmId
from tests.api.fake_state import FakeState

TOKEN_A = "tml-job-a"
TOKEN_B = "tml-job-b"
#: What may have to wait for its turn.
Work = wire.Body | tuple[str, str]


@dataclass
class Call:
    job: JobId | None
    outcome: Outcome
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.ended.set()


@dataclass
class Model:
    info: ModelInfo
    job: JobId | None
    session: str
    level: float = 0.0
    steps: int = 0
    next_seq: int = 1
    waiting: dict[int, tuple[CallId, Work]] = field(default_factory=dict)
    calls: dict[int, CallId] = field(default_factory=dict)


class FakeService(FakeState):
    def __init__(self, models: Mapping[str, ModelSpec]) -> None:
        self.models = models
        self.sessions: dict[str, JobId | None] = {}
        self.session_keys: dict[str, str] = {}
        self.metadata: dict[str, Mapping[str, Any]] = {}
        self.finished: dict[str, str] = {}
        self.deployments: dict[str, Model] = {}
        self.creations: dict[str, CallId] = {}
        self.calls: dict[CallId, Call] = {}
        self.samplers: dict[str, tuple[JobId | None, SamplerInfo]] = {}
        self.samples: dict[tuple[str, int], CallId] = {}
        self.saved: dict[str, tuple[JobId | None, CheckpointInfo, float, int]] = {}
        #: What ran, in order: ``(model_id, seq_id, name of the body's class)``.
        self.ran: list[tuple[str, int, str]] = []
        self.sampled: list[tuple[wire.Sample | wire.Doomed, bool]] = []
        self.polled: list[str] = []
        self.cancelled: list[str] = []
        self.asked: list[tuple[str, object]] = []
        #: Uid of each Slurm job's owner, and why a job that is not admitted waits.
        self.owners: dict[SlurmId, int] = {}
        self.waiting: dict[SlurmId, str] = {}
        #: While set, samples stay pending with this reason.
        self.held: Pending | None = None
        #: The next submissions are recorded, and then answered with an error.
        self.stumbles: list[PlexError] = []

    # -- who ---------------------------------------------------------------------------------

    async def principal_of_token(self, token: str) -> Principal | None:
        jobs = {TOKEN_A: JobId(1), TOKEN_B: JobId(2)}
        if token not in jobs:
            return None
        return Principal(uid=1000 + jobs[token], user=f"user{jobs[token]}", job=jobs[token])

    # -- sessions ----------------------------------------------------------------------------

    async def open_session(
        self, who: Principal, *, idempotency_key: str, metadata: Mapping[str, Any]
    ) -> str:
        name = f"sess-{len(self.session_keys) + 1}"
        session = self.session_keys.setdefault(idempotency_key, name)
        self.sessions[session] = who.job
        self.metadata[session] = metadata
        self._stumble()
        return session

    def _session(self, who: Principal, session_id: str) -> str:
        if self.sessions.get(session_id) != who.job:
            raise NotFound("session", session_id)
        return session_id

    async def heartbeat(self, who: Principal, session_id: str) -> bool:
        return self._session(who, session_id) not in self.finished

    async def finish_session(self, who: Principal, session_id: str, *, reason: str) -> None:
        self.finished.setdefault(self._session(who, session_id), reason)

    # -- training ----------------------------------------------------------------------------

    def _call(self, who: Principal, outcome: Outcome) -> CallId:
        call = CallId(f"req-{len(self.calls) + 1}")
        self.calls[call] = Call(who.job, outcome)
        if not isinstance(outcome, Pending):
            self.calls[call].ended.set()
        return call

    def _stumble(self) -> None:
        if self.stumbles:
            raise self.stumbles.pop(0)

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
        model_id = f"{self._session(who, session_id)}:train:{model_seq_id}"
        self.asked.append(("create_model", (base_model, rank, seed, load_from, optimizer)))
        if model_id in self.creations:
            return self.creations[model_id], model_id
        outcome: Outcome = ModelReady(model_id=model_id)
        level, steps, name = 0.0, 0, base_model or ""
        if rank != 0:
            outcome = wire.Failed("LoRA is not offered here yet: ask for rank=0")
        elif load_from is not None:
            found = self.saved.get(load_from)
            if found is None or found[0] != who.job:
                outcome = wire.Failed(str(NotFound("checkpoint", load_from)))
            else:
                name = base_model or found[1].base_model
                level, steps = found[2], found[3] if optimizer else 0
        if isinstance(outcome, ModelReady) and name not in self.models:
            outcome = wire.Failed(str(UnknownModel(name, tuple(self.models))))
        if isinstance(outcome, ModelReady):
            info = ModelInfo(
                model_id=model_id,
                model=self.models[name],
                rank=rank,
                user_metadata=user_metadata,
                last_used_us=1_700_000_000_000_000,
            )
            self.deployments[model_id] = Model(
                info=info, job=who.job, session=session_id, level=level, steps=steps
            )
        self.creations[model_id] = self._call(who, outcome)
        self._stumble()
        return self.creations[model_id], model_id

    def _model(self, who: Principal, model_id: str) -> Model:
        model = self.deployments.get(model_id)
        if model is None or model.job != who.job:
            raise NotFound("model", model_id)
        return model

    async def model_info(self, who: Principal, model_id: str) -> ModelInfo:
        return self._model(who, model_id).info

    async def submit(
        self, who: Principal, *, model_id: str, seq_id: int, body: wire.Body
    ) -> CallId:
        return self._accept(who, model_id, seq_id, body)

    def _accept(self, who: Principal, model_id: str, seq_id: int, work: Work) -> CallId:
        model = self._model(who, model_id)
        if seq_id in model.calls:
            return model.calls[seq_id]
        call = self._call(who, Pending(queue_state="active", reason=""))
        model.calls[seq_id] = call
        model.waiting[seq_id] = (call, work)
        while model.next_seq in model.waiting:
            call_now, work_now = model.waiting.pop(model.next_seq)
            name = work_now[0] if isinstance(work_now, tuple) else type(work_now).__name__
            self.ran.append((model_id, model.next_seq, name))
            model.next_seq += 1
            try:
                self.calls[call_now].end(self._run(who, model, work_now))
            except BadInput as error:
                self.calls[call_now].end(wire.Failed(str(error)))
        self._stumble()
        return call

    def _run(self, who: Principal, model: Model, work: Work) -> Outcome:
        match work:
            case wire.ForwardBackward(data=data):
                logprobs = [
                    -datum.inputs["target_tokens"].numpy().astype(np.float32) / 10 - model.level
                    for datum in data
                ]
                loss = -sum(
                    float(np.vdot(each, datum.inputs["weights"].numpy().astype(np.float32)))
                    for each, datum in zip(logprobs, data, strict=True)
                    if "weights" in datum.inputs
                )
                arrays = [wire.Array.of(each.astype(np.float32)) for each in logprobs]
                return wire.TrainOutput(logprobs=arrays, metrics={"loss:sum": loss, "odd": 1.0})
            case wire.OptimStep(learning_rate=rate):
                model.level += rate
                model.steps += 1
                return wire.OptimOutput({"step": model.steps, "grad_norm": float("nan")})
            case wire.Doomed(message=message):
                return wire.Failed(message)
            case (kind, name):
                uri = f"tinker://{model.info.model_id}/{kind}/{name}"
                if uri in self.saved and kind == "weights":
                    raise BadInput(f"{uri} exists: choose another name or overwrite it")
                checkpoint = CheckpointInfo(
                    uri=uri,
                    kind=kind,
                    name=name,
                    model_id=model.info.model_id,
                    base_model=model.info.model.name,
                    rank=0,
                    bytes=1000,
                    created_us=1_700_000_000_000_000 + len(self.saved),
                )
                self.saved[uri] = (who.job, checkpoint, model.level, model.steps)
                if kind == "weights":
                    return wire.Saved(uri, 1000)
                return SnapshotReady(uri=uri, sampling_session_id=None)
            case wire.Publish(snapshot=session):
                return SnapshotReady(uri=None, sampling_session_id=session)
            case wire.LoadState(uri=uri, optimizer=optimizer):
                if uri not in self.saved or self.saved[uri][0] != who.job:
                    raise BadInput(str(NotFound("checkpoint", uri)))
                model.level = self.saved[uri][2]
                model.steps = self.saved[uri][3] if optimizer else 0
                return wire.Saved(uri, 1000)
            case _:
                raise AssertionError(work)

    async def save_state(
        self, who: Principal, *, model_id: str, seq_id: int, name: str | None, overwrite: bool
    ) -> CallId:
        if overwrite:
            self.saved.pop(f"tinker://{model_id}/weights/{name}", None)
        return self._accept(who, model_id, seq_id, ("weights", name or f"{seq_id:06}"))

    async def load_state(
        self, who: Principal, *, model_id: str, seq_id: int, uri: str, optimizer: bool
    ) -> CallId:
        body = wire.LoadState(path="", uri=uri, optimizer=optimizer)
        return self._accept(who, model_id, seq_id, body)

    async def publish(
        self,
        who: Principal,
        *,
        model_id: str,
        seq_id: int,
        name: str | None,
        sampling_session_seq_id: int | None,
    ) -> CallId:
        if name is not None:
            return self._accept(who, model_id, seq_id, ("sampler_weights", name))
        model = self._model(who, model_id)
        session = f"{model.session}:sample:{sampling_session_seq_id}"
        if seq_id not in model.calls:
            self._sampler(who, session, model.info.model.name, None)
        return self._accept(who, model_id, seq_id, wire.Publish(snapshot=session))

    async def unload_model(self, who: Principal, model_id: str) -> CallId:
        self._model(who, model_id)
        return self._call(who, ModelReady(model_id=model_id))

    # -- sampling ----------------------------------------------------------------------------

    def _sampler(self, who: Principal, session: str, base: str, path: str | None) -> None:
        info = SamplerInfo(sampling_session_id=session, base_model=base, model_path=path)
        self.samplers[session] = (who.job, info)

    async def create_sampling_session(
        self,
        who: Principal,
        *,
        session_id: str,
        sampling_session_seq_id: int,
        model_path: str | None,
        base_model: str | None,
    ) -> str:
        session = f"{self._session(who, session_id)}:sample:{sampling_session_seq_id}"
        if model_path is not None:
            base_model = (await self.checkpoint(who, model_path)).base_model
        if base_model is None or base_model not in self.models:
            raise UnknownModel(str(base_model), tuple(self.models))
        self._sampler(who, session, base_model, model_path)
        return session

    async def sampler_info(self, who: Principal, sampling_session_id: str) -> SamplerInfo:
        job, info = self.samplers.get(sampling_session_id, (None, None))
        if info is None or job != who.job:
            raise NotFound("sampling session", sampling_session_id)
        return info

    async def sample(
        self,
        who: Principal,
        *,
        sampling_session_id: str,
        seq_id: int,
        body: wire.Sample | wire.Doomed,
        seed_given: bool,
    ) -> CallId:
        info = await self.sampler_info(who, sampling_session_id)
        key = (sampling_session_id, seq_id)
        if key not in self.samples:
            self.sampled.append((body, seed_given))
            self.samples[key] = self._call(who, self.held or self._completions(info, body))
        self._stumble()
        return self.samples[key]

    def _completions(
        self, info: SamplerInfo, body: wire.Sample | wire.Doomed
    ) -> wire.SampleOutput | wire.Failed:
        if isinstance(body, wire.Doomed):
            return wire.Failed(body.message)
        vocabulary = self.models[info.base_model].vocab_size
        sequences = []
        for index in range(body.num_samples):
            start = body.seed + index
            tokens = [(start + at) % vocabulary for at in range(body.max_tokens)]
            top = _topk(len(tokens), body.topk_sample_logprobs)
            logprobs = [-token / 10 for token in tokens]
            sequences.append(wire.Sequence(tokens, logprobs, "length", top))
        prompt: list[float | None] | None = None
        if body.prompt_logprobs:
            prompt = [None, *(-token / 10 for token in body.prompt[1:])]
        return wire.SampleOutput(
            sequences=sequences,
            prompt_logprobs=prompt,
            topk_prompt=_topk(len(body.prompt), body.topk_prompt_logprobs),
            cached_tokens=1,
        )

    # -- futures -----------------------------------------------------------------------------

    async def outcome(self, who: Principal, request_id: str, *, wait_s: float) -> Outcome:
        call = self.calls.get(CallId(request_id))
        if call is None or call.job != who.job:
            raise NotFound("call", request_id)
        self.polled.append(request_id)
        try:
            await asyncio.wait_for(call.ended.wait(), wait_s)
        except TimeoutError:
            assert isinstance(call.outcome, Pending)
        return call.outcome

    async def cancel(self, who: Principal, request_id: str) -> None:
        self.cancelled.append(request_id)

    # -- checkpoints -------------------------------------------------------------------------

    async def checkpoints(self, who: Principal, *, model_id: str | None) -> list[CheckpointInfo]:
        mine = [info for job, info, _, _ in self.saved.values() if job == who.job]
        return [info for info in mine if model_id in (None, info.model_id)]

    async def checkpoint(self, who: Principal, uri: str) -> CheckpointInfo:
        if uri not in self.saved or self.saved[uri][0] != who.job:
            raise NotFound("checkpoint", uri)
        return self.saved[uri][1]

    async def delete_checkpoint(self, who: Principal, uri: str) -> None:
        await self.checkpoint(who, uri)
        del self.saved[uri]

    async def training_runs(self, who: Principal) -> list[ModelInfo]:
        return [each.info for each in self.deployments.values() if each.job == who.job]

    # -- jobs --------------------------------------------------------------------------------

    async def submit_job(self, who: Principal, job: JobSubmission) -> dict[str, Any]:
        if job.name == "no room":
            raise StorageFull("the spool", 1 << 20, 0)
        if job.name == "no database":
            raise DatabaseUnavailable("sqlite:///x", "it is locked")
        for model in job.models:
            if model not in self.models:
                raise UnknownModel(model, tuple(self.models))
        self.asked.append(("submit_job", job))
        return {"job_id": 7, "token": "tml-seven", "user": who.user, "env": {}}

    async def bind_job(self, who: Principal, job_id: JobId, *, slurm_id: str) -> dict[str, Any]:
        return {"job_id": job_id, "slurm_id": slurm_id}

    async def credentials(self, who: Principal, slurm_id: SlurmId) -> dict[str, Any]:
        if self.owners.get(slurm_id) != who.uid:
            raise NotFound("job", slurm_id)
        if slurm_id in self.waiting:
            raise NotAdmitted(slurm_id, self.waiting[slurm_id])
        return {"job_id": 7, "token": "tml-seven", "env": {"TINKER_API_KEY": "tml-seven"}}

    async def cancel_job(
        self, who: Principal, job_id: JobId, *, reason: str, keep_slurm_job: bool = False
    ) -> dict[str, Any]:
        if job_id != 7:
            raise NotFound("job", str(job_id))
        self.asked.append(("cancel_job", keep_slurm_job))
        return {"job_id": job_id, "reason": reason}

    async def jobs(
        self, who: Principal, *, user: str | None, states: Sequence[str], ended: bool
    ) -> list[dict[str, Any]]:
        return [{"user": user, "states": list(states), "ended": ended}]

    async def explain_job(self, who: Principal, job_id: JobId) -> dict[str, Any]:
        return {"job_id": job_id, "obstacles": []}

    async def nodes(self, who: Principal) -> dict[str, Any]:
        return {"wpgs": [], "admin": who.admin, "uid": who.uid, "job": who.job}

    async def timeline(
        self, who: Principal, *, since_us: int, until_us: int
    ) -> list[dict[str, Any]]:
        return [{"since_us": since_us, "until_us": until_us}]

    async def image_moves(
        self, who: Principal, *, since_us: int, until_us: int
    ) -> list[dict[str, Any]]:
        return [{"deployment": "m", "at_us": since_us}]

    async def partition_state(self, who: Principal) -> dict[str, Any]:
        return {"images": [], "tiers": [], "uid": who.uid}

    async def job_state(self, who: Principal, job_id: JobId) -> dict[str, Any]:
        if job_id != 7:
            raise NotFound("job", str(job_id))
        return {"job_id": job_id, "images": []}

    async def verify_state(self, who: Principal, job_id: JobId, *, uri: str) -> dict[str, Any]:
        return {"uri": uri, "fine": True}

    async def state_files(self, who: Principal, job_id: JobId, *, uri: str) -> dict[str, Any]:
        return {"uri": uri, "files": []}

    async def state_piece(
        self,
        who: Principal,
        job_id: JobId,
        *,
        uri: str,
        name: str,
        version: str,
        offset: int,
        length: int,
    ) -> bytes:
        return f"{uri} {name} {version}".encode()[offset : offset + length]

    async def drain(self, who: Principal, *, on: bool) -> dict[str, Any]:
        return {"draining": on}

    async def release(self, who: Principal) -> dict[str, Any]:
        return {"released": "h1"}


def _topk(length: int, k: int) -> wire.TopK | None:
    if k == 0:
        return None
    tokens = np.arange(length * k, dtype=np.int32).reshape(length, k)
    return wire.TopK(wire.Array.of(tokens), wire.Array.of(-tokens.astype(np.float32)))
