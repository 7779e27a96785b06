"""What Slurm itself will not start yet: a dependency, a time at which it is to begin.

Slurm does not look at the dependency of a job that is held, as ours are before their turn (seen
with 22.05). So whether it has come true is read from the states of the jobs that it names.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.core.limits import Held, HeldKind
from plexrl_slurm.slurm.parse import whole_array
from plexrl_slurm.slurm.port import ENDED, JobStatus, SlurmState

#: ``afterok:51_*+5(unfulfilled)``.
_ENTRY = re.compile(r"(after[a-z]*):([0-9_*:+]+)(?:\([a-z ]*\))?")


def held_by_slurm(job: SlurmId, jobs: Mapping[SlurmId, JobStatus], now_us: int) -> Held | None:
    """Why Slurm would not start ``job`` if it were released now; ``jobs`` is its last answer."""
    status = jobs.get(job)
    if status is None or status.state is not SlurmState.PENDING:
        return None
    begin_us = status.eligible_us
    if begin_us is not None and begin_us > now_us:
        when = datetime.fromtimestamp(begin_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        sentence = f"it is to begin at {when}, and gets its place then"
        return Held(kind=HeldKind.BEGIN_TIME, sentence=sentence)
    return _by_dependency(job, status.dependency, jobs)


def _by_dependency(job: SlurmId, dependency: str, jobs: Mapping[SlurmId, JobStatus]) -> Held | None:
    parts = re.split("[,?]", dependency)
    found = [_entry(job, part, jobs) for part in parts if part]
    holds = [held for held in found if held is not None]
    if not holds or ("?" in dependency and len(holds) < len(found)):
        return None  # of alternatives one has come true
    dead = [held for held in holds if held.kind is HeldKind.NEVER]
    if "?" in dependency and len(dead) < len(holds):
        return next(held for held in holds if held.kind is not HeldKind.NEVER)
    return next(iter(dead), holds[0])


def _entry(job: SlurmId, part: str, jobs: Mapping[SlurmId, JobStatus]) -> Held | None:
    """Of ``afterok:51:52``; nothing of ``singleton``, and of jobs that Slurm has forgotten."""
    match = _ENTRY.fullmatch(part)
    if match is None:
        return None
    kind, names = match.groups()
    for name in names.split(":"):
        number = SlurmId(name.partition("+")[0].removesuffix("_*"))
        status = jobs.get(number) or whole_array(number, jobs)
        if status is None:
            continue
        if status.state not in ENDED:
            if kind == "after" and status.state is not SlurmState.PENDING:
                continue  # it has started
            does = "started" if kind == "after" else "ended"
            sentence = f"it gets its place when Slurm job {number} has {does} ({kind}:{number})"
            return Held(kind=HeldKind.DEPENDENCY, sentence=sentence)
        well = status.state is SlurmState.COMPLETED
        if (kind == "afterok" and not well) or (kind == "afternotok" and well):
            sentence = (
                f"Slurm will never start it, because job {number} is {status.word} "
                f"({kind}:{number}): scancel {job}, or scontrol update JobId={job} Dependency="
            )
            return Held(kind=HeldKind.NEVER, sentence=sentence)
    return None
