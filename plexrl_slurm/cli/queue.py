"""``plexrl squeue``, ``scancel``, ``sacct``: jobs, in Slurm's columns."""

import getpass
import pwd
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, note, shared
from plexrl_slurm.cli.jobids import JobNumber, as_numbers
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadInput, NotFound, PlexError

_SHORT: Final = (
    ("JOBID", 18),
    ("PARTITION", 9),
    ("NAME", 8),
    ("USER", 8),
    ("ST", 2),
    ("TIME", 10),
    ("STEPS", 6),
    ("NODELIST(REASON)", 0),
)
_LONG: Final = (
    ("JOBID", 18),
    ("PARTITION", 9),
    ("NAME", 20),
    ("USER", 8),
    ("ACCOUNT", 8),
    ("STATE", 11),
    ("TIME", 10),
    ("STEPS", 6),
    ("BUSY", 10),
    ("MODELS", 16),
    ("NODELIST(REASON)", 0),
)
_START: Final = (
    ("JOBID", 18),
    ("PARTITION", 9),
    ("NAME", 8),
    ("USER", 8),
    ("ST", 2),
    ("START_TIME", 19),
    ("NODELIST(REASON)", 0),
)
#: squeue -l and explain have all of it.
_REASON_WIDTH: Final = 40
_ACCOUNTED: Final = (
    ("JobID", 12),
    ("JobName", 10),
    ("Account", 10),
    ("State", 11),
    ("ExitCode", 8),
    ("Elapsed", 10),
    ("GPUSecs", 10),
    ("Steps", 6),
)


