"""``plexrl explain``: why a job waits, and how it got here."""

from collections.abc import Mapping
from typing import Any

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, shared


@click.command()
@click.argument("number", metavar="JOBID")
@shared
@click.pass_obj
def explain(app: App, number: str) -> None:
    """Say why JOBID waits, and tell its story."""
    with app.client() as client:
        found = client.explain(int(client.job(number)["job_id"]))
    app.answer(found, lambda: _text(number, found))


def _text(number: str, found: Mapping[str, Any]) -> str:
    job = found["job"]
    lines = [f"Job {number} ({job['name']}) is {show.long_state(job['state'])}."]
    lines += [str(sentence) for sentence in found["sentences"]]
    if found["deployments"]:
        lines += ["", "Deployments:"]
        lines += [
            "  " + ", ".join(f"{name} {value}" for name, value in each.items() if value is not None)
            for each in found["deployments"]
        ]
    if found["story"]:
        lines += ["", "Story:"]
        lines += [
            f"  {show.local_time(each['at_us'])} {each['kind']}: {each['text']}"
            for each in found["story"]
        ]
    return "\n".join(lines)
