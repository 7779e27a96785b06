"""Write a new migration from the difference between the tables in code and those migrated so far.

python scripts/db_revision.py "add a column to jobs"
"""

import sys
import tempfile
from pathlib import Path

from alembic import command

from plexrl_slurm.db import schema
from plexrl_slurm.db.engine import open_database

VERSIONS = Path(__file__).parents[1] / "db" / "migrations" / "versions"


def main(message: str) -> None:
    """Migrate an empty database to the newest revision, compare, write the file."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_database(f"sqlite:///{Path(folder)}/empty.sqlite")
        schema.upgrade(engine)
        with engine.connect() as connection:
            command.revision(
                schema.make_config(connection),
                message=message,
                autogenerate=True,
                rev_id=f"{len(list(VERSIONS.glob('*.py'))) + 1:04}",
            )
        engine.dispose()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
