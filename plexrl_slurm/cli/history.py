"""Read the jobs of a partition's database for ``plexrl sim trace``."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plexrl_slurm.cli import ledger
from plexrl_slurm.cli.jobids import JobNumber
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.settings import Site, read

if TYPE_CHECKING:
    from plexrl_slurm.sim.trace import TraceJob

_DAY_US = 86_400_000_000


def trace_of(
    site: Site, *, days: float, only: Sequence[JobNumber] | None = None
) -> "tuple[list[TraceJob], dict[str, str]]":
    """The partition's jobs of so many days as a trace, and why others are not in it.

    Jobs are named as ``plexrl squeue`` names them. ``only``: of these numbers. Raises ``BadInput``
    for one that is not among them.
    """
    from plexrl_slurm.db.views import calls_since, jobs_since
    from plexrl_slurm.sim.history import PastJob, from_ledger

    settings = read(site.path)
    models = settings.models
    until_us = now_us()
    since_us = until_us - int(days * _DAY_US)
    with ledger.reading(site) as session:
        rows = jobs_since(session, site.partition, since_us)
        asked_us = calls_since(session, since_us)
        rows = rows if only is None else _chosen(rows, only, days)
        often = Counter(row.slurm_id for row in rows)
        jobs = []
        for row in rows:
            name = row.models[0] if row.models else next(iter(models), "")
            model = models.get(name)
            qos = settings.queue.qos_named(row.options)
            jobs.append(
                PastJob(
                    id=str(row.id),
                    # A Slurm job that was queued twice is two jobs here.
                    name=row.slurm_id
                    if row.slurm_id is not None and often[row.slurm_id] == 1
                    else f"{row.slurm_id or 'row'}-{row.id}",
                    user=row.user,
                    account=row.account,
                    qos=str(row.options.get("qos") or "normal"),
                    priority=row.priority * (1 if qos is None else qos.weight),
                    seed=row.id,
                    submit_us=row.submitted_us,
                    start_us=row.admitted_us or row.started_us or row.submitted_us,
                    end_us=row.ended_us or until_us,
                    model=name,
                    parameters=model.parameters if model is not None else 0,
                    bytes_per_param=(
                        model.train_bytes / model.parameters if model is not None else 1.0
                    ),
                    walltime_s=_length_s(row, until_us),
                    max_slowdown=_promised(row, settings.sharing.max_slowdown),
                )
            )
    rows_of_ledger = ledger.stretches(site, since_us=since_us, until_us=until_us)
    return from_ledger(rows_of_ledger, jobs, asked_us)


def _chosen(rows: Sequence[Any], only: Sequence[JobNumber], days: float) -> list[Any]:
    for each in only:
        if not any(each.fits(row.slurm_id) for row in rows):
            raise BadInput(
                f"no job {each.word} in the last {days:g} days: see `plexrl squeue --all`"
            )
    return [row for row in rows if any(each.fits(row.slurm_id) for each in only)]


def _promised(row: Any, usual: float) -> float:
    """What its user asked for, else what every job is promised."""
    try:
        found = float(row.options["max_slowdown"])
    except (KeyError, TypeError, ValueError):
        return usual
    return found if found >= 1 else usual


def _length_s(row: Any, until_us: int) -> float:
    began_us = row.started_us or row.submitted_us
    return float((row.ended_us or until_us) - began_us) / 1e6
