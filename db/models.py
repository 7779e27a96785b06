"""Tables. Columns are facts; whatever can be computed from them is a report.

Instants are UTC microseconds (``*_us``), sizes are bytes, states are stored by their value.
Nothing here decides anything; the verbs live in the modules named after them.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Enum,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    UniqueConstraint,
    desc,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from plexrl_slurm.core.messages import Activity, FunctionKind, Pool
from plexrl_slurm.core.states import JobState


class DeploymentState(StrEnum):
    """Life of a training deployment's row."""

    PLACED = "placed"
    DROPPED = "dropped"


class SnapshotState(StrEnum):
    """Life of a snapshot."""

    WAITING = "waiting"
    READY = "ready"
    FAILED = "failed"
    DROPPED = "dropped"


class CallState(StrEnum):
    """Life of a call."""

    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


class CheckpointKind(StrEnum):
    """Training state, or weights to sample from."""

    WEIGHTS = "weights"
    SAMPLER_WEIGHTS = "sampler_weights"


class HoldState(StrEnum):
    """Life of a hold."""

    WAITING = "waiting"
    UP = "up"
    ENDED = "ended"


#: SQLite numbers rows by itself only if the key's type is exactly INTEGER (64 bits there).
_KEY = BigInteger().with_variant(Integer(), "sqlite")
RowKey = Annotated[int, mapped_column(_KEY, primary_key=True)]
TextKey = Annotated[str, mapped_column(primary_key=True)]
JobRef = Annotated[int, mapped_column(ForeignKey("jobs.id"))]

_ENUMS = (
    Activity,
    CallState,
    CheckpointKind,
    DeploymentState,
    FunctionKind,
    HoldState,
    JobState,
    Pool,
    SnapshotState,
)


class Base(DeclarativeBase):
    """Names every constraint, so that Alembic can drop it, and stores enum *values*."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        dict[str, Any]: JSON,
        list[str]: JSON,
        **{
            kind: Enum(
                kind,
                native_enum=False,
                length=32,
                values_callable=lambda members: [member.value for member in members],
            )
            for kind in _ENUMS
        },
    }


class JobRow(Base):
    """One submitted job: the queue. Only ``queue`` writes it."""

    __tablename__ = "jobs"
    __table_args__ = (
        # In the order of a claim, which then reads one entry instead of sorting all.
        Index("ix_jobs_claim", "partition", "state", desc("priority"), "id"),
        Index(None, "slurm_id"),
        UniqueConstraint("token_sha256"),
    )

    id: Mapped[RowKey]
    partition: Mapped[str]
    name: Mapped[str]
    uid: Mapped[int]
    user: Mapped[str]
    account: Mapped[str]
    #: ``None`` until the user's Slurm job exists; until then nobody may claim the row.
    slurm_id: Mapped[str | None]
    #: As the user named it, for display.
    script: Mapped[str]
    state: Mapped[JobState]
    #: Larger is claimed first; within one value first come, first served.
    priority: Mapped[int]
    seed: Mapped[int]
    #: Catalogue names the script declared.
    models: Mapped[list[str]]
    options: Mapped[dict[str, Any]]
    #: Of the job's API key, in hex; the key itself is stored nowhere.
    token_sha256: Mapped[str | None]
    #: Why it is in this state, for a person.
    reason: Mapped[str]
    #: Every reason why it was not admitted when last tried; sentences.
    obstacles: Mapped[list[str]]
    submitted_us: Mapped[int]
    admitted_us: Mapped[int | None]
    started_us: Mapped[int | None]
    ended_us: Mapped[int | None]
    exit_code: Mapped[int | None]
    #: Epoch of the daemon that has claimed it.
    owner: Mapped[str | None]
    #: After this instant another daemon may take it.
    lease_until_us: Mapped[int | None]
    #: How often a claim was given back because its lease had expired.
    requeues: Mapped[int]
    #: The job has ended and its last ledger row is written.
    billed: Mapped[bool]
    #: Home WPG of each pool, once it has one.
    homes: Mapped[dict[str, Any]]


class JobEventRow(Base):
    """One line of a job's story, for ``explain``."""

    __tablename__ = "job_events"
    __table_args__ = (Index(None, "job_id", "id"),)

    id: Mapped[RowKey]
    job_id: Mapped[JobRef]
    at_us: Mapped[int]
    #: One word to filter by: ``submitted``, ``claimed``, ``obstacles``, ...
    kind: Mapped[str]
    text: Mapped[str]


class SessionRow(Base):
    """One client of a job (a Tinker session). The same key gives the same session."""

    __tablename__ = "sessions"
    __table_args__ = (UniqueConstraint("job_id", "idempotency_key"),)

    id: Mapped[TextKey]
    job_id: Mapped[JobRef]
    idempotency_key: Mapped[str]
    #: ``metadata`` is taken by SQLAlchemy.
    user_metadata: Mapped[dict[str, Any]] = mapped_column("metadata")
    created_us: Mapped[int]
    heartbeat_us: Mapped[int]
    finished_us: Mapped[int | None]
    finish_reason: Mapped[str]


