"""Slurm's programs as the user would run them: sbatch, and what finds its job again."""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from plexrl_slurm.cli.app import App, note, waiting
from plexrl_slurm.cli.slurm_export import in_memory
from plexrl_slurm.core.errors import PlexError, SlurmUnavailable
from plexrl_slurm.slurm.sbatch_options import plugin_options

if TYPE_CHECKING:
    from plexrl_slurm.cli.client import Client
    from plexrl_slurm.whereabouts import SlurmSettings

_SUBMITTED: Final = re.compile(
    rb"^(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?\s*$", re.MULTILINE
)
#: After ctrl-C: what a submission that is under way gets to tell its number.
_GRACE_S: Final = 3.0
#: How often a job is looked for that may still come.
_LOOKS: Final = 3
_PIECE: Final = 1 << 16
#: Characters of what it said.
_REMEMBERED: Final = 2000
#: What tells TaskProlog that it is to fetch a task's own.
_EVERYBODYS: Final = ("PLEXRL_PARTITION", "TINKER_BASE_URL")
#: What sbatch says if its request may have come through and the answer was lost.
_LOST: Final = re.compile(
    r"timed out|(send|receive) failure|zero bytes|unexpected message|connection reset",
    re.IGNORECASE,
)
_ERROR: Final = re.compile(rb"\w+: (error|fatal): ")


def program(name: str, environment: Mapping[str, str]) -> str:
    """Where the program is; raises ``SlurmUnavailable`` if it cannot work anyway."""
    for folder in environment.get("PATH", "").split(":"):
        if os.access(path := f"{folder}/{name}", os.X_OK) and folder:
            break
    else:
        raise SlurmUnavailable(
            f"there is no {name} on PATH: log in to a host of the cluster that has Slurm's "
            f"programs, or put them on PATH"
        )
    conf = environment.get("SLURM_CONF")
    if conf and not Path(conf).exists():  # sbatch would look for it for a minute
        raise SlurmUnavailable(
            f"there is no Slurm configuration {conf}: correct SLURM_CONF, or `conf` in [slurm] of "
            f"the partition's settings"
        )
    return path


def configuration(slurm: "SlurmSettings") -> dict[str, str]:
    """``scontrol show config``."""
    text = _answer(slurm, "scontrol", "show", "config")
    return {
        name.strip(): value.strip()
        for name, equals, value in (line.partition("=") for line in text.splitlines())
        if equals
    }


def plugins_of(slurm: "SlurmSettings") -> Mapping[str, int]:
    """Options that the site's sbatch has, those of its plugins too."""
    return plugin_options(_answer(slurm, "sbatch", "--help"))


def ask(slurm: "SlurmSettings", words: Sequence[str]) -> int:
    """Let sbatch answer by itself."""
    environment = dict(os.environ)
    if slurm.conf is not None:
        environment["SLURM_CONF"] = str(slurm.conf)
    return Sbatch([program("sbatch", environment), *words], environment, None).run(
        slurm.timeout_us / 1e6
    )


def _answer(slurm: "SlurmSettings", *words: str) -> str:
    from plexrl_slurm.slurm.invoke import checked, environment, run

    answer = run(words, env=environment(slurm.conf), timeout_s=slurm.timeout_us / 1e6)
    return checked(answer).out.decode(errors="replace")


class Silent(SlurmUnavailable):
    """sbatch did not answer in time."""