def _list(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(word for word in text.split(",") if word)


def _states(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> frozenset[str] | None:
    try:
        return None if value is None else show.states_named(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _number(job: Mapping[str, Any]) -> str:
    """What the user calls the job; a row without a Slurm job has only ours."""
    return str(job["slurm_id"]) if job["slurm_id"] is not None else f"(row {job['job_id']})"


def _running_us(job: Mapping[str, Any]) -> int:
    started, ended = job["started_us"], job["ended_us"]
    return 0 if started is None else (ended if ended is not None else now_us()) - int(started)


def _where(job: Mapping[str, Any], *, whole: bool) -> str:
    if job["state"] == "running" and job["wpgs"]:
        return ",".join(job["wpgs"]) + _tails(job, whole=whole)
    word, reason = str(job.get("reason_word") or ""), str(job["reason"] or "None")
    if word and not whole:
        return f"({word})"
    if word:
        return f"({word}: {reason})"
    if not whole and len(reason) > _REASON_WIDTH:
        reason = f"{reason[: _REASON_WIDTH - 3].rstrip(' ,:;')}..."
    return f"({reason})"


def _tails(job: Mapping[str, Any], *, whole: bool) -> str:
    """That its last samples run beside another job's, or it beside those of one."""
    beside = job.get("beside") or ()
    words = "; ".join(f"{e['word']}: {e['sentence']}" if whole else e["word"] for e in beside)
    return f"({words})" if words else ""


def _find(
    app: App,
    *,
    users: frozenset[str] | None,
    numbers: Sequence[JobNumber] | None,
    states: frozenset[str] | None,
    ended: bool,
) -> list[dict[str, Any]]:
    names = None if users is None else frozenset(map(_name_of, users))
    user = next(iter(names)) if names is not None and len(names) == 1 else None
    with app.client() as client:
        # Whoever asks for a number is to hear the difference between ended and unknown.
        jobs = client.jobs(user=user, ended=ended or numbers is not None)
    _refuse_strangers(names, jobs)
    if numbers is not None:
        missing = [each.word for each in numbers if not _fits(jobs, each)]
        if len(missing) == len(numbers):
            raise NotFound("job", ",".join(missing))
        for word in missing:
            note(str(NotFound("job", word)))
    return [
        job
        for job in sorted(jobs, key=lambda job: int(job["job_id"]))
        if (names is None or job["user"] in names)
        and (numbers is None or any(each.fits(job["slurm_id"]) for each in numbers))
        and (states is None or job["state"] in states)
        and (ended or job["state"] not in show.ENDED)
    ]


def _fits(jobs: Iterable[Mapping[str, Any]], number: JobNumber) -> bool:
    return any(number.fits(job["slurm_id"]) for job in jobs)


def _name_of(user: str) -> str:
    """A user's name, also for a number."""
    if not user.isdecimal():
        return user
    try:
        return pwd.getpwuid(int(user)).pw_name
    except (KeyError, OverflowError):
        raise BadInput(f"invalid user {user}: no user has this number") from None


def _refuse_strangers(names: frozenset[str] | None, jobs: Iterable[Mapping[str, Any]]) -> None:
    """A name that is mistyped looks like one without jobs."""
    for name in sorted(names or ()):
        try:
            pwd.getpwnam(name)
        except KeyError:  # this host need not know everybody
            if not any(job["user"] == name for job in jobs):
                raise BadInput(f"invalid user {name!r}: nobody here is called so") from None


@click.command()
@click.option("-u", "--user", metavar="NAMES", help="Only jobs of these users.")
@click.option("--me", is_flag=True, help="Only your own jobs.")
@click.option("-j", "--jobs", metavar="IDS", callback=as_numbers, help="Only these jobs.")
@click.option("-t", "--states", metavar="STATES", callback=_states, help="Such as PD,R; or all.")
@click.option("--all", "everything", is_flag=True, help="Ended jobs too.")
@click.option("--start", is_flag=True, help="Waiting jobs, and when each is expected to start.")
@click.option("-l", "--long", is_flag=True, help="More columns.")
@click.option("-h", "--noheader", is_flag=True, help="No first line.")
@shared
@click.pass_obj
def squeue(
    app: App,
    user: str | None,
    me: bool,
    jobs: list[JobNumber] | None,
    states: frozenset[str] | None,
    everything: bool,
    start: bool,
    long: bool,
    noheader: bool,
) -> None:
    """Show jobs that wait or run."""
    if start:
        states = frozenset({"pending", "admitted"})
    found = _find(
        app,
        users=frozenset({getpass.getuser()}) if me else _list(user),
        numbers=jobs,
        states=states,
        ended=everything or bool(states and states & show.ENDED),
    )
    if start:
        found = _with_starts(app, found)
    columns = _START if start else _LONG if long else _SHORT
    app.answer(
        {"jobs": found},
        lambda: show.table(columns, (_row(job, columns) for job in found), header=not noheader),
    )


def _with_starts(app: App, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Soonest first, then those of which nobody can tell; at once, as the queue has them."""
    with app.client() as client:
        starts = {int(each["job_id"]): each for each in client.starts()}
    place = {job: number for number, job in enumerate(starts)}
    known = ("start_us", "unknown", "sentence")
    found = [
        job | {f"expected_{key}": starts.get(int(job["job_id"]), {}).get(key) for key in known}
        for job in jobs
    ]

    def key(job: Mapping[str, Any]) -> tuple[bool, int, int]:
        at_us = job["expected_start_us"]
        return at_us is None, at_us or 0, place.get(int(job["job_id"]), len(place))

    return sorted(found, key=key)


def _start(job: Mapping[str, Any]) -> str:
    """As Slurm writes it; ``unknown`` where nobody can tell."""
    at_us = job.get("expected_start_us")
    if at_us is None:
        return "N/A" if job["state"] != "pending" else "unknown"
    return show.local_moment(int(at_us))


def _row(job: Mapping[str, Any], columns: Sequence[tuple[str, int]]) -> list[str]:
    cells = {
        "JOBID": _number(job),
        "PARTITION": job["partition"],
        "NAME": job["name"],
        "USER": job["user"],
        "ACCOUNT": job["account"],
        "ST": show.short_state(job["state"]),
        "STATE": show.long_state(job["state"]),
        "TIME": show.duration(_running_us(job)),
        "START_TIME": _start(job),
        "STEPS": str(job["steps"]),
        "BUSY": show.duration(job["gpu_us"]["busy"]),
        "MODELS": ",".join(job["models"]),
        "NODELIST(REASON)": _where(job, whole=columns is _LONG),
    }
    return [cells[name] for name, _ in columns]


@click.command()
@click.argument("numbers", metavar="JOBID...", nargs=-1, required=True, callback=as_numbers)
@shared
@click.pass_obj
def scancel(app: App, numbers: list[JobNumber]) -> int:
    """Cancel jobs; an array's number cancels all its tasks."""
    cancelled: list[str] = []
    failures: list[PlexError] = []
    reason = f"cancelled by {getpass.getuser()}"
    with app.client() as client:
        jobs = client.jobs(ended=True)
        for number in numbers:
            try:
                for job in number.among(jobs):
                    if job["state"] not in show.ENDED:
                        client.cancel(int(job["job_id"]), reason=reason)
                    cancelled.append(str(job["slurm_id"]))
            except PlexError as error:
                failures.append(error)
    app.answer({"cancelled": cancelled}, "")
    if len(failures) == 1:
        raise failures[0]
    for failure in failures:
        note(f"error: {failure}")
    return failures[0].exit_code if failures else 0


@click.command()
@click.option("-u", "--user", metavar="NAMES", help="Only jobs of these users.")
@click.option("-j", "--jobs", metavar="IDS", callback=as_numbers, help="Only these jobs.")
@click.option("-s", "--state", "states", metavar="STATES", callback=_states, help="Such as CD,F.")
@click.option("-P", "--parsable2", is_flag=True, help="Columns separated by |.")
@click.option("-n", "--noheader", is_flag=True, help="No first lines.")
@shared
@click.pass_obj
def sacct(
    app: App,
    user: str | None,
    jobs: list[JobNumber] | None,
    states: frozenset[str] | None,
    parsable2: bool,
    noheader: bool,
) -> None:
    """Show jobs, ended ones too, and what they were charged."""
    found = _find(app, users=_list(user), numbers=jobs, states=states, ended=True)
    app.answer({"jobs": found}, lambda: _accounts(found, parsable=parsable2, header=not noheader))


def _accounts(jobs: Iterable[Mapping[str, Any]], *, parsable: bool, header: bool) -> str:
    rows = [
        [
            _number(job),
            job["name"],
            job["account"],
            show.long_state(job["state"]),
            f"{job['exit_code'] or 0}:0",
            show.elapsed(_running_us(job)),
            f"{sum(job['gpu_us'].values()) / 1e6:.1f}",
            str(job["steps"]),
        ]
        for job in jobs
    ]
    if parsable:
        lines = [[name for name, _ in _ACCOUNTED]] if header else []
        return "\n".join("|".join(line) for line in [*lines, *rows])
    text = show.ruled(_ACCOUNTED, rows)
    return text if header else "\n".join(text.split("\n")[2:])
