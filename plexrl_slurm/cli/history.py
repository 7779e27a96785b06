"""Read the jobs of a partition's database for ``plexrl sim trace``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plexrl_slurm.cli import ledger
from plexrl_slurm.cli.jobids import JobNumber
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.settings import Site, read

if TYPE_CHECKING:
    from plexrl_slurm.sim.history import PastJob
    from plexrl_slurm.sim.trace import TraceJob

_DAY_US = 86_400_000_000


def trace_of(
    site: Site,
    *,
    days: float,
    only: Sequence[str] | None = None,
    rows_only: Sequence[int] | None = None,
) -> "tuple[list[TraceJob], dict[str, str]]":
    """The partition's jobs of so many days as a trace, and why others are not in it.

    ``only``: of these numbers, as squeue has them; raises ``BadInput`` for one that is not among
    them. ``rows_only``: of these rows of the database.
    """
    from msgspec import structs

    from plexrl_slurm.db.views import calls_since, jobs_since
    from plexrl_slurm.sim.history import PastJob, from_ledger

    models = read(site.path).models
    until_us = now_us()
    since_us = until_us - int(days * _DAY_US)
    with ledger.reading(site) as session:
        rows = jobs_since(session, site.partition, since_us)
        asked_us = calls_since(session, since_us)
        jobs = []
        for row in rows:
            name = row.models[0] if row.models else next(iter(models), "")
            model = models.get(name)
            jobs.append(
                PastJob(
                    id=str(row.id),
                    user=row.user,
                    account=row.account,
                    qos=str(row.options.get("qos") or "normal"),
                    priority=row.priority,
                    seed=row.seed,
                    submit_us=row.submitted_us,
                    start_us=row.started_us or row.submitted_us,
                    end_us=row.ended_us or until_us,
                    model=name,
                    parameters=model.parameters if model is not None else 0,
                    bytes_per_param=(
                        model.train_bytes / model.parameters if model is not None else 1.0
                    ),
                    walltime_s=_length_s(row, until_us),
                )
            )
    numbers = {str(row.id): row.slurm_id or f"(row {row.id})" for row in rows}
    if only is not None:
        jobs = _chosen(jobs, numbers, only, days)
    if rows_only is not None:
        jobs = [job for job in jobs if int(job.id) in rows_only]
    rows_of_ledger = ledger.stretches(site, since_us=since_us, until_us=until_us)
    found, left_out = from_ledger(rows_of_ledger, jobs, asked_us)
    # Slurm uses its numbers again after years, and ids of a trace are unique.
    seen = Counter(numbers[job.id] for job in found)
    return (
        [
            structs.replace(
                job, id=name if seen[name := numbers[job.id]] == 1 else f"{name}.{job.id}"
            )
            for job in found
        ],
        {numbers[job]: reason for job, reason in left_out.items()},
    )


def _chosen(
    jobs: "list[PastJob]", numbers: Mapping[str, str], only: Sequence[str], days: float
) -> "list[PastJob]":
    try:
        wanted = [JobNumber(word) for word in only]
    except ValueError as error:
        raise BadInput(str(error)) from None
    for each in wanted:
        if not any(each.fits(numbers[job.id]) for job in jobs):
            raise BadInput(
                f"no job {each.word} in the last {days:g} days: see `plexrl squeue --all`"
            )
    return [job for job in jobs if any(each.fits(numbers[job.id]) for each in wanted)]


def _length_s(row: Any, until_us: int) -> float:
    began_us = row.started_us or row.submitted_us
    return float((row.ended_us or until_us) - began_us) / 1e6
