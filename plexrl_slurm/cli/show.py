"""How things look: tables like Slurm's, times, sizes, JSON. Values in, text out."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from plexrl_slurm.core.sizes import in_words

#: Our job states as Slurm says them: short, long.
_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "pending": ("PD", "PENDING"),
    "admitted": ("CF", "CONFIGURING"),
    "running": ("R", "RUNNING"),
    "completed": ("CD", "COMPLETED"),
    "failed": ("F", "FAILED"),
    "cancelled": ("CA", "CANCELLED"),
    "timeout": ("TO", "TIMEOUT"),
}
ENDED: Final = frozenset({"completed", "failed", "cancelled", "timeout"})


def short_state(state: str) -> str:
    """``PD``, ``R``, ...; ``?`` for a word that this version does not know."""
    return _STATES.get(state, ("?", ""))[0]


def long_state(state: str) -> str:
    """``PENDING``, ``RUNNING``, ..."""
    return _STATES.get(state, ("", state.upper()))[1]


def states_named(text: str) -> frozenset[str]:
    """Our states for a list such as ``PD,running``; raises ``ValueError``."""
    found: set[str] = set()
    for word in text.split(","):
        if word.lower() == "all":
            return frozenset(_STATES)
        names = [name for name, forms in _STATES.items() if word.upper() in (*forms, name.upper())]
        if not names:
            known = ", ".join(short for short, _ in _STATES.values())
            raise ValueError(f"unknown job state {word!r}; known are {known} and all")
        found.update(names)
    return frozenset(found)


def duration(microseconds: int | None) -> str:
    """``D-HH:MM:SS``, as Slurm shortens it: ``M:SS`` in squeue's manner."""
    if microseconds is None:
        return "0:00"
    minutes, seconds = divmod(max(microseconds, 0) // 1_000_000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def elapsed(microseconds: int | None) -> str:
    """``[D-]HH:MM:SS``: sacct's manner, with all its zeros."""
    seconds = max(microseconds or 0, 0) // 1_000_000
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def gib(size: int) -> str:
    """``1.50 GiB``, and what is much smaller in a smaller unit."""
    return in_words(size)


def iso(instant_us: int) -> str:
    """``2026-01-31T12:00:00.123456Z``."""
    moment = datetime.fromtimestamp(instant_us // 1_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{instant_us % 1_000_000:06}Z"


def local_time(instant_us: int) -> str:
    """``12:00:00`` on the reader's clock."""
    return datetime.fromtimestamp(instant_us / 1e6, UTC).astimezone().strftime("%H:%M:%S")


def local_moment(instant_us: int) -> str:
    """``2026-01-31T12:00:00`` on the reader's clock."""
    return f"{datetime.fromtimestamp(instant_us / 1e6, UTC).astimezone():%Y-%m-%dT%H:%M:%S}"


def as_json(value: Any) -> str:
    """JSON for programs; beside every instant ``x_us`` stands ``x`` in words."""
    return json.dumps(_with_words(value), indent=2)


def _with_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for key, each in value.items():
            out[key] = _with_words(each)
            # Not a duration: an instant is later than 2001.
            if key.endswith("_us") and type(each) is int and each > 10**15:
                out.setdefault(key.removesuffix("_us"), iso(each))
        return out
    if isinstance(value, list | tuple):
        return [_with_words(each) for each in value]
    return value


def table(
    columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[object]], *, header: bool = True
) -> str:
    """squeue's manner: right-aligned and cut to its width; width 0: left-aligned, whole."""
    lines = [[name for name, _ in columns]] if header else []
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join(
        " ".join(
            cell if width == 0 else cell[:width].rjust(width)
            for cell, (_, width) in zip(line, columns, strict=True)
        )
        for line in lines
    )


def fitted(names: Sequence[str], rows: Iterable[Sequence[object]], *, header: bool = True) -> str:
    """sinfo's manner: left-aligned, every column as wide as it must be."""
    lines = [list(names)] if header else []
    lines += [[str(cell) for cell in row] for row in rows]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(names))]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def ruled(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[object]]) -> str:
    """sacct's manner: right-aligned under a rule, a cell that is too long ends in ``+``."""
    lines = [[name for name, _ in columns], ["-" * width for _, width in columns]]
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join(
        " ".join(
            (cell if len(cell) <= width else f"{cell[: width - 1]}+").rjust(width)
            for cell, (_, width) in zip(line, columns, strict=True)
        )
        for line in lines
    )
