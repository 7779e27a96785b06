"""Job numbers as users write them: ``12``, ``12_3``, ``12_[1-3,7]``, several with commas."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import click

from plexrl_slurm.core.errors import NotFound

_NUMBER: Final = re.compile(r"([0-9]+)(?:_(?:([0-9]+)|\[([0-9,-]+)\]))?")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class JobNumber:
    """One word of a list: a job, a task of an array, or (its number alone) all of its tasks."""

    def __init__(self, word: str) -> None:
        self.word = word
        match = _NUMBER.fullmatch(word)
        if match is None:
            raise ValueError(
                f"invalid job id {word!r}: write a number such as 12, or 12_3 for a task of an "
                f"array"
            )
        self._number, task, tasks = match.groups()
        self._tasks = None if task is None and tasks is None else _ranges(word, task or tasks)

    def fits(self, slurm_id: str | None) -> bool:
        """Whether it means the job that Slurm calls so."""
        number, _, task = (slurm_id or "").partition("_")
        if number != self._number:
            return False
        if self._tasks is None:
            return True
        return task.isdecimal() and any(low <= int(task) <= high for low, high in self._tasks)

    def among(self, jobs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The jobs that it means, the last row of each Slurm job; raises ``NotFound``."""
        found: dict[str, Mapping[str, Any]] = {}
        for job in sorted(jobs, key=lambda job: int(job["job_id"])):
            if self.fits(job["slurm_id"]):
                found[job["slurm_id"]] = job
        if not found:
            raise NotFound("job", self.word)
        return list(found.values())


def _ranges(word: str, text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"invalid job id {word!r}: write the tasks as in 12_[1-3,7]")
        found.append((int(match[1]), int(match[2] or match[1])))
    return found


def job_numbers(text: str) -> list[JobNumber]:
    """A list with commas; raises ``ValueError``."""
    return [JobNumber(word) for word in re.split(r",(?![^\[]*\])", text) if word]


def as_numbers(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """A click callback for one list, or for several words."""
    try:
        if isinstance(value, tuple):
            return [number for word in value for number in job_numbers(word)]
        return None if value is None else job_numbers(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
