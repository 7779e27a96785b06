"""Holds on Slurm: nodes, their faults, durable images, Slurm's own accounting."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_FALSE = sa.false()


def _key() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("homes", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("deployments", sa.Column("durable_seq", sa.BigInteger(), nullable=True))
    op.add_column("deployments", sa.Column("durable_part", sa.BigInteger(), nullable=True))
    text = sa.Column("durable_path", sa.String(), nullable=False, server_default="")
    op.add_column("deployments", text)
    # Recovery derives them from the calls.
    op.drop_column("deployments", "applied_seq")
    op.drop_column("deployments", "applied_part")
    op.add_column("holds", sa.Column("running_us", sa.BigInteger(), nullable=True))
    for name in ("replaces", "reason", "batch_node"):
        op.add_column("holds", sa.Column(name, sa.String(), nullable=False, server_default=""))
    op.add_column(
        "holds", sa.Column("draining", sa.Boolean(), nullable=False, server_default=_FALSE)
    )
    for name in ("node", "slot"):
        op.add_column("wpgs", sa.Column(name, sa.String(), nullable=False, server_default=""))
    number = sa.Column("component", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("wpgs", number)
    op.execute("UPDATE wpgs SET slot = name, node = 'localhost'")
    op.create_table(
        "node_faults",
        sa.Column("id", _key(), nullable=False),
        sa.Column("partition", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_node_faults"),
    )
    op.create_index("ix_node_faults_partition_at_us", "node_faults", ["partition", "at_us"])
    op.create_table(
        "slurm_usage",
        sa.Column("id", _key(), nullable=False),
        sa.Column("hold_id", sa.String(), nullable=False),
        sa.Column("slurm_id", sa.String(), nullable=False),
        sa.Column("start_us", sa.BigInteger(), nullable=False),
        sa.Column("end_us", sa.BigInteger(), nullable=True),
        sa.Column("elapsed_us", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("word", sa.String(), nullable=False),
        sa.Column("recorded_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_slurm_usage"),
        sa.ForeignKeyConstraint(["hold_id"], ["holds.id"], name="fk_slurm_usage_hold_id_holds"),
        sa.UniqueConstraint("slurm_id", "start_us", name="uq_slurm_usage_slurm_id_start_us"),
    )
    op.create_index("ix_slurm_usage_hold_id", "slurm_usage", ["hold_id"])
    op.create_table(
        "partitions",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_partitions"),
    )


def downgrade() -> None:
    op.drop_table("partitions")
    op.drop_table("slurm_usage")
    op.drop_table("node_faults")
    for name in ("component", "slot", "node"):
        op.drop_column("wpgs", name)
    for name in ("draining", "batch_node", "reason", "replaces", "running_us"):
        op.drop_column("holds", name)
    for name in ("applied_part", "applied_seq"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("deployments", column)
    for name in ("durable_path", "durable_part", "durable_seq"):
        op.drop_column("deployments", name)
    op.drop_column("jobs", "homes")
