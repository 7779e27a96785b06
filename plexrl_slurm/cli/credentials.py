"""``plexrl credentials``: what a Slurm job needs to use the service, as lines to evaluate."""

import os
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from plexrl_slurm.cli.app import App, shared
from plexrl_slurm.core.errors import BadInput, PlexError

#: A TaskProlog holds up a task, so it gives up soon; the second limit is for what cannot be
#: interrupted, such as looking up a host's name.
_PROLOG_ANSWER_S: Final = 3.0
_PROLOG_S: Final = 4.0


@click.command()
@click.option("--shell", "form", flag_value="shell", default=True, help="Lines for eval [default].")
@click.option(
    "--task-prolog", "form", flag_value="task-prolog", help="Lines for Slurm's TaskProlog."
)
@shared
@click.pass_obj
def credentials(app: App, /, form: str) -> int:
    """Print the environment with which this Slurm job uses the service.

    Nothing is printed if the job is none of the service's. As a TaskProlog it never fails and
    takes at most 4 seconds: what is wrong is printed into the task's output.
    """
    if form == "task-prolog":
        with _at_most(_PROLOG_S):
            sys.stdout.write(_for_prolog(app))
            sys.stdout.flush()
        return 0
    environment = _environment(app, timeout_s=None)
    if environment is None:
        return 0
    quoted = (f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    app.answer(environment, "\n".join(quoted))
    return 0


def _environment(app: App, *, timeout_s: float | None) -> dict[str, str] | None:
    """Of this job; ``None`` if it is none of ours."""
    from plexrl_slurm.cli.client import TIMEOUT_S, Client
    from plexrl_slurm.cli.inside import slurm_id_of

    slurm_id = slurm_id_of(os.environ)
    if slurm_id is None:
        raise BadInput("SLURM_JOB_ID is not set: run this inside a Slurm job")
    with Client(app.site(), timeout_s=timeout_s or TIMEOUT_S) as client:
        answer = client.credentials(slurm_id)
    return None if answer is None else dict(answer["env"])


def _for_prolog(app: App) -> str:
    try:
        environment = _environment(app, timeout_s=_PROLOG_ANSWER_S) or {}
    except PlexError as error:
        return _said(str(error))
    except Exception as error:  # a prolog that fails ends the task, whatever it is
        return _said(f"{type(error).__name__}: {error}")
    return "".join(f"export {name}={value}\n" for name, value in environment.items())


def _said(sentences: str) -> str:
    """A line that Slurm prints into the task's output."""
    return f"print plexrl: {' '.join(sentences.split())}\n"


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End the process, as if all were well, when the time is over."""

    def end() -> None:
        os.write(1, _said(f"no credentials: no answer within {seconds:g} s").encode())
        os._exit(0)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
