"""``plexrl sreport``: runs the same .sql files that an admin can run with psql or sqlite3."""

from typing import TYPE_CHECKING, Any

import click

from plexrl_slurm.cli import ledger, show
from plexrl_slurm.cli.app import App, shared, waiting

if TYPE_CHECKING:
    from plexrl_slurm.db.reports import Report


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
    app.answer(facts, lambda: _text(found, parsable=parsable2, header=not noheader))


def _text(found: "Report", *, parsable: bool, header: bool) -> str:
    if parsable:
        lines = [list(found.columns)] if header else []
        lines += [["" if cell is None else str(cell) for cell in row] for row in found.rows]
        return "\n".join("|".join(line) for line in lines)
    names = [_heading(column) for column in found.columns]
    rows = [
        [_cell(name, cell) for name, cell in zip(found.columns, row, strict=True)]
        for row in found.rows
    ]
    return show.fitted(names, rows, header=header)


def _heading(column: str) -> str:
    """GPU time is shown in seconds."""
    return f"{column.removesuffix('_us')}_s" if column.endswith("_gpu_us") else column


def _cell(column: str, cell: Any) -> str:
    if cell is None:
        return "-"
    if column.endswith("_gpu_us"):
        return f"{cell / 1e6:.3f}"
    if column.endswith("_us") and isinstance(cell, int) and cell > 10**15:
        return show.iso(cell)
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)
