"""What the HTTP border needs of the daemon. ``plexrl_slurm.daemons.service`` implements it.

All methods raise the errors of :mod:`plexrl_slurm.core.errors`: ``NotFound`` for what is not
there or not the caller's, ``Denied``, ``BadInput``, ``StorageFull``, ``DatabaseUnavailable``.
Methods that accept a training call never raise for bad *content*: they record a doomed call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.ids import CallId, JobId, SlurmId


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks: a job (by its token), or a user (by the socket's peer uid, or by MUNGE)."""

    uid: int
    user: str
    #: Set when the caller is a job's controller.
    job: JobId | None = None
    #: True for root and the service user: may see and cancel everybody's jobs.
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A call that has not ended."""

    #: ``active``, ``paused_capacity`` or ``paused_rate_limit`` (the SDK's words).
    queue_state: str
    #: What it waits for, for a person; "" if there is nothing to say.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReady:
    """Result of ``create_model``/create-via-load: the SDK wants the id."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReady:
    """Result of ``save_weights_for_sampler``: a uri for a named one, a session for an ephemeral."""

    uri: str | None
    sampling_session_id: str | None


#: Everything that ``retrieve_future`` may have to answer.
Outcome: TypeAlias = Pending | ModelReady | SnapshotReady | wire.Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What ``get_info`` tells of a training deployment."""

    model_id: str
    model: ModelSpec
    rank: int
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    #: When it was last called, for `tinker run list`; 0 if nobody keeps that.
    last_used_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """What ``GET /samplers/{id}`` tells."""

    sampling_session_id: str
    base_model: str
    #: ``tinker://…`` of a named snapshot; ``None`` for a base model or an ephemeral one.
    model_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One named checkpoint."""

    uri: str
    #: ``weights`` (training state) or ``sampler_weights``.
    kind: str
    name: str
    model_id: str
    base_model: str
    rank: int
    bytes: int
    created_us: int
    user_metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmission:
    """What ``plexrl sbatch`` asks the daemon to queue."""

    partition: str
    name: str
    account: str
    #: Catalogue names from ``#PLEXRL --model``; checked at submission.
    models: Sequence[str]
    priority: int
    seed: int
    #: Path of the script as the user gave it, for display.
    script: str
    #: Remaining ``#PLEXRL`` options.
    options: Mapping[str, str] = field(default_factory=dict)


