"""``plexrl sinfo``: worker process groups, the hold and the catalogue."""

from collections.abc import Mapping
from typing import Any

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, shared


@click.command()
@click.option(
    "-l", "--long", is_flag=True, help="Why each WPG does it, hold, host memory and models too."
)
@click.option("-h", "--noheader", is_flag=True, help="No first line.")
@click.option("--state", is_flag=True, help="Every image instead, and bytes of every tier.")
@shared
@click.pass_obj
def sinfo(app: App, long: bool, noheader: bool, state: bool) -> None:
    """Show the WPGs: what they do, for whom, and who waits."""
    with app.client() as client:
        if state:
            from plexrl_slurm.cli.state import partition_text

            held = client.state()
            app.answer(held, lambda: partition_text(held, header=not noheader))
            return
        found = client.nodes()
    app.answer(found, lambda: _text(found, long=long, header=not noheader))


def _holds(found: Mapping[str, Any], *, header: bool) -> str:
    rows = [
        [
            hold["id"],
            hold["slurm_id"],
            hold["state"],
            ",".join(hold["nodes"]) or "-",
            show.iso(hold["since_us"]),
            show.iso(hold["limit_end_us"]) if hold["limit_end_us"] else "-",
            hold["reason"] or "-",
        ]
        for hold in found["holds"]
    ]
    names = ("HOLD", "JOBID", "STATE", "NODES", "SINCE", "LIMIT", "REASON")
    return show.fitted(names, rows, header=header)


def _text(found: Mapping[str, Any], *, long: bool, header: bool) -> str:
    rows = [
        [
            found["partition"],
            wpg["id"],
            wpg["pool"],
            wpg.get("node") or "-",
            f"of {wpg['shares']}" if wpg.get("shares") else wpg["gpus"],
            wpg["state"],
            ",".join(wpg.get("slurm_ids", ())) or "-",
            wpg["resident"] or "-",
            wpg["waiting"],
        ]
        for wpg in found["wpgs"]
    ]
    names = ("PARTITION", "WPG", "POOL", "NODE", "GPUS", "STATE", "JOB", "RESIDENT", "QUEUE")
    parts = [show.fitted(names, rows, header=header)]
    parts += [f"trouble: {sentence}" for sentence in found["trouble"]]
    if long:
        parts += [wpg["sentence"] for wpg in found["wpgs"] if wpg.get("sentence")]
        host = found["host_bytes"]
        parts.append(_holds(found, header=header))
        parts += [
            f"node {node['node']} is left out until {show.iso(node['until_us'])}: {node['reason']}"
            for node in found["excluded_nodes"]
        ]
        parts.append(f"host memory: {show.gib(host['used'])} of {show.gib(host['limit'])} used")
        models = [
            [m["name"], f"{m['parameters']:,}", m["dtype"], m["max_context_length"]]
            for m in found["models"]
        ]
        parts.append(
            show.fitted(("MODEL", "PARAMETERS", "DTYPE", "CONTEXT"), models, header=header)
        )
    return "\n".join(parts)