class DeploymentRow(Base):
    """One training deployment; its id is the Tinker ``model_id``.

    A client that lost the answer to ``create_model`` asks again with the same
    ``(session, model_seq)`` and gets the first deployment.
    """

    __tablename__ = "deployments"
    __table_args__ = (UniqueConstraint("session_id", "model_seq_id"), Index(None, "job_id"))

    id: Mapped[TextKey]
    job_id: Mapped[JobRef]
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    model_seq_id: Mapped[int]
    base_model: Mapped[str]
    #: Its home.
    wpg: Mapped[str]
    rank: Mapped[int]
    seed: Mapped[int]
    user_metadata: Mapped[dict[str, Any]]
    state: Mapped[DeploymentState]
    #: Progress in its newest complete image; ``None``: there is no image.
    image_seq: Mapped[int | None]
    image_part: Mapped[int | None]
    image_bytes: Mapped[int]
    #: Progress in its newest image in the durable tier, and where that lies.
    durable_seq: Mapped[int | None]
    durable_part: Mapped[int | None]
    durable_path: Mapped[str]
    created_us: Mapped[int]
    dropped_us: Mapped[int | None]


class SnapshotRow(Base):
    """One immutable version of sampling weights, or a base model as it is."""

    __tablename__ = "snapshots"
    __table_args__ = (Index(None, "job_id"), Index(None, "deployment_id"), Index(None, "uri"))

    id: Mapped[TextKey]
    job_id: Mapped[JobRef]
    #: ``None``: a base model.
    deployment_id: Mapped[str | None] = mapped_column(ForeignKey("deployments.id"))
    base_model: Mapped[str]
    #: The publishing call's seq: the version.
    seq: Mapped[int]
    wpg: Mapped[str]
    #: ``tinker://...`` of a named one.
    uri: Mapped[str | None]
    path: Mapped[str]
    #: Snapshots of equal content share residency.
    content: Mapped[str]
    state: Mapped[SnapshotState]
    bytes: Mapped[int]
    created_us: Mapped[int]
    ready_us: Mapped[int | None]


class SamplingSessionRow(Base):
    """Pins one snapshot while a client samples from it."""

    __tablename__ = "sampling_sessions"
    __table_args__ = (UniqueConstraint("session_id", "seq"), Index(None, "snapshot_id"))

    id: Mapped[TextKey]
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    seq: Mapped[int]
    snapshot_id: Mapped[str] = mapped_column(ForeignKey("snapshots.id"))
    job_id: Mapped[JobRef]
    created_us: Mapped[int]
    last_used_us: Mapped[int]
    closed_us: Mapped[int | None]


class CallRow(Base):
    """One training call. ``(deployment, seq)`` is its identity; bodies are in the spool.

    A controller that lost its connection repeats the call with the same seq; the
    constraint turns the repeat into the first call instead of a second one.
    """

    __tablename__ = "calls"
    __table_args__ = (
        UniqueConstraint("deployment_id", "seq"),
        # Only what waits is in it: a restart reads it, and it stays small.
        Index(
            "ix_calls_waiting",
            "job_id",
            sqlite_where=text("state = 'waiting'"),
            postgresql_where=text("state = 'waiting'"),
        ),
    )

    id: Mapped[TextKey]
    deployment_id: Mapped[str] = mapped_column(ForeignKey("deployments.id"))
    job_id: Mapped[JobRef]
    seq: Mapped[int]
    kind: Mapped[FunctionKind]
    tokens: Mapped[int]
    parts: Mapped[int]
    state: Mapped[CallState]
    #: The spool still has its body: a replay may need it.
    body_kept: Mapped[bool]
    #: The spool has its result: a repeat of the question gets it.
    result_kept: Mapped[bool]
    submitted_us: Mapped[int]
    ended_us: Mapped[int | None]
    #: Why it failed.
    message: Mapped[str]


class ImageRow(Base):
    """One complete copy of a deployment's state in a tier."""

    __tablename__ = "images"
    __table_args__ = (Index(None, "deployment_id"),)

    id: Mapped[RowKey]
    deployment_id: Mapped[str] = mapped_column(ForeignKey("deployments.id"))
    wpg: Mapped[str]
    tier: Mapped[str]
    #: Progress it contains.
    seq: Mapped[int]
    part: Mapped[int]
    bytes: Mapped[int]
    completed_us: Mapped[int]
    dropped_us: Mapped[int | None]