class Import(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that are to become a checkpoint."""

    name: str
    #: Of the catalogue; "": the one that they fit.
    model: str
    #: As ``config.json`` has it.
    config: dict[str, Any]
    #: ``name -> (dtype, shape)``, as the safetensors headers have them.
    tensors: dict[str, tuple[str, list[int]]]
    #: ``file -> bytes``.
    files: dict[str, int]


class Service(Protocol):
    """The daemon, seen from HTTP."""

    models: Mapping[str, ModelSpec]

    # -- who ---------------------------------------------------------------------------------
    async def principal_of_token(self, token: str) -> Principal | None:
        """The job behind an API key, or ``None`` (wrong, or its job is over)."""

    # -- sessions ----------------------------------------------------------------------------
    async def open_session(
        self, who: Principal, *, idempotency_key: str, metadata: Mapping[str, Any]
    ) -> str:
        """A new session id; the same key gives the same session."""

    async def heartbeat(self, who: Principal, session_id: str) -> bool:
        """Note that the client lives; false if the session is finished (answer 410)."""

    async def finish_session(self, who: Principal, session_id: str, *, reason: str) -> None:
        """End it; the first reason wins."""

    # -- training ----------------------------------------------------------------------------
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
        """``(request id, model id)``; repeated ``(session_id, model_seq_id)`` gives the same.

        ``load_from``: a ``tinker://…/weights/NAME`` to start from (create-via-load). An unknown
        model, a rank other than 0, or a missing checkpoint fails the *future*.
        """

    async def model_info(self, who: Principal, model_id: str) -> ModelInfo: ...

    async def submit(
        self, who: Principal, *, model_id: str, seq_id: int, body: wire.Body
    ) -> CallId:
        """Accept a training call, durably. A repeat of ``(model_id, seq_id)`` gives the first's id.

        ``body`` is any of ForwardBackward, OptimStep, Doomed; for saves, loads and publishes use
        the methods below, which fill in paths.
        """

    async def save_state(
        self, who: Principal, *, model_id: str, seq_id: int, name: str | None, overwrite: bool
    ) -> CallId: ...

    async def load_state(
        self, who: Principal, *, model_id: str, seq_id: int, uri: str, optimizer: bool
    ) -> CallId: ...

    async def publish(
        self,
        who: Principal,
        *,
        model_id: str,
        seq_id: int,
        name: str | None,
        sampling_session_seq_id: int | None,
    ) -> CallId:
        """``save_weights_for_sampler``: named, or ephemeral with a new sampling session."""

    async def unload_model(self, who: Principal, model_id: str) -> CallId: ...

    # -- sampling ----------------------------------------------------------------------------
    async def create_sampling_session(
        self,
        who: Principal,
        *,
        session_id: str,
        sampling_session_seq_id: int,
        model_path: str | None,
        base_model: str | None,
    ) -> str:
        """A sampling session on a named snapshot or a base model; repeats give the same."""

    async def sampler_info(self, who: Principal, sampling_session_id: str) -> SamplerInfo: ...

    async def sample(
        self,
        who: Principal,
        *,
        sampling_session_id: str,
        seq_id: int,
        body: wire.Sample | wire.Doomed,
        seed_given: bool,
    ) -> CallId:
        """Accept a sample call. Unless ``seed_given`` the service derives the body's seed."""

    # -- futures -----------------------------------------------------------------------------
    async def outcome(self, who: Principal, request_id: str, *, wait_s: float) -> Outcome:
        """Wait up to ``wait_s`` for the call to end. Raises ``NotFound`` for an unknown one."""

    async def cancel(self, who: Principal, request_id: str) -> None: ...

    # -- checkpoints -------------------------------------------------------------------------
    async def checkpoints(
        self, who: Principal, *, model_id: str | None
    ) -> list[CheckpointInfo]: ...

    async def checkpoint(self, who: Principal, uri: str) -> CheckpointInfo: ...

    async def delete_checkpoint(self, who: Principal, uri: str) -> None: ...

    async def training_runs(self, who: Principal) -> list[ModelInfo]: ...

    # -- jobs (control plane; answers are JSON-ready dicts documented in docs/api.md) ---------
    async def submit_job(self, who: Principal, job: JobSubmission) -> dict[str, Any]:
        """Queue a row. ``{"job_id", "token", "env": {name: value}}``; not runnable until bound."""

    async def bind_job(self, who: Principal, job_id: JobId, *, slurm_id: str) -> dict[str, Any]: ...

    async def credentials(self, who: Principal, slurm_id: SlurmId) -> dict[str, Any]:
        """The answer of :meth:`submit_job` again, for the caller's own live job of that Slurm id.

        Raises ``NotFound`` for another's or none, ``NotAdmitted`` before it is admitted. The
        caller is a user, not a job's token.
        """

    async def cancel_job(
        self, who: Principal, job_id: JobId, *, reason: str, keep_slurm_job: bool = False
    ) -> dict[str, Any]: ...

    async def jobs(
        self, who: Principal, *, user: str | None, states: Sequence[str], ended: bool
    ) -> list[dict[str, Any]]: ...

    async def explain_job(self, who: Principal, job_id: JobId) -> dict[str, Any]: ...

    async def priorities(self, who: Principal) -> dict[str, Any]:
        """Waiting jobs in their order, with the parts of their priorities."""

    async def starts(self, who: Principal) -> dict[str, Any]:
        """When waiting jobs are expected to start."""

    async def nodes(self, who: Principal) -> dict[str, Any]:
        """WPGs with state, resident, queue lengths; holds; for ``plexrl sinfo``."""

    async def timeline(
        self, who: Principal, *, since_us: int, until_us: int
    ) -> list[dict[str, Any]]: ...

    async def image_moves(
        self, who: Principal, *, since_us: int, until_us: int
    ) -> list[dict[str, Any]]:
        """Into which tiers images went, and out of which."""

    # -- state (JSON-ready dicts too) ---------------------------------------------------------
    async def partition_state(self, who: Principal) -> dict[str, Any]:
        """Every living image and the tiers it is in; bytes of every tier."""

    async def job_state(self, who: Principal, job_id: JobId) -> dict[str, Any]:
        """Deployments, images and checkpoints of one job; ended ones have the last only."""

    async def verify_state(self, who: Principal, job_id: JobId, *, uri: str) -> dict[str, Any]:
        """Read a checkpoint's files and compare them with its manifest."""

    async def state_files(self, who: Principal, job_id: JobId, *, uri: str) -> dict[str, Any]:
        """The files that make named sampler weights a Hugging Face model folder."""

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
        """Bytes of one of these files; ``BadInput`` if it is not ``version`` any more."""

    async def evict_state(
        self, who: Principal, job_id: JobId, *, deployment: str, to: str
    ) -> dict[str, Any]:
        """Have images leave host memory; ``BadInput`` says why one stays."""

    async def begin_import(self, who: Principal, job_id: JobId, asked: Import) -> dict[str, Any]:
        """Weights are to come; ``BadInput`` if they fit no model of the catalogue."""

    async def import_piece(
        self, who: Principal, job_id: JobId, import_id: str, *, name: str, offset: int, data: bytes
    ) -> dict[str, Any]:
        """Bytes of one of its files."""

    async def finish_import(
        self, who: Principal, job_id: JobId, import_id: str, *, sha256: Mapping[str, str]
    ) -> dict[str, Any]:
        """All of it has come: it is a checkpoint that ``load_state`` takes."""

    async def drain(self, who: Principal, *, on: bool) -> dict[str, Any]: ...

    async def release(self, who: Principal) -> dict[str, Any]:
        """Give the hold back: jobs end, the daemon follows."""
