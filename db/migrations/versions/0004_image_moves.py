"""Stories of images, which a restart of the daemon must not forget."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def _key() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "image_moves",
        sa.Column("id", _key(), nullable=False),
        sa.Column("partition", sa.String(), nullable=False),
        sa.Column("deployment", sa.String(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_image_moves"),
    )
    op.create_index(
        "ix_image_moves_partition_deployment", "image_moves", ["partition", "deployment"]
    )


def downgrade() -> None:
    op.drop_table("image_moves")
