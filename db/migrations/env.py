"""Alembic's entry; the caller has made the connection and begun the transaction."""

from alembic import context

from plexrl_slurm.db.models import Base
from plexrl_slurm.db.schema import is_compared

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=True,
    include_object=is_compared,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
