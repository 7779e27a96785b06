"""Runs the ``reports/*.sql`` files: the same text that an admin runs with psql or sqlite3."""

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import BadInput

FOLDER = Path(__file__).parent / "reports"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a report found; cells are ``int``, ``float``, ``str`` or ``None``."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def list_reports() -> dict[str, str]:
    """Names, and what each one tells (the first line of its file)."""
    return {path.stem: _title(path) for path in sorted(FOLDER.glob("*.sql"))}


def run_report(session: Session, name: str) -> Report:
    """Run one report over the whole history."""
    if name not in list_reports():
        raise BadInput(f"no report {name!r}; there are: {', '.join(list_reports())}")
    # The files have no parameters; a colon in them is only a colon.
    result = session.execute(text(read_report(name).replace(":", "\\:")))
    rows = tuple(tuple(_plain(cell) for cell in row) for row in result)
    return Report(name=name, columns=tuple(result.keys()), rows=rows)


def read_report(name: str) -> str:
    """The SQL itself."""
    return (FOLDER / f"{name}.sql").read_text(encoding="utf-8")


def _plain(cell: Any) -> Any:
    return float(cell) if isinstance(cell, Decimal) else cell


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("--").strip()
