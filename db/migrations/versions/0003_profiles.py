"""What jobs have been like: learned step times, used at the next submission."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("partition", sa.String(), nullable=False),
        sa.Column("user", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("learned", sa.JSON(), nullable=False),
        sa.Column("run_steps", sa.BigInteger(), nullable=False),
        sa.Column("run_us", sa.BigInteger(), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_profiles"),
        sa.UniqueConstraint(
            "partition",
            "user",
            "name",
            "model",
            "gpus",
            name="uq_profiles_partition_user_name_model_gpus",
        ),
    )
    op.create_index("ix_profiles_partition_model", "profiles", ["partition", "model"])


def downgrade() -> None:
    op.drop_table("profiles")
