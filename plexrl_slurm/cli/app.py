"""What every command shares: the partition it talks to, ``--json``, progress, notes."""

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.site import find_site
from plexrl_slurm.whereabouts import Site

#: Progress is shown for what takes longer.
PATIENCE_S = 1.0

#: More seconds, hours or gigabytes than this are a slip, and too large to be computed with.
_LARGEST = 1e9
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A finite number of a range, which without an upper end is as large as makes sense."""

    def __init__(self, least: float, most: float | None = None, *, min_open: bool = False) -> None:
        super().__init__(least, _LARGEST if most is None else most, min_open=min_open)
        self._bounded = most is not None

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number, not NaN."""
        with contextlib.suppress(ValueError, TypeError):
            if not self._bounded and float(value) > _LARGEST:
                self.fail(f"{value} is more than can be meant: give a smaller one", param, ctx)
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value} is not a number", param, ctx)
        return found

    def _describe_range(self) -> str:
        if self._bounded:
            return super()._describe_range()
        return f"x{'>' if self.min_open else '>='}{self.min:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """What was said before the command's own options."""

    config: Path | None = None
    partition: str | None = None
    json: bool = False

    def site(self, partition: str | None = None) -> Site:
        """The partition's whereabouts; ``partition`` is a script's or Slurm's wish."""
        return find_site(self.config, self.partition or partition)

    def client(self) -> Client:
        """A connection to the partition's daemon."""
        return Client(self.site())

    def answer(self, value: Any, text: str | Callable[[], str]) -> None:
        """Print one answer: JSON if that is wanted, else ``text``."""
        if self.json:
            from plexrl_slurm.cli.show import as_json

            click.echo(as_json(value))
        else:
            words = text() if callable(text) else text
            if words:
                click.echo(words)


def _given(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Put a shared option that was given behind the command into the :class:`App`."""
    if value not in (None, False):
        context.obj = replace(context.obj or App(), **{str(parameter.name): value})


def shared(command: _Command) -> _Command:
    """Add ``--config``, ``--partition`` and ``--json`` to a command; read them from its App."""
    for option in (
        click.option(
            "--json", is_flag=True, expose_value=False, callback=_given, help="Answer in JSON."
        ),
        click.option(
            "-p",
            "--partition",
            metavar="NAME",
            expose_value=False,
            callback=_given,
            help="Partition, as after sbatch -p.",
        ),
        click.option(
            "--config",
            metavar="FILE",
            type=click.Path(path_type=Path),
            expose_value=False,
            callback=_given,
            help="The partition's settings file.",
        ),
    ):
        command = option(command)
    return command


def note(sentence: str) -> None:
    """Tell the user something that is no error."""
    click.echo(f"plexrl: {sentence}", err=True)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` with a spinner if the work takes over a second; call to change it.

    Without a terminal every text is a line of its own.
    """
    if not sys.stderr.isatty():
        lines = _Lines()
        timer = threading.Timer(PATIENCE_S, lines.begin, (text,))
        timer.daemon = True
        timer.start()
        try:
            yield lines.say
        finally:
            timer.cancel()
        return
    from rich.console import Console

    status = Console(stderr=True).status(text)
    timer = threading.Timer(PATIENCE_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        status.stop()


class _Lines:
    """Progress as plain lines: nothing before it began, no line twice in a row."""

    def __init__(self) -> None:
        self._last = ""
        self._begun = False
        self._lock = threading.Lock()

    def begin(self, text: str) -> None:
        with self._lock:
            self._begun = True
            self._show(self._last or text)

    def say(self, text: str) -> None:
        with self._lock:
            if text != self._last and self._begun:
                self._show(text)
            self._last = text

    def _show(self, text: str) -> None:
        click.echo(f"plexrl: {text}", err=True)
        self._last = text