class Sbatch:
    """One sbatch that runs: its words are passed on as they come."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stdin: bytes | None,
        *,
        quiet: bool = False,
    ) -> None:
        self._quiet = quiet
        self._cut_off = False
        self._printing = not quiet
        script = None if stdin is None else in_memory(stdin)
        try:
            # In a session of its own: ctrl-C does not cut it off in the middle, and Slurm knows
            # its job by the session's number.
            self._process = subprocess.Popen(
                argv,
                env=environment,
                stdin=script,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                close_fds=False,  # --export-file may name one
                start_new_session=True,
            )
        finally:
            if script is not None:
                os.close(script)
        self.session = self._process.pid
        #: What it has printed and nobody has passed on.
        self.out = b""
        #: What it has told the user, the end of it.
        self.words = ""
        self._rest = b""
        self._waiting = selectors.DefaultSelector()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                self._waiting.register(stream, selectors.EVENT_READ)

    def number(self, timeout_s: float) -> str | None:
        """The job's number as soon as it is told; ``None``: it ended without; raises ``Silent``."""
        until = time.monotonic() + timeout_s
        while (match := _SUBMITTED.search(self.out)) is None:
            if not self._read(until):
                self._process.wait()
                return None
        return match[1].decode()

    def run(self, timeout_s: float | None) -> int:
        """Its exit code when it has ended; what it prints is passed on."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                if self.out and self._printing:
                    click.echo(self.out, nl=False)
                self.out = b""
                if not self._read(until):
                    break
            code = self._process.wait()
        finally:
            self.end()
        return code if code >= 0 else 128 - code

    def mute(self) -> None:
        """What it prints is not for the user; what it complains about is."""
        self._printing = False

    def end(self) -> bool:
        """Kill it, if it still runs; whether nobody knows how far it has come."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self._cut_off = True
        self._waiting.close()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        return self._cut_off

    def _read(self, until: float | None) -> bool:
        """Take what has come, or wait for it; false if nothing more will."""
        if not self._waiting.get_map():
            return False
        left = None if until is None else until - time.monotonic()
        events = [] if left is not None and left <= 0 else self._waiting.select(left)
        if not events:
            raise Silent("sbatch does not answer: see `scontrol ping`, or ask your admin")
        for key, _ in events:
            if not (piece := os.read(key.fd, _PIECE)):
                self._waiting.unregister(key.fileobj)
            elif key.fileobj is self._process.stdout:
                self.out += piece
            else:
                self._pass_on(piece)
        return True

    def _pass_on(self, piece: bytes) -> None:
        self.words = (self.words + piece.decode(errors="replace"))[-_REMEMBERED:]
        if self._quiet:
            lines = (self._rest + piece).split(b"\n")
            self._rest = lines.pop()
            piece = b"".join(line + b"\n" for line in lines if _ERROR.match(line))
        click.echo(piece, nl=False, err=True)


