"""Submit a job: queue the row, submit the held Slurm job, bind the two, or undo it all."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plexrl_slurm.cli.app import note
from plexrl_slurm.cli.client import Client
from plexrl_slurm.core.errors import BadInput, PlexError, UnknownModel
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.settings import Site
from plexrl_slurm.slurm.port import BatchJob, SlurmPort

#: Kept by ``--export=NONE``: without them no script finds its interpreter.
_BARE = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A job as the user asked for it, defaults filled in."""

    partition: str
    name: str
    account: str
    models: tuple[str, ...]
    seed: int
    priority: int
    #: As the user named the script, for display.
    shown: str
    script: str
    arguments: tuple[str, ...]
    workdir: Path
    environment: Mapping[str, str]
    output: str = "slurm-%j.out"
    error: str | None = None
    time_limit_us: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job that is queued and bound."""

    job_id: int
    slurm_id: str


def slurm_of(site: Site) -> SlurmPort:
    """The adapter of the partition."""
    from plexrl_slurm.slurm.local import LocalSlurm

    return LocalSlurm(site.jobs_dir)


def submit(client: Client, slurm: SlurmPort, request: Request) -> Submitted:
    """All of it, or nothing."""
    row = client.submit(
        {
            "partition": request.partition,
            "name": request.name,
            "account": request.account,
            "models": list(request.models),
            "priority": request.priority,
            "seed": request.seed,
            "script": request.shown,
            "options": dict(request.options),
        }
    )
    job_id = int(row["job_id"])
    slurm_id: SlurmId | None = None
    try:
        slurm_id = slurm.submit(_batch_job(request, row), hold=True)
        client.bind(job_id, slurm_id)
    except BaseException as error:
        _undo(client, slurm, job_id, slurm_id, reason=f"submission failed: {error}")
        raise
    return Submitted(job_id=job_id, slurm_id=str(slurm_id))


def _batch_job(request: Request, row: Mapping[str, Any]) -> BatchJob:
    return BatchJob(
        name=request.name,
        script=request.script,
        arguments=request.arguments,
        workdir=request.workdir,
        environment={**request.environment, **row["env"]},
        output=request.output,
        error=request.error,
        time_limit_us=request.time_limit_us,
    )


def _undo(
    client: Client, slurm: SlurmPort, job_id: int, slurm_id: SlurmId | None, *, reason: str
) -> None:
    """Take back what was done, whatever of it still can be; the first error is the one to show."""
    if slurm_id is not None:
        try:
            slurm.cancel(slurm_id)
        except PlexError as error:
            note(f"job {slurm_id} could not be taken back ({error}): run scancel {slurm_id}")
    try:
        client.cancel(job_id, reason=reason)
    except PlexError as error:
        note(f"queue row {job_id} could not be taken back ({error}); the daemon will drop it")


def check_names(
    client: Client, site: Site, models: Sequence[str], qos: str | None, *, shown: str
) -> None:
    """Say that a submission would be fine; raises ``UnknownModel`` and ``BadInput``."""
    partition = client.nodes()
    offered = tuple(str(model["name"]) for model in partition["models"])
    for name in models:
        if name not in offered:
            raise UnknownModel(name, offered)
    known = partition.get("qos")
    if qos is not None and known is not None and qos not in known:
        from plexrl_slurm.core.queue_rules import unknown_qos

        raise BadInput(unknown_qos(qos, known))
    note(
        f"{shown} is fine for partition {site.partition} "
        f"(models: {shown_names(models)}); nothing was submitted"
    )


def environment_for(export: str, current: Mapping[str, str] | None = None) -> dict[str, str]:
    """The job's environment by sbatch's rules: ``ALL``, ``NONE``, or names and NAME=value."""
    have = dict(os.environ if current is None else current)
    words = [word for word in export.split(",") if word]
    if words == ["NONE"]:
        return {name: have[name] for name in _BARE if name in have}
    if "ALL" in words or not words:
        chosen = have
    else:
        chosen = {name: have[name] for name in _BARE if name in have}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            chosen[name] = value
        elif name in have:
            chosen[name] = have[name]
    return chosen


def wrapped(command: str) -> str:
    """What ``sbatch --wrap`` makes of a command."""
    return f"#!/bin/sh\n# This script was created by plexrl sbatch --wrap.\n\n{command}\n"


def exit_code_of(job: Mapping[str, Any]) -> int:
    """What a waiting command exits with: the job's own code, or 1 if it ended without one."""
    code = job.get("exit_code")
    if isinstance(code, int) and code > 0:
        return min(code, 255)
    return 0 if job["state"] == "completed" else 1


def first_given(*values: str | None) -> str | None:
    """Command line, then environment, then script."""
    return next((value for value in values if value), None)


def shown_names(models: Sequence[str]) -> str:
    """Names for a sentence."""
    return ", ".join(models) if models else "none declared"
