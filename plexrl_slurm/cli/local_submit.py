"""``plexrl sbatch`` where there is no Slurm: sbatch's options and files, carried out here."""

import getpass
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plexrl_slurm.cli.app import App, note, waiting
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.row_options import row_options
from plexrl_slurm.cli.sbatch import GPU_OPTIONS, PASSED_ON
from plexrl_slurm.cli.submit import (
    Request,
    check_names,
    environment_for,
    exit_code_of,
    first_given,
    slurm_of,
    submit,
    wrapped,
)
from plexrl_slurm.cli.wait import wait_for_end
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.settings import Site
from plexrl_slurm.slurm.directives import (
    INTERPRETED,
    ScriptHead,
    check_without_slurm,
    parse,
    parse_time,
    read,
)


def submit_here(
    app: App,
    *,
    script: str | None,
    arguments: tuple[str, ...],
    stdin: bytes | None,
    given: Mapping[str, Any],
) -> int:
    """All of the command; ``given`` are its options by name."""
    wrap = given["wrap"]
    head = _head(script, wrap, stdin)
    site = app.site(first_given(os.environ.get("SBATCH_PARTITION"), head.value("partition")))
    check_without_slurm(head)
    request = _request(site, head, arguments, wrapped=wrap is not None, given=given)
    _say_what_is_left_out(site, head, given)
    where = {"partition": site.partition, "models": list(request.models)}
    with Client(site) as client:
        if given["test_only"]:
            qos = given["qos"] or head.qos
            check_names(client, site, request.models, qos, shown=request.shown)
            app.answer({"name": request.name, "submitted": False, **where}, "")
            return 0
        with waiting(f"submitting to partition {site.partition}"):
            job = submit(client, slurm_of(site), request)
        facts = {"job_id": job.job_id, "slurm_id": job.slurm_id, "name": request.name, **where}
        said = job.slurm_id if given["parsable"] else f"Submitted batch job {job.slurm_id}"
        app.answer(facts, said)
        if given["wait"]:
            return exit_code_of(wait_for_end(client, job.slurm_id))
    return 0


def _head(script: str | None, wrap: str | None, stdin: bytes | None) -> ScriptHead:
    if wrap is not None:
        if script is not None:
            raise BadInput("--wrap takes the place of a script: leave the script out")
        return parse(wrapped(wrap).encode(), "wrap")
    if script is not None:
        return read(script)
    if stdin is None and sys.stdin.isatty():
        raise BadInput("no script: name one, give --wrap COMMAND, or pipe one in")
    return parse(sys.stdin.buffer.read() if stdin is None else stdin, "stdin")


def _request(
    site: Site,
    head: ScriptHead,
    arguments: tuple[str, ...],
    *,
    wrapped: bool,
    given: Mapping[str, Any],
) -> Request:
    def chosen(option: str, variable: str) -> str | None:
        said = given[option.replace("-", "_")]
        return first_given(said, os.environ.get(variable), head.value(option))

    workdir = Path(first_given(given["chdir"], head.value("chdir")) or ".").absolute()
    if not workdir.is_dir():
        raise BadInput(f"--chdir {workdir}: there is no such folder: make it, or name another")
    output = chosen("output", "SBATCH_OUTPUT") or "slurm-%j.out"
    error = chosen("error", "SBATCH_ERROR")
    for pattern in (output, error):
        folder = workdir / Path(pattern or "").parent
        if "%" not in str(folder) and not folder.is_dir():
            raise BadInput(f"there is no folder {folder} for the output {pattern}: make it")
    limit = chosen("time", "SBATCH_TIMELIMIT")
    seconds = parse_time(limit) if limit else None
    slowdown = given["max_slowdown"] or head.max_slowdown
    default_name = {"wrap": "wrap", "stdin": "sbatch"}.get(head.path, Path(head.path).name)
    return Request(
        partition=site.partition,
        name=chosen("job-name", "SBATCH_JOB_NAME") or default_name,
        account=chosen("account", "SBATCH_ACCOUNT") or "default",
        models=given["models"] or head.models,
        seed=_or(given["seed"], head.seed, 0),
        priority=_or(given["priority"], head.priority, 1),
        shown=f"(wrap) {shlex.join(arguments)}".strip() if wrapped else head.path,
        script=head.without(),
        arguments=arguments,
        workdir=workdir,
        environment=environment_for(
            first_given(given["export"], os.environ.get("SBATCH_EXPORT")) or "ALL"
        )
        | {"USER": getpass.getuser()},
        output=output,
        error=error,
        time_limit_us=None if seconds is None else seconds * 1_000_000,
        options=row_options(max_slowdown=slowdown, qos=given["qos"] or head.qos, seconds=seconds),
    )


def _or(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _say_what_is_left_out(site: Site, head: ScriptHead, given: Mapping[str, Any]) -> None:
    gpus = [str(option) for option in head.gpus]
    passed = [
        str(option)
        for option in head.options
        if option.name not in INTERPRETED and option not in head.gpus
    ]
    for group, found in ((GPU_OPTIONS, gpus), (PASSED_ON, passed)):
        for flags in group:
            value = given[flags[-1].removeprefix("--").replace("-", "_")]
            if value is not None:
                found.append(f"{flags[-1]}={value}")
    if gpus:
        note(f"left out {', '.join(gpus)}: the GPUs come from partition {site.partition}")
    if passed:
        note(f"no effect: {', '.join(passed)}: partition {site.partition} runs without Slurm")
