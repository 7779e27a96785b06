"""Inside a running Slurm job: its number, and its credentials as soon as the service admits it."""

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

from plexrl_slurm.cli.app import note, waiting
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.row_options import row_options
from plexrl_slurm.core.errors import (
    BadInput,
    DaemonUnavailable,
    DatabaseUnavailable,
    NotAdmitted,
    NotFound,
    PlexError,
)

if TYPE_CHECKING:
    from plexrl_slurm.settings import Site

#: Between two questions: at first, and in the end.
STEP_S: Final = 0.25
LONGEST_STEP_S: Final = 5.0
#: A service that is away for longer is not coming back by itself.
PATIENCE_S: Final = 600.0
#: Exit codes of what may pass by itself.
_PASSING: Final = frozenset({DaemonUnavailable.exit_code, DatabaseUnavailable.exit_code})

Answer = TypeVar("Answer")
#: Tells the user what is waited for.
Show: TypeAlias = Callable[[str], None]


def slurm_id_of(environment: Mapping[str, str]) -> str | None:
    """The job that runs here: its number, ``N_k`` of an array's task, the leader of a het job."""
    array, task = (environment.get(f"SLURM_ARRAY_{name}", "") for name in ("JOB_ID", "TASK_ID"))
    if array and task:
        return f"{array}_{task}"
    for name in ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_HET_JOB_ID", "SLURM_JOB_ID"):
        if number := environment.get(name):
            return number
    return None


def run_inside(
    site: "Site", slurm_id: str, command: Sequence[str], given: Mapping[str, Any]
) -> NoReturn:
    """Become ``command`` with the job's credentials; a job that the service does not know yet
    is queued first, as it runs, and taken out of the queue again if this fails."""
    if shutil.which(command[0]) is None:
        raise BadInput(f"there is no program {command[0]} here: name one, or correct PATH")
    with Client(site) as client, _terminable():
        queued: int | None = None
        try:
            with waiting(f"asking for the credentials of job {slurm_id}") as show:
                known, answer = _first_answer(client, slurm_id, show)
                if known and any(given.values()):
                    note(
                        f"job {slurm_id} was submitted through PlexRL: what was said there "
                        f"counts, not the options of plexrl run"
                    )
                if not known:
                    queued = _queue(client, site, slurm_id, command, given)
                    _patiently(partial(client.bind, queued, slurm_id), show)
                if answer is None:
                    answer = _when_admitted(client, slurm_id, show)
            _become(command, {**os.environ, **answer["env"]})
        except BaseException as error:
            if queued is not None:
                _undo(client, queued, error)
            raise


def _first_answer(client: Client, slurm_id: str, show: Show) -> tuple[bool, dict[str, Any] | None]:
    """Whether the service knows the job, and its credentials if it is admitted."""
    try:
        answer = _patiently(lambda: client.credentials(slurm_id), show)
    except NotAdmitted:
        return True, None
    return answer is not None, answer


def _queue(
    client: Client, site: "Site", slurm_id: str, command: Sequence[str], given: Mapping[str, Any]
) -> int:
    """A row for the job that runs here."""
    have = os.environ
    row = client.submit(
        {
            "partition": site.partition,
            "name": given["job_name"] or have.get("SLURM_JOB_NAME") or Path(command[0]).name,
            "account": given["account"] or have.get("SLURM_JOB_ACCOUNT") or "default",
            "models": list(given["models"]),
            "priority": given["priority"] or 1,
            "seed": given["seed"] or 0,
            "script": shlex.join(command),
            "options": row_options(max_slowdown=given["max_slowdown"], qos=given["qos"]),
        }
    )
    return int(row["job_id"])


def _when_admitted(client: Client, slurm_id: str, show: Show) -> dict[str, Any]:
    pause = STEP_S
    while True:
        try:
            answer = _patiently(lambda: client.credentials(slurm_id), show)
        except NotAdmitted as why:
            show(str(why))
        else:
            if answer is None:
                raise NotFound("queued job", slurm_id)
            return answer
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_STEP_S)


def _patiently(ask: Callable[[], Answer], show: Show) -> Answer:
    """What ``ask`` answers; a restart of the daemon meanwhile is only a pause."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except PlexError as error:
            passing = error.exit_code in _PASSING and not isinstance(error, NotAdmitted)
            if not passing or time.monotonic() > until:
                raise
            show(f"still trying, because {error}")
        time.sleep(2 * STEP_S)


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the command would go on so
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise BadInput(f"{command[0]} cannot be run here: {error.strerror}") from error


def _undo(client: Client, job_id: int, why: BaseException) -> None:
    """Take the row out; the Slurm job is the user's and goes on."""
    try:
        reason = f"plexrl run gave up: {why or type(why).__name__}"
        client.cancel(job_id, reason=reason, keep_slurm_job=True)
    except PlexError as error:
        note(f"queue row {job_id} could not be taken back ({error}); it ends with the Slurm job")


@contextmanager
def _terminable() -> Iterator[None]:
    """A TERM, such as Slurm's at the end of a job, is an interrupt."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
