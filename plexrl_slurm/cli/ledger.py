"""Read the partition's database, for what the CLI can tell without the daemon."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from plexrl_slurm.core.errors import BadInput, DatabaseUnavailable, Denied
from plexrl_slurm.settings import Site

if TYPE_CHECKING:
    from plexrl_slurm.db.reports import Report

#: Short names, as Slurm's own sreport has them.
_ALIASES: Final = {"usage": "usage_by_job", "hold": "hold_summary"}
_STRETCHES: Final = """
SELECT h.partition, l.wpg, l.activity, l.job_id, j.slurm_id, l.call_id, c.kind,
       l.start_us, l.stop_us, l.gpu_us
FROM ledger AS l
JOIN holds AS h ON h.id = l.hold_id
LEFT JOIN calls AS c ON c.id = l.call_id
LEFT JOIN jobs AS j ON j.id = l.job_id
WHERE l.stop_us > {since} AND l.start_us < {until}
ORDER BY l.wpg, l.start_us, l.id
"""


def report_names() -> dict[str, str]:
    """Every report and what it tells."""
    from plexrl_slurm.db.reports import list_reports

    return list_reports()


def run_report(site: Site, name: str) -> "Report":
    """Run one report, without writing anything."""
    from plexrl_slurm.db import reports

    known = reports.list_reports()
    full = _ALIASES.get(name, name)
    if full not in known:
        starting = [each for each in known if each.startswith(name)]
        if len(starting) != 1:
            names = ", ".join([*_ALIASES, *known])
            raise BadInput(f"unknown report {name!r}; known are {names}")
        full = starting[0]
    with reading(site) as session:
        return reports.run_report(session, full)


def stretches(site: Site, *, since_us: int, until_us: int) -> list[dict[str, Any]]:
    """The timeline as the ledger has it: what ``GET timeline`` answers."""
    with reading(site) as session:
        asked = _STRETCHES.format(since=int(since_us), until=int(until_us))
        rows = [row._asdict() for row in session.connection().exec_driver_sql(asked)]
    return [row for row in rows if row.pop("partition") == site.partition]


@contextmanager
def reading(site: Site) -> Iterator[Any]:
    """A session on the partition's database that writes nothing. Raises ``Denied`` and
    ``DatabaseUnavailable``."""
    from plexrl_slurm.db import schema
    from plexrl_slurm.db.engine import open_database, transaction

    url = site.database_url
    if url.startswith("sqlite"):
        file = Path(url.partition(":///")[2])
        try:
            file.stat()
            if not os.access(file, os.R_OK):
                raise PermissionError
        except PermissionError:
            raise Denied(
                f"you may not read {file}: reports are for root and the service user"
            ) from None
        except FileNotFoundError:
            # Opening it would make an empty one.
            raise DatabaseUnavailable(
                url, "it does not exist yet; start the partition with `plexrl partition up`"
            ) from None
    engine = open_database(url, read_only=True)
    try:
        schema.check(engine)
        with transaction(engine, read_only=True) as session:
            yield session
    finally:
        engine.dispose()
