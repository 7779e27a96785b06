"""``plexrl sbatch``: sbatch's options, sbatch's answers."""

import getpass
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from plexrl_slurm.cli.app import App, note, shared, waiting
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.submit import (
    Request,
    environment_for,
    exit_code_of,
    first_given,
    shown_names,
    slurm_of,
    submit,
    wrapped,
)
from plexrl_slurm.cli.wait import wait_for_end
from plexrl_slurm.core.errors import BadInput, UnknownModel
from plexrl_slurm.settings import Site
from plexrl_slurm.slurm.directives import (
    PARSERS,
    ScriptHead,
    parse,
    parse_time,
    read,
)

#: The service provides the GPUs, so these are taken out, with a note.
_GPU_OPTIONS: Final = (("-G", "--gpus"), ("--gpus-per-node",), ("--gpus-per-task",), ("--gres",))
#: Passed to Slurm as they are; without Slurm a note says that they have no effect.
_PASSED_ON: Final = (
    ("-c", "--cpus-per-task"),
    ("--mem",),
    ("-N", "--nodes"),
    ("-n", "--ntasks"),
    ("-q", "--qos"),
    ("-C", "--constraint"),
    ("-d", "--dependency"),
    ("--comment",),
)


def parsed(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that reads the value as a ``#PLEXRL`` line would be read."""

    def convert(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        try:
            if isinstance(value, tuple):
                return tuple(PARSERS[name](each) for each in value)
            return None if value is None else PARSERS[name](value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def _limit(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            parse_time(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def plexrl_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The twins of ``#PLEXRL`` lines, for sbatch and run."""
    for option in (
        click.option(
            "--max-slowdown",
            metavar="X",
            callback=parsed("max-slowdown"),
            help="How much slower than alone the job may run.",
        ),
        click.option(
            "--priority", metavar="N", callback=parsed("priority"), help="Scheduling weight."
        ),
        click.option(
            "--seed", metavar="N", callback=parsed("seed"), help="Seed of the job's samples."
        ),
        click.option(
            "--model",
            "models",
            metavar="NAME",
            multiple=True,
            callback=parsed("model"),
            help="A model of the catalogue that the job will use; repeatable.",
        ),
    ):
        command = option(command)
    return command


def _passed_through(command: Callable[..., Any]) -> Callable[..., Any]:
    for flags in reversed(_GPU_OPTIONS):
        help_text = "Taken out: the service provides the GPUs."
        command = click.option(*flags, metavar="X", help=help_text)(command)
    for flags in reversed(_PASSED_ON):
        command = click.option(*flags, metavar="X", help="Passed on to Slurm.")(command)
    return command


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-J", "--job-name", metavar="NAME", help="Name of the job.")
@click.option("-A", "--account", metavar="NAME", help="Account to charge.")
@click.option("-o", "--output", metavar="FILE", help="Output; %j: job number, %x: job name.")
@click.option("-e", "--error", metavar="FILE", help="Standard error, if not with the output.")
@click.option("-D", "--chdir", metavar="DIR", help="Working directory of the job.")
@click.option("-t", "--time", metavar="LIMIT", callback=_limit, help="Time limit, D-HH:MM:SS.")
@click.option("--wrap", metavar="COMMAND", help="Submit a command instead of a script.")
@click.option("--parsable", is_flag=True, help="Print the job's number only.")
@click.option("--test-only", is_flag=True, help="Check everything, submit nothing.")
@click.option("-W", "--wait", is_flag=True, help="Wait for the end; exit with the job's code.")
@click.option("--export", metavar="ALL|NONE|VARS", help="Environment of the job [ALL].")
@plexrl_options
@_passed_through
@shared
@click.pass_obj
def sbatch(
    app: App,
    /,
    script: str | None,
    arguments: tuple[str, ...],
    wrap: str | None,
    parsable: bool,
    test_only: bool,
    wait: bool,
    **given: Any,
) -> int:
    """Submit SCRIPT, or standard input, with ARGUMENTS.

    The script's #SBATCH and #PLEXRL lines count where neither the command line nor an SBATCH_*
    variable says otherwise. The job starts when the service has a place for its models.
    """
    head = _head(script, wrap)
    site = app.site(first_given(os.environ.get("SBATCH_PARTITION"), head.sbatch.get("partition")))
    request = _request(site, head, arguments, wrapped=wrap is not None, given=given)
    _say_what_is_left_out(site, head, given)
    with Client(site) as client:
        if test_only:
            _test(client, site, request)
            app.answer({"name": request.name, "submitted": False, **_where(site, request)}, "")
            return 0
        with waiting(f"submitting to partition {site.partition}"):
            job = submit(client, slurm_of(site), request)
        facts = {
            "job_id": job.job_id,
            "slurm_id": job.slurm_id,
            "name": request.name,
            **_where(site, request),
        }
        text = job.slurm_id if parsable else f"Submitted batch job {job.slurm_id}"
        app.answer(facts, text)
        if wait:
            return exit_code_of(wait_for_end(client, job.slurm_id))
    return 0


def _where(site: Site, request: Request) -> dict[str, Any]:
    return {"partition": site.partition, "models": list(request.models)}


def _head(script: str | None, wrap: str | None) -> ScriptHead:
    if wrap is not None:
        if script is not None:
            raise BadInput("--wrap takes the place of a script: leave the script out")
        return parse(wrapped(wrap).encode(), "wrap")
    if script is not None:
        return read(script)
    if sys.stdin.isatty():
        raise BadInput("no script: name one, give --wrap COMMAND, or pipe one in")
    return parse(sys.stdin.buffer.read(), "stdin")


def _request(
    site: Site,
    head: ScriptHead,
    arguments: tuple[str, ...],
    *,
    wrapped: bool,
    given: dict[str, Any],
) -> Request:
    def chosen(option: str, variable: str) -> str | None:
        said = given[option.replace("-", "_")]
        return first_given(said, os.environ.get(variable), head.sbatch.get(option))

    workdir = Path(first_given(given["chdir"], head.sbatch.get("chdir")) or ".").absolute()
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
        script=head.text,
        arguments=arguments,
        workdir=workdir,
        environment=environment_for(
            first_given(given["export"], os.environ.get("SBATCH_EXPORT")) or "ALL"
        )
        | {"USER": getpass.getuser()},
        output=output,
        error=error,
        time_limit_us=None if seconds is None else seconds * 1_000_000,
        options={} if slowdown is None else {"max_slowdown": str(slowdown)},
    )


def _or(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _say_what_is_left_out(site: Site, head: ScriptHead, given: dict[str, Any]) -> None:
    gpus = [" ".join(option.words) for option in head.gpus]
    passed = [" ".join(option.words) for option in head.passed_on]
    for group, found in ((_GPU_OPTIONS, gpus), (_PASSED_ON, passed)):
        for flags in group:
            value = given[flags[-1].removeprefix("--").replace("-", "_")]
            if value is not None:
                found.append(f"{flags[-1]}={value}")
    if gpus:
        note(f"left out {', '.join(gpus)}: the GPUs come from partition {site.partition}")
    if passed and site.backend == "local":
        note(f"no effect: {', '.join(passed)}: partition {site.partition} runs without Slurm")


def _test(client: Client, site: Site, request: Request) -> None:
    offered = tuple(str(model["name"]) for model in client.nodes()["models"])
    for name in request.models:
        if name not in offered:
            raise UnknownModel(name, offered)
    note(
        f"{request.shown} is fine for partition {site.partition} "
        f"(models: {shown_names(request.models)}); nothing was submitted"
    )
