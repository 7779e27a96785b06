"""``plexrl sreport``: runs the same .sql files that an admin can run with psql or sqlite3."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from plexrl_slurm.cli import ledger, show
from plexrl_slurm.cli.app import App, shared, waiting

if TYPE_CHECKING:
    from plexrl_slurm.db.reports import Report

_NAMES: Final = {"slurm_id": "jobid"}


@click.command()
@click.argument("name", required=False)
@click.option("-P", "--parsable2", is_flag=True, help="Columns separated by |.")
@click.option("-n", "--noheader", is_flag=True, help="No first line.")
@shared
@click.pass_obj
def sreport(app: App, name: str | None, parsable2: bool, noheader: bool) -> None:
    """Run the report NAME (savings, usage, hold, ...); without one, list them."""
    if name is None:
        names = ledger.report_names()
        app.answer(names, lambda: show.fitted(("REPORT", "TELLS"), names.items()))
        return
    with waiting(f"running report {name}"):
        found = ledger.run_report(app.site(), name)
    facts = {
        "report": found.name,
        "rows": [dict(zip(found.columns, row, strict=True)) for row in found.rows],
    }
    app.answer(facts, lambda: text_of(found, parsable=parsable2, header=not noheader))


def text_of(found: "Report", *, parsable: bool, header: bool) -> str:
    """The report as a table for a person, or with ``parsable`` as columns separated by ``|``."""
    if parsable:
        lines = [list(found.columns)] if header else []
        lines += [["" if cell is None else str(cell) for cell in row] for row in found.rows]
        return "\n".join("|".join(line) for line in lines)
    # People have one number for a job: the one that all other commands take.
    columns = [
        _column(name, [row[index] for row in found.rows])
        for index, name in enumerate(found.columns)
        if name != "job_id"
    ]
    names = [name for name, _ in columns]
    return show.fitted(names, zip(*(cells for _, cells in columns), strict=True), header=header)


def _column(name: str, cells: Sequence[Any]) -> tuple[str, list[str]]:
    """Heading and cells for a person: seconds instead of microseconds, instants as dates."""
    if not name.endswith("_us"):
        return _NAMES.get(name, name), [_cell(cell) for cell in cells]
    bare = name.removesuffix("_us")
    # Not a duration: an instant is later than 2001. GPU time may be as much, and is none.
    instants = [cell for cell in cells if isinstance(cell, int) and cell > 10**15]
    if instants and not name.endswith("gpu_us"):
        return bare, ["-" if cell is None else show.iso(int(cell)) for cell in cells]
    return f"{bare}_s", ["-" if cell is None else f"{cell / 1e6:.3f}" for cell in cells]


def _cell(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
