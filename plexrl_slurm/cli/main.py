"""``plexrl``: the group of commands, and how an error ends the program."""

import errno
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn, cast

import click

from plexrl_slurm.cli.app import App, shared
from plexrl_slurm.core.errors import PlexError

#: Strings, so that one command never imports another's needs.
_WHERE: Final[Mapping[str, str]] = {
    "sbatch": "plexrl_slurm.cli.sbatch:sbatch",
    "run": "plexrl_slurm.cli.run:run",
    "credentials": "plexrl_slurm.cli.credentials:credentials",
    "squeue": "plexrl_slurm.cli.queue:squeue",
    "sprio": "plexrl_slurm.cli.sprio:sprio",
    "scancel": "plexrl_slurm.cli.queue:scancel",
    "sacct": "plexrl_slurm.cli.queue:sacct",
    "sinfo": "plexrl_slurm.cli.nodes:sinfo",
    "state": "plexrl_slurm.cli.state:state",
    "explain": "plexrl_slurm.cli.explain:explain",
    "show": "plexrl_slurm.cli.show_job:show",
    "sreport": "plexrl_slurm.cli.report:sreport",
    "trace": "plexrl_slurm.cli.trace:trace",
    "sim": "plexrl_slurm.cli.sim:sim",
    "partition": "plexrl_slurm.cli.partition:partition",
    "admin": "plexrl_slurm.cli.admin:admin",
    "doctor": "plexrl_slurm.cli.doctor:doctor",
    "demo": "plexrl_slurm.cli.demo:demo",
}


class PlexGroup(click.Group):
    """Finds commands by name; prints an error as one sentence and exits with its own code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_WHERE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _WHERE:
            return None
        module, _, name = _WHERE[cmd_name].partition(":")
        return cast(click.Command, getattr(import_module(module), name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _WHERE:
            import difflib  # only for a mistake

            close = difflib.get_close_matches(args[0], _WHERE, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_WHERE)}"
            ctx.fail(f"unknown command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        extra["standalone_mode"] = False
        try:
            code = super().main(args=args, prog_name=prog_name, **extra)
        except PlexError as error:
            _fail(str(error), error.exit_code)
        except click.ClickException as error:
            usage = getattr(error, "ctx", None)
            hint = f" (see {usage.command_path} --help)" if usage is not None else ""
            _fail(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            _fail("interrupted", 130)
        except BrokenPipeError:  # `plexrl squeue | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except OSError as error:  # `plexrl squeue > /full/disk`
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _fail(f"the answer cannot be written ({error.strerror}): make room there", 74)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(sentences: str, code: int) -> NoReturn:
    for sentence in sentences.splitlines():
        click.echo(f"plexrl: error: {sentence.strip()}", err=True)
    sys.exit(code)


@click.group(
    cls=PlexGroup,
    context_settings={"auto_envvar_prefix": "PLEXRL", "help_option_names": ["--help"]},
)
@click.version_option(package_name="plexrl-slurm", prog_name="plexrl")
@shared
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run RLVR jobs that share held Slurm GPUs.

    Commands, options and columns are named as Slurm names them. Every option has an
    environment variable: PLEXRL_CONFIG, PLEXRL_SBATCH_SEED and so on.
    """
    ctx.ensure_object(App)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    # What is imported stays: neither now nor at the end need anybody look for garbage in it.
    gc.freeze()
    cli.main(args=argv, prog_name="plexrl")


if __name__ == "__main__":
    main()
