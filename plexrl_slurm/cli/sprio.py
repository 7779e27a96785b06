"""``plexrl sprio``: the parts of waiting jobs' priorities, in Slurm's columns."""

from collections.abc import Mapping
from typing import Any, Final

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, shared
from plexrl_slurm.cli.jobids import JobNumber, as_numbers
from plexrl_slurm.core.errors import NotFound

_PARTS: Final = ("age", "fairshare", "qos", "job")
_COLUMNS: Final = (
    ("JOBID", 15),
    ("PARTITION", 9),
    ("USER", 8),
    ("ACCOUNT", 8),
    ("PRIORITY", 10),
    *((part.upper(), 10) for part in _PARTS),
    ("QOSNAME", 0),
)


@click.command()
@click.option("-u", "--user", metavar="NAMES", help="Only jobs of these users.")
@click.option("-j", "--jobs", metavar="IDS", callback=as_numbers, help="Only these jobs.")
@click.option("-n", "--norm", is_flag=True, help="Factors from 0 to 1, before they are weighted.")
@click.option("-w", "--weights", is_flag=True, help="What each factor is worth at most.")
@click.option("-h", "--noheader", is_flag=True, help="No first line.")
@shared
@click.pass_obj
def sprio(
    app: App,
    user: str | None,
    jobs: list[JobNumber] | None,
    norm: bool,
    weights: bool,
    noheader: bool,
) -> None:
    """Show why waiting jobs stand where they stand in the queue; the first one is next."""
    with app.client() as client:
        found = client.priorities()
        missing = [each.word for each in jobs or () if not _any(found["jobs"], each)]
        if missing and len(missing) == len(jobs or ()):
            known = client.jobs(ended=True)
            if not any(each.fits(job["slurm_id"]) for each in jobs or () for job in known):
                raise NotFound("job", ",".join(missing))
    names = None if user is None else frozenset(word for word in user.split(",") if word)
    chosen = [
        job
        for job in found["jobs"]
        if (names is None or job["user"] in names)
        and (jobs is None or any(each.fits(job["slurm_id"]) for each in jobs))
    ]
    if weights:
        rows = [["Weights", "", "", "", "", *(str(found["weights"][part]) for part in _PARTS), ""]]
        app.answer(
            {"weights": found["weights"]},
            lambda: show.table(_COLUMNS, rows, header=not noheader),
        )
        return
    app.answer(
        {"weights": found["weights"], "jobs": chosen},
        lambda: show.table(_COLUMNS, (_row(job, norm=norm) for job in chosen), header=not noheader),
    )


def _any(jobs: list[Mapping[str, Any]], number: JobNumber) -> bool:
    return any(number.fits(job["slurm_id"]) for job in jobs)


def _row(job: Mapping[str, Any], *, norm: bool) -> list[str]:
    parts, factors = job["parts"], job["factors"]
    return [
        str(job["slurm_id"]),
        job["partition"],
        job["user"],
        job["account"],
        str(job["priority"]),
        *(f"{factors[part]:.7f}" if norm else str(parts[part]) for part in _PARTS),
        job["qos"],
    ]