class CheckpointRow(Base):
    """One named checkpoint in the durable tier; it outlives its job."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("uri"), Index(None, "uid"), Index(None, "deployment_id"))

    id: Mapped[RowKey]
    job_id: Mapped[JobRef]
    uid: Mapped[int]
    uri: Mapped[str]
    kind: Mapped[CheckpointKind]
    name: Mapped[str]
    deployment_id: Mapped[str] = mapped_column(ForeignKey("deployments.id"))
    base_model: Mapped[str]
    rank: Mapped[int]
    path: Mapped[str]
    bytes: Mapped[int]
    user_metadata: Mapped[dict[str, Any]]
    created_us: Mapped[int]
    expires_us: Mapped[int | None]


class HoldRow(Base):
    """GPUs kept for PlexRL by one Slurm job (or by local child processes)."""

    __tablename__ = "holds"
    __table_args__ = (Index(None, "partition", "state"),)

    id: Mapped[TextKey]
    partition: Mapped[str]
    backend: Mapped[str]
    slurm_id: Mapped[str]
    state: Mapped[HoldState]
    #: Fencing token: agents of another epoch may write nothing.
    epoch: Mapped[str]
    #: When it was submitted.
    started_us: Mapped[int]
    ended_us: Mapped[int | None]
    #: When Slurm gave it its nodes, the last time; ``None`` while it waits for them.
    running_us: Mapped[int | None]
    #: Where its batch script runs.
    batch_node: Mapped[str]
    #: The hold whose place it takes; "" for none.
    replaces: Mapped[str]
    #: It is being given back.
    draining: Mapped[bool]
    #: Why it waits, drains or ended; for a person.
    reason: Mapped[str]


class WpgRow(Base):
    """One stay of a WPG in a hold; its ledger rows must tile it without gap or overlap."""

    __tablename__ = "wpgs"
    __table_args__ = (Index(None, "hold_id", "name"),)

    id: Mapped[RowKey]
    hold_id: Mapped[str] = mapped_column(ForeignKey("holds.id"))
    name: Mapped[str]
    pool: Mapped[Pool]
    gpus: Mapped[int]
    #: Where it lives: a component of the hold and a node of it.
    component: Mapped[int]
    node: Mapped[str]
    #: Which of the WPGs that every hold has it is: ``train-0``, ...
    slot: Mapped[str]
    held_us: Mapped[int]
    released_us: Mapped[int | None]


class NodeFaultRow(Base):
    """A held node failed; several in a short time, and it is left out of holds for a while."""

    __tablename__ = "node_faults"
    __table_args__ = (Index(None, "partition", "at_us"),)

    id: Mapped[RowKey]
    partition: Mapped[str]
    node: Mapped[str]
    at_us: Mapped[int]
    reason: Mapped[str]


class SlurmUsageRow(Base):
    """What Slurm's own accounting says of one component of a hold, one row an incarnation."""

    __tablename__ = "slurm_usage"
    __table_args__ = (UniqueConstraint("slurm_id", "start_us"), Index(None, "hold_id"))

    id: Mapped[RowKey]
    hold_id: Mapped[str] = mapped_column(ForeignKey("holds.id"))
    #: Of the component.
    slurm_id: Mapped[str]
    start_us: Mapped[int]
    #: ``None`` while it runs.
    end_us: Mapped[int | None]
    #: As Slurm counts it, in whole seconds.
    elapsed_us: Mapped[int]
    gpus: Mapped[int]
    #: Slurm's word for its state.
    word: Mapped[str]
    recorded_us: Mapped[int]


class ImageMoveRow(Base):
    """An image came to be in another tier; a bounded number of rows for each deployment."""

    __tablename__ = "image_moves"
    __table_args__ = (Index(None, "partition", "deployment"),)

    id: Mapped[RowKey]
    partition: Mapped[str]
    #: No foreign key: its story outlives it, for the timeline.
    deployment: Mapped[str]
    at_us: Mapped[int]
    #: A node, or the durable tier.
    place: Mapped[str]
    text: Mapped[str]


class PartitionRow(Base):
    """What an admin said of a partition, and a restart must not forget."""

    __tablename__ = "partitions"

    name: Mapped[TextKey]
    draining: Mapped[bool]


class ProfileRow(Base):
    """What jobs of one kind have been like; ``profiles`` writes it. One WPG size a row."""

    __tablename__ = "profiles"
    __table_args__ = (
        UniqueConstraint("partition", "user", "name", "model", "gpus"),
        Index(None, "partition", "model"),
    )

    id: Mapped[RowKey]
    partition: Mapped[str]
    user: Mapped[str]
    #: Of the job.
    name: Mapped[str]
    model: Mapped[str]
    #: Of the training WPG.
    gpus: Mapped[int]
    #: ``core.learning.Learned`` as JSON.
    learned: Mapped[dict[str, Any]]
    #: Steps of the last job that ended well, and how long it ran; 0: none has.
    run_steps: Mapped[int]
    run_us: Mapped[int]
    updated_us: Mapped[int]


class LedgerRow(Base):
    """A closed stretch of a WPG's time. Append-only: triggers refuse any change."""

    __tablename__ = "ledger"
    __table_args__ = (Index(None, "wpg", "stop_us"), Index(None, "job_id"))

    id: Mapped[RowKey]
    hold_id: Mapped[str] = mapped_column(ForeignKey("holds.id"))
    wpg: Mapped[str]
    activity: Mapped[Activity]
    #: Who pays; ``None`` for idle and down.
    job_id: Mapped[int | None] = mapped_column(ForeignKey("jobs.id"))
    #: No foreign key: sample calls are lines of a journal, not rows.
    call_id: Mapped[str | None] = mapped_column(String)
    start_us: Mapped[int]
    stop_us: Mapped[int]
    gpu_us: Mapped[int]
    cause: Mapped[str]
