"""``plexrl trace``: what every WPG did, as a table, a PNG or a Perfetto trace."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from plexrl_slurm.cli import ledger, show, timeline
from plexrl_slurm.cli.app import App, note, shared, waiting
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadInput, DaemonUnavailable
from plexrl_slurm.settings import Site

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _instant(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """``90s``, ``10m``, ``2h``, ``1d`` ago, or an ISO time."""
    if value is None:
        return None
    if match := re.fullmatch(r"(\d+)([smhd])", value):
        return now_us() - int(match[1]) * _UNITS[match[2]] * 1_000_000
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a time such as 10m or 2h nor an ISO time such as "
            f"2026-01-31T12:00:00Z"
        ) from None
    return round(moment.timestamp() * 1_000_000)


@click.command()
@click.option("--png", metavar="FILE", type=click.Path(path_type=Path), help="Draw it here.")
@click.option(
    "--perfetto",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write Chrome trace JSON here; open it at ui.perfetto.dev.",
)
@click.option("--since", metavar="WHEN", callback=_instant, help="10m, 2h, or an ISO time [all].")
@click.option("--until", metavar="WHEN", callback=_instant, help="Likewise [now].")
@shared
@click.pass_obj
def trace(
    app: App, png: Path | None, perfetto: Path | None, since: int | None, until: int | None
) -> None:
    """Show what every WPG did and where images went; draw it with --png and --perfetto."""
    site = app.site()
    for file in (png, perfetto):
        if file is not None and not file.absolute().parent.is_dir():
            raise BadInput(f"there is no folder {file.absolute().parent} for {file.name}: make it")
    with waiting("reading the timeline") as say:
        found, moves = _read(app, site, since or 0, until or now_us())
        if not found:
            raise BadInput(f"partition {site.partition} has no timeline there: widen --since")
        begin = min(each["start_us"] for each in found)
        title = f"partition {site.partition}, from {show.iso(begin)}"
        if png is not None:
            say(f"drawing {png}")
            timeline.draw(found, png, title=title, moves=moves)
        if perfetto is not None:
            events = timeline.chrome_trace(found, title=title, moves=moves)
            perfetto.write_text(json.dumps(events))
    app.answer({"stretches": found, "images": moves}, lambda: _table(found) + _moves(moves))


def _read(
    app: App, site: Site, since_us: int, until_us: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Stretches of WPGs, and moves of images, which only the daemon knows."""
    try:
        with app.client() as client:
            found = client.timeline(since_us=since_us, until_us=until_us)
            return found, client.image_moves(since_us=since_us, until_us=until_us)
    except DaemonUnavailable:
        found = ledger.stretches(site, since_us=since_us, until_us=until_us)
        note("the daemon does not answer; this is what the ledger has")
        return found, []


def _moves(moves: list[dict[str, Any]]) -> str:
    if not moves:
        return ""
    rows = [[show.iso(m["at_us"]), m["deployment"], m["where"], m["text"]] for m in moves]
    return "\n\n" + show.fitted(("TIME", "IMAGE", "WHERE", "TIER"), rows)


def _table(found: list[dict[str, Any]]) -> str:
    rows = []
    for wpg, parts in timeline.shares(found).items():
        held = sum(parts.values()) or 1
        rows.append(
            [wpg, f"{held / 1e6:.1f}", *(f"{100 * each / held:.1f}%" for each in parts.values())]
        )
    names = ("WPG", "GPUSECS", "BUSY", "SWITCH", "KEPT", "IDLE", "DOWN")
    return show.fitted(names, rows)