class Submission:
    """Row first, sbatch second, bond third; undone in reverse.

    ``body`` is that of ``POST jobs``; ``argv`` makes sbatch's command line, given the
    variables that the job needs. The tasks of an array get theirs when they start, so that
    it goes without (``with_credentials``). If sbatch ``waits`` for the job's end, so do we;
    ``quiet`` says that nothing but errors is for the user.
    """

    def __init__(
        self,
        *,
        app: App,
        client: "Client",
        slurm: "SlurmSettings",
        body: Mapping[str, Any],
        argv: Callable[[Mapping[str, str]], Sequence[str]],
        environment: Mapping[str, str],
        stdin: bytes | None,
        with_credentials: bool,
        waits: bool,
        quiet: bool,
    ) -> None:
        self.app, self.client, self.slurm, self.body = app, client, slurm, body
        self.argv, self.environment, self.stdin = argv, environment, stdin
        self.with_credentials, self.waits, self.quiet = with_credentials, waits, quiet
        self._timeout_s = slurm.timeout_us / 1e6
        #: Slurm does not say whether there is a job of ours.
        self._unsure = False

    def run(self) -> int:
        """sbatch's exit code, or the job's if sbatch waits for it."""
        text = f"submitting to partition {self.body['partition']}"
        with _interruptible():
            with nullcontext() if self.quiet else waiting(text):
                sbatch, job_id, number = self._submit()
            if number is None:
                return self._refused(sbatch, job_id)
            return self._answer(sbatch, job_id, number)

    def _submit(self) -> "tuple[Sbatch, int, str | None]":
        """The sbatch, our row, and the job's number if there is one."""
        row = self.client.submit(self.body)
        job_id = int(row["job_id"])
        given: Mapping[str, str] = row["env"]
        if not self.with_credentials:
            given = {name: given[name] for name in _EVERYBODYS if name in given}
        sbatch: Sbatch | None = None
        number: str | None = None
        try:
            environment = {**self.environment, **given}
            argv = self.argv(given)
            sbatch = Sbatch(argv, environment, self.stdin, quiet=self.quiet)
            number = self._number(sbatch)
            if number is not None:
                self.client.bind(job_id, number)
        except BaseException as error:
            with _undisturbed():
                self._undo(sbatch, job_id, number, error)
            raise
        return sbatch, job_id, number

    def _number(self, sbatch: Sbatch) -> str | None:
        try:
            number = sbatch.number(self._timeout_s)
        except Silent:
            sbatch.end()
            found = self._look_once(sbatch)
            late = f"sbatch did not answer within {self._timeout_s:g} s"
            if found is None:
                rest = "nor does squeue" if self._unsure else "and Slurm has no job of it"
                raise SlurmUnavailable(
                    f"{late}, {rest}: try again later, or see `scontrol ping`"
                ) from None
            note(f"{late}, but job {found} is queued")
            return found
        if number is None and _LOST.search(sbatch.words):
            number = self._look_once(sbatch)
            if number is not None:
                note(f"but job {number} is queued")
        return number

    def _look_once(self, sbatch: Sbatch) -> str | None:
        """What :meth:`_look` finds, if anything; not again where Slurm does not say."""
        if not self._unsure:
            try:
                return self._look(sbatch.session)
            except PlexError:
                self._unsure = True
                self._say_unsure()
        return None

    def _say_unsure(self) -> None:
        note(
            f"whether Slurm queued {self.body['name']} is not known: when it answers again, "
            f"see `squeue --me` and scancel what is held there"
        )

    def _look(self, session: int) -> str | None:
        """The job that the sbatch of this session left; raises if Slurm does not say."""
        fields = "ArrayJobID:|,AllocSID:|,AllocNodes:"
        for attempt in range(_LOOKS):
            if attempt:
                time.sleep(1.0)
            text = _answer(self.slurm, "squeue", "--noheader", "--me", "-O", fields)
            for line in text.splitlines():
                number, _, rest = line.strip().partition("|")
                owner, _, _host = rest.partition("|")
                if owner == str(session):
                    return number
        return None

    def _refused(self, sbatch: Sbatch, job_id: int) -> int:
        """sbatch said no, in its own words, which the user has seen."""
        words = " ".join(sbatch.words.split()) or "sbatch submitted nothing"
        self._take_row_back(job_id, f"submission failed: {words}")
        # A filter of the site may end sbatch without a job and without an error.
        return sbatch.run(self._timeout_s) or 1

    def _answer(self, sbatch: Sbatch, job_id: int, number: str) -> int:
        if self.app.json:
            facts = {key: self.body[key] for key in ("name", "partition", "models")}
            self.app.answer({"job_id": job_id, "slurm_id": number, **facts}, "")
            sbatch.mute()
        return sbatch.run(None if self.waits else self._timeout_s)

    def _undo(
        self, sbatch: Sbatch | None, job_id: int, number: str | None, error: BaseException
    ) -> None:
        """Take back what was done; the first error is the one to show."""
        if sbatch is not None:
            with suppress(SlurmUnavailable):
                number = number or sbatch.number(_GRACE_S)
            if number is None and sbatch.end():
                number = self._look_once(sbatch)
            sbatch.end()
        if number is not None:
            try:
                _answer(self.slurm, "scancel", number)
            except PlexError as failure:
                note(f"job {number} could not be taken back ({failure}): run scancel {number}")
        reason = str(error) or "it was interrupted"
        self._take_row_back(job_id, f"submission failed: {reason}")

    def _take_row_back(self, job_id: int, reason: str) -> None:
        try:
            self.client.cancel(job_id, reason=reason)
        except PlexError as error:
            note(f"queue row {job_id} could not be taken back ({error}); the daemon will drop it")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let the end of the terminal or a polite kill undo things, as ctrl-C does."""
    # What is ignored (nohup) stays so.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal stops what takes things back; each of its steps ends by itself."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
