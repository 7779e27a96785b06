"""The demo's live screen: WPGs and their residents, jobs and their rewards."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

_TICKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
#: Between two lines where there is no terminal.
_LINE_S = 10.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What an example wrote so far; a line that is being written is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    whole, _, _ = text.rpartition("\n")
    return [line for each in whole.splitlines() if "step" in (line := json.loads(each))]


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """Rewards between 0 and 1 as a row of bars, the newest at the right."""
    return "".join(_TICKS[min(7, max(0, int(value * 8)))] for value in values[-width:])


class Screen:
    """A table that is drawn again and again; lines where there is no terminal."""

    def __init__(self, title: str, *, steps: int) -> None:
        self._title, self._steps = title, steps
        self._live: Any = None
        self._said_at = 0.0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            # "job1-1:train:0" is a name, not a tram.
            console = Console(stderr=True, emoji=False, markup=False)
            self._live = Live(console=console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """A line that stays, above the table."""
        if self._live is not None:
            self._live.console.print(f"plexrl: {sentence}")
        else:
            click.echo(f"plexrl: {sentence}", err=True)

    def show(
        self, nodes: Mapping[str, Any], jobs: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        """``jobs``: the step lines of each job by name."""
        if self._live is not None:
            self._live.update(self._table(nodes, jobs))
        elif time.monotonic() - self._said_at > _LINE_S:
            self._said_at = time.monotonic()
            wpgs = ", ".join(f"{wpg['id']} {wpg['state']}" for wpg in nodes["wpgs"])
            steps = ", ".join(
                f"{name} {len(lines)}/{self._steps}"
                + (f" reward {lines[-1]['reward']:.2f}" if lines else "")
                for name, lines in jobs.items()
            )
            click.echo(f"plexrl: {self._title}: {wpgs}; {steps}", err=True)

    def _table(
        self, nodes: Mapping[str, Any], jobs: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> Any:
        from rich.console import Group
        from rich.table import Table

        wpgs = Table("WPG", "POOL", "STATE", "RESIDENT", "QUEUE", title=self._title)
        for wpg in nodes["wpgs"]:
            wpgs.add_row(
                str(wpg["id"]),
                str(wpg["pool"]),
                str(wpg["state"]),
                str(wpg.get("resident") or "-"),
                str(wpg["waiting"]),
            )
        rewards = Table("JOB", "STEP", "REWARD", "REWARDS SO FAR")
        for name, lines in jobs.items():
            values = [float(line["reward"]) for line in lines]
            last = f"{values[-1]:.3f}" if values else "-"
            rewards.add_row(name, f"{len(lines)}/{self._steps}", last, sparkline(values))
        return Group(wpgs, rewards)
