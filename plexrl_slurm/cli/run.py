"""``plexrl run``: inside a Slurm job, become the command; elsewhere submit, wait and stream."""

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import click

from plexrl_slurm.cli.app import App, note, shared
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.row_options import row_options
from plexrl_slurm.cli.sbatch import plexrl_options
from plexrl_slurm.cli.submit import (
    Request,
    Submitted,
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


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-J", "--job-name", metavar="NAME", help="Name of the job.")
@click.option("-A", "--account", metavar="NAME", help="Account to charge.")
@plexrl_options
@shared
@click.pass_obj
def run(app: App, /, command: tuple[str, ...], **given: Any) -> int:
    """Run COMMAND as a job, here, and exit with its exit code.

    Write -- before the command. Inside a Slurm job the command gets that job's credentials; if
    the job was not submitted through PlexRL, it is queued first, and the command waits for its
    turn.
    """
    site = app.site(os.environ.get("SBATCH_PARTITION"))
    if site.backend == "slurm":
        from plexrl_slurm.cli.inside import run_inside, slurm_id_of

        if (slurm_id := slurm_id_of(os.environ)) is not None:
            run_inside(site, slurm_id, command, given)
        return _with_slurm(app, site, command, given)
    with tempfile.TemporaryDirectory(prefix="plexrl-run-") as folder, Client(site) as client:
        files = (Path(folder) / "out", Path(folder) / "err")
        request = Request(
            partition=site.partition,
            name=given["job_name"] or Path(command[0]).name,
            account=first_given(given["account"], os.environ.get("SBATCH_ACCOUNT")) or "default",
            models=given["models"],
            seed=given["seed"] or 0,
            priority=given["priority"] or 1,
            shown=shlex.join(command),
            script=wrapped(f"exec {shlex.join(command)}"),
            arguments=(),
            workdir=Path.cwd(),
            environment=environment_for("ALL"),
            output=str(files[0]),
            error=str(files[1]),
            options=row_options(max_slowdown=given["max_slowdown"], qos=given["qos"]),
        )
        for file in files:
            file.touch()
        return _follow(app, client, submit(client, slurm_of(site), request), files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listener(App):
    """Keeps the answer of another command instead of printing it."""

    heard: dict[str, Any] = field(default_factory=dict)

    def answer(self, value: Any, text: str | Callable[[], str]) -> None:
        self.heard.update(value)


def _with_slurm(app: App, site: Site, command: tuple[str, ...], given: dict[str, Any]) -> int:
    """The same path as ``plexrl sbatch``; the output goes through files where the job can write."""
    from plexrl_slurm.cli.slurm_submit import prepare, submit_with_slurm

    with tempfile.TemporaryDirectory(prefix=".plexrl-run-", dir=Path.cwd()) as folder:
        files = (Path(folder) / "out", Path(folder) / "err")
        for file in files:
            file.touch()
        options = {
            "wrap": f"exec {shlex.join(command)}",
            "output": str(files[0]),
            "error": str(files[1]),
            "job-name": given["job_name"] or Path(command[0]).name,
            "account": given["account"],
            "seed": given["seed"],
            "plexrl-priority": given["priority"],
            "max-slowdown": given["max_slowdown"],
            "plexrl-qos": given["qos"],
        }
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        words += [f"--model={model}" for model in given["models"]]
        listener = _Listener(config=site.path, partition=site.partition, json=True)
        plan, _ = prepare(listener, words)
        if plan is None:
            raise BadInput(f"{site.path} names no Slurm any more: try again")
        code = submit_with_slurm(plan)
        if "slurm_id" not in listener.heard:
            return code or 1
        job = Submitted(
            job_id=int(listener.heard["job_id"]), slurm_id=str(listener.heard["slurm_id"])
        )
        with Client(site) as client:
            return _follow(app, client, job, files)


def _follow(app: App, client: Client, job: Submitted, files: tuple[Path, Path]) -> int:
    note(f"job {job.slurm_id} is queued")
    with files[0].open("rb") as out, files[1].open("rb") as err:

        def copy() -> None:
            _copy(out, to_stderr=app.json)
            _copy(err, to_stderr=True)

        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            ended = wait_for_end(client, job.slurm_id, between=copy, quiet=True)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                note(f"cancelling job {job.slurm_id}")
            client.cancel(job.job_id, reason="plexrl run was interrupted")
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)
            copy()
    app.answer(ended, "")
    return exit_code_of(ended)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _copy(source: IO[bytes], *, to_stderr: bool) -> None:
    if data := source.read():
        stream = (sys.stderr if to_stderr else sys.stdout).buffer
        stream.write(data)
        stream.flush()
