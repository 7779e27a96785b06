"""The first tables: queue, calls, holds, ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

#: The books are append-only. A migration that rebuilds ``ledger`` has to make these again.
SQLITE_TRIGGERS = """
CREATE TRIGGER ledger_no_{verb} BEFORE {verb} ON ledger
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END
"""
POSTGRES_FUNCTION = """
CREATE FUNCTION ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$
"""
POSTGRES_TRIGGERS = """
CREATE TRIGGER ledger_no_{verb} BEFORE {verb} ON ledger
FOR EACH STATEMENT EXECUTE FUNCTION ledger_is_append_only()
"""


def _key() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "holds",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("partition", sa.String(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("slurm_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("epoch", sa.String(), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_holds"),
    )
    op.create_index("ix_holds_partition_state", "holds", ["partition", "state"])
    op.create_table(
        "jobs",
        sa.Column("id", _key(), nullable=False),
        sa.Column("partition", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("uid", sa.BigInteger(), nullable=False),
        sa.Column("user", sa.String(), nullable=False),
        sa.Column("account", sa.String(), nullable=False),
        sa.Column("slurm_id", sa.String(), nullable=True),
        sa.Column("script", sa.String(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("token_sha256", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("obstacles", sa.JSON(), nullable=False),
        sa.Column("submitted_us", sa.BigInteger(), nullable=False),
        sa.Column("admitted_us", sa.BigInteger(), nullable=True),
        sa.Column("started_us", sa.BigInteger(), nullable=True),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("lease_until_us", sa.BigInteger(), nullable=True),
        sa.Column("requeues", sa.BigInteger(), nullable=False),
        sa.Column("billed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("token_sha256", name="uq_jobs_token_sha256"),
    )
    op.create_index("ix_jobs_claim", "jobs", ["partition", "state", sa.desc("priority"), "id"])
    op.create_index("ix_jobs_slurm_id", "jobs", ["slurm_id"])
    op.create_table(
        "job_events",
        sa.Column("id", _key(), nullable=False),
        sa.Column("job_id", _key(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_job_events"),
    )
    op.create_index("ix_job_events_job_id_id", "job_events", ["job_id", "id"])
    op.create_table(
        "ledger",
        sa.Column("id", _key(), nullable=False),
        sa.Column("hold_id", sa.String(), nullable=False),
        sa.Column("wpg", sa.String(), nullable=False),
        sa.Column("activity", sa.String(32), nullable=False),
        sa.Column("job_id", _key(), nullable=True),
        sa.Column("call_id", sa.String(), nullable=True),
        sa.Column("start_us", sa.BigInteger(), nullable=False),
        sa.Column("stop_us", sa.BigInteger(), nullable=False),
        sa.Column("gpu_us", sa.BigInteger(), nullable=False),
        sa.Column("cause", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["hold_id"], ["holds.id"], name="fk_ledger_hold_id_holds"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_ledger_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_ledger"),
    )
    op.create_index("ix_ledger_job_id", "ledger", ["job_id"])
    op.create_index("ix_ledger_wpg_stop_us", "ledger", ["wpg", "stop_us"])
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", _key(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_us", sa.BigInteger(), nullable=False),
        sa.Column("finished_us", sa.BigInteger(), nullable=True),
        sa.Column("finish_reason", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_sessions_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.UniqueConstraint("job_id", "idempotency_key", name="uq_sessions_job_id_idempotency_key"),
    )
    op.create_table(
        "wpgs",
        sa.Column("id", _key(), nullable=False),
        sa.Column("hold_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("pool", sa.String(32), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("held_us", sa.BigInteger(), nullable=False),
        sa.Column("released_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["hold_id"], ["holds.id"], name="fk_wpgs_hold_id_holds"),
        sa.PrimaryKeyConstraint("id", name="pk_wpgs"),
    )
    op.create_index("ix_wpgs_hold_id_name", "wpgs", ["hold_id", "name"])
    op.create_table(
        "deployments",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", _key(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("wpg", sa.String(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("image_seq", sa.BigInteger(), nullable=True),
        sa.Column("image_part", sa.BigInteger(), nullable=True),
        sa.Column("image_bytes", sa.BigInteger(), nullable=False),
        sa.Column("applied_seq", sa.BigInteger(), nullable=False),
        sa.Column("applied_part", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("dropped_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deployments_job_id_jobs"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name="fk_deployments_session_id_sessions"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_deployments"),
        sa.UniqueConstraint(
            "session_id", "model_seq_id", name="uq_deployments_session_id_model_seq_id"
        ),
    )
    op.create_index("ix_deployments_job_id", "deployments", ["job_id"])
    op.create_table(
        "calls",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("deployment_id", sa.String(), nullable=False),
        sa.Column("job_id", _key(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("parts", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("body_kept", sa.Boolean(), nullable=False),
        sa.Column("result_kept", sa.Boolean(), nullable=False),
        sa.Column("submitted_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.Column("message", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name="fk_calls_deployment_id_deployments"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_calls_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_calls"),
        sa.UniqueConstraint("deployment_id", "seq", name="uq_calls_deployment_id_seq"),
    )
    op.create_index(
        "ix_calls_waiting",
        "calls",
        ["job_id"],
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", _key(), nullable=False),
        sa.Column("job_id", _key(), nullable=False),
        sa.Column("uid", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.String(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("deployment_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name="fk_checkpoints_deployment_id_deployments"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.UniqueConstraint("uri", name="uq_checkpoints_uri"),
    )
    op.create_index("ix_checkpoints_deployment_id", "checkpoints", ["deployment_id"])
    op.create_index("ix_checkpoints_uid", "checkpoints", ["uid"])
    op.create_table(
        "images",
        sa.Column("id", _key(), nullable=False),
        sa.Column("deployment_id", sa.String(), nullable=False),
        sa.Column("wpg", sa.String(), nullable=False),
        sa.Column("tier", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("completed_us", sa.BigInteger(), nullable=False),
        sa.Column("dropped_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name="fk_images_deployment_id_deployments"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_images"),
    )
    op.create_index("ix_images_deployment_id", "images", ["deployment_id"])
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", _key(), nullable=False),
        sa.Column("deployment_id", sa.String(), nullable=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("wpg", sa.String(), nullable=False),
        sa.Column("uri", sa.String(), nullable=True),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("content", sa.String(), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("ready_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["deployment_id"], ["deployments.id"], name="fk_snapshots_deployment_id_deployments"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_snapshots_job_id_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_snapshots"),
    )
    op.create_index("ix_snapshots_deployment_id", "snapshots", ["deployment_id"])
    op.create_index("ix_snapshots_job_id", "snapshots", ["job_id"])
    op.create_index("ix_snapshots_uri", "snapshots", ["uri"])
    op.create_table(
        "sampling_sessions",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_id", sa.String(), nullable=False),
        sa.Column("job_id", _key(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("last_used_us", sa.BigInteger(), nullable=False),
        sa.Column("closed_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_sampling_sessions_job_id_jobs"),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name="fk_sampling_sessions_session_id_sessions"
        ),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshots.id"], name="fk_sampling_sessions_snapshot_id_snapshots"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_sampling_sessions"),
        sa.UniqueConstraint("session_id", "seq", name="uq_sampling_sessions_session_id_seq"),
    )
    op.create_index("ix_sampling_sessions_snapshot_id", "sampling_sessions", ["snapshot_id"])
    postgres = op.get_bind().dialect.name == "postgresql"
    if postgres:
        op.execute(POSTGRES_FUNCTION)
    for verb in ("UPDATE", "DELETE", *(["TRUNCATE"] if postgres else [])):
        op.execute((POSTGRES_TRIGGERS if postgres else SQLITE_TRIGGERS).format(verb=verb))


def downgrade() -> None:
    op.drop_table("sampling_sessions")
    op.drop_table("snapshots")
    op.drop_table("images")
    op.drop_table("checkpoints")
    op.drop_table("calls")
    op.drop_table("deployments")
    op.drop_table("wpgs")
    op.drop_table("sessions")
    op.drop_table("ledger")
    op.drop_table("job_events")
    op.drop_table("jobs")
    op.drop_table("holds")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION ledger_is_append_only()")
