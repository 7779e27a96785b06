"""``plexrl sinfo``: worker process groups, the hold and the catalogue."""

from collections.abc import Mapping
from typing import Any

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, shared


@click.command()
@click.option("-l", "--long", is_flag=True, help="Hold, host memory and models too.")
@click.option("-h", "--noheader", is_flag=True, help="No first line.")
@shared
@click.pass_obj
def sinfo(app: App, long: bool, noheader: bool) -> None:
    """Show the WPGs: what they do, for whom, and who waits."""
    with app.client() as client:
        found = client.nodes()
    app.answer(found, lambda: _text(found, long=long, header=not noheader))


def _text(found: Mapping[str, Any], *, long: bool, header: bool) -> str:
    rows = [
        [
            found["partition"],
            wpg["id"],
            wpg["pool"],
            wpg["gpus"],
            wpg["state"],
            wpg["resident"] or "-",
            wpg["waiting"],
        ]
        for wpg in found["wpgs"]
    ]
    names = ("PARTITION", "WPG", "POOL", "GPUS", "STATE", "RESIDENT", "QUEUE")
    parts = [show.fitted(names, rows, header=header)]
    if long:
        hold, host = found["hold"], found["host_bytes"]
        since = f" since {show.iso(hold['since_us'])}" if hold["since_us"] else ""
        parts.append(f"hold {hold['id']} ({hold['backend']}): {hold['state']}{since}")
        parts.append(f"host memory: {show.gib(host['used'])} of {show.gib(host['limit'])} used")
        models = [
            [m["name"], f"{m['parameters']:,}", m["dtype"], m["max_context_length"]]
            for m in found["models"]
        ]
        parts.append(
            show.fitted(("MODEL", "PARAMETERS", "DTYPE", "CONTEXT"), models, header=header)
        )
    return "\n".join(parts)
