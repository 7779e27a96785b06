"""``plexrl sbatch``: sbatch's options, sbatch's answers."""

from collections.abc import Callable
from typing import Any, Final

import click

from plexrl_slurm.cli.app import App, shared

_PLAN: Final = "plexrl_slurm.cli.sbatch.plan"
_STDIN: Final = "plexrl_slurm.cli.sbatch.stdin"


def parsed(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that reads the value as a ``#PLEXRL`` line would be read."""

    def convert(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        from plexrl_slurm.slurm.directives import PARSERS

        try:
            if isinstance(value, tuple):
                return tuple(PARSERS[name](each) for each in value)
            return None if value is None else PARSERS[name](value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def _limit(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    from plexrl_slurm.slurm.directives import parse_time

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
            "--plexrl-qos",
            "-q",
            "--qos",
            "qos",
            metavar="NAME",
            callback=parsed("qos"),
            help="QOS of the partition; with Slurm, --qos is Slurm's own.",
        ),
        click.option(
            "--plexrl-priority",
            "--priority",
            "priority",
            metavar="N",
            callback=parsed("priority"),
            help="Scheduling weight; with Slurm, --priority is Slurm's own.",
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


#: The service provides the GPUs, so these are taken out, with a note.
GPU_OPTIONS: Final = (("-G", "--gpus"), ("--gpus-per-node",), ("--gpus-per-task",), ("--gres",))
#: Slurm's; where there is none a note says that they have no effect.
PASSED_ON: Final = (
    ("-c", "--cpus-per-task"),
    ("--mem",),
    ("-N", "--nodes"),
    ("-n", "--ntasks"),
    ("-C", "--constraint"),
    ("-d", "--dependency"),
    ("--comment",),
)


def _passed_through(command: Callable[..., Any]) -> Callable[..., Any]:
    for flags in reversed(GPU_OPTIONS):
        help_text = "Taken out: the service provides the GPUs."
        command = click.option(*flags, metavar="X", help=help_text)(command)
    for flags in reversed(PASSED_ON):
        command = click.option(*flags, metavar="X", help="Passed on to Slurm.")(command)
    return command


class _Sbatch(click.Command):
    """With Slurm the command line is sbatch's own, and so is what it means."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from plexrl_slurm.cli.slurm_submit import prepare, scan_line

        if scan_line(args)[0].has("help"):
            return super().parse_args(ctx, ["--help"])
        plan, stdin = prepare(ctx.ensure_object(App), args)
        ctx.meta[_STDIN] = stdin
        if plan is None:
            return super().parse_args(ctx, args)
        ctx.meta[_PLAN] = plan
        return []

    def invoke(self, ctx: click.Context) -> Any:
        if (plan := ctx.meta.get(_PLAN)) is None:
            return super().invoke(ctx)
        from plexrl_slurm.cli.slurm_submit import submit_with_slurm

        return submit_with_slurm(plan)


@click.command(cls=_Sbatch, context_settings={"allow_interspersed_args": False})
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
@click.pass_context
def sbatch(
    ctx: click.Context, /, script: str | None, arguments: tuple[str, ...], **given: Any
) -> int:
    """Submit SCRIPT, or standard input, with ARGUMENTS.

    The script's #SBATCH and #PLEXRL lines count where neither the command line nor an SBATCH_*
    variable says otherwise. The job starts when the service has a place for its models.

    With Slurm every option of sbatch is possible, also abbreviated, and is handed to sbatch as it
    is; answers and exit codes are sbatch's. Requests for GPUs are taken out. -p names the PlexRL
    partition; the controller runs in the Slurm partition that the site has chosen for it. After
    --hold the job gets no place before your own release.
    """
    from plexrl_slurm.cli.local_submit import submit_here

    return submit_here(
        ctx.ensure_object(App),
        script=script,
        arguments=arguments,
        stdin=ctx.meta[_STDIN],
        given=given,
    )
