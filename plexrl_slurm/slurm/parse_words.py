"""Slurm's small notations: host lists, task lists, resource counts, numbers, exit codes."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

#: What a list in a Slurm answer may expand to; more is garbage.
LONGEST = 1_000_000
_TRES_GPU = re.compile(r"gres/gpu(?::([^=,]+))?=(\d+)")
_GRES_GPU = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?::([A-Za-z_][^:,(]*))?(?::(\d+))?(?=[,(]|$)")


def hosts(text: str) -> tuple[str, ...]:
    """``n[1-2,05],m3`` -> ``n1 n2 n05 m3``; "" and ``None assigned`` -> nothing."""
    if text in ("", "(null)", "None assigned", "None"):
        return ()
    return tuple(itertools.chain.from_iterable(_host(part) for part in _split(text)))


def _split(text: str) -> Iterator[str]:
    """At commas outside of brackets."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(f"{text!r} is no list of nodes")
    yield text[start:]


def _host(pattern: str) -> Iterator[str]:
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        yield before
        return
    inside, _, after = rest.partition("]")
    tails = list(_host(after))
    for number in _ranges(inside):
        for tail in tails:
            yield f"{before}{number}{tail}"


def _ranges(text: str) -> Iterator[str]:
    """``1-3,07`` -> 1 2 3 07, with leading zeros kept."""
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not dash:
            yield part
            continue
        if int(high) - int(low) > LONGEST:
            raise ValueError(f"{text!r} is too long")
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


def tasks(text: str) -> tuple[int, ...]:
    """Indices in an array's task string: ``0-5,8%2``, ``0-10:2``, ``[1-3]``."""
    body = text.strip("[]").partition("%")[0]
    found: list[int] = []
    for part in filter(None, body.split(",")):
        bounds, _, step = part.partition(":")
        low, dash, high = bounds.partition("-")
        if not dash:
            found.append(int(low))
            continue
        if int(high) - int(low) > LONGEST:
            raise ValueError(f"{text!r} is too long")
        found += range(int(low), int(high) + 1, int(step or 1))
    return tuple(found)


def tres_gpus(text: str) -> int:
    """GPUs in ``cpu=2,gres/gpu=4,gres/gpu:h200=4``; the total is said besides the types."""
    counts = _TRES_GPU.findall(text)
    totals = [int(count) for kind, count in counts if not kind]
    return totals[0] if totals else sum(int(count) for _, count in counts)


def gres_gpus(text: str) -> tuple[int, str]:
    """GPUs in a node's ``gpu:h200:4(S:0),nvme:1``, and the type they have."""
    found = [(kind, int(count or 1)) for kind, count in _GRES_GPU.findall(_bare(text))]
    return sum(count for _, count in found), next((kind for kind, _ in found if kind), "")


def _bare(text: str) -> str:
    """Without the parts in parentheses, which have commas of their own."""
    return re.sub(r"\([^)]*\)", "", text)


def printable(text: str) -> str:
    """A user's text, without what would move the cursor of those who see it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def number(value: Any) -> int | None:
    """A plain number, or 23.02's ``{set, infinite, number}``; ``None``: unset or infinite."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value)


def seconds(value: Any) -> int | None:
    """A time of day in microseconds; 0 is none."""
    whole = number(value)
    return whole * 1_000_000 if whole else None


def exit_code(value: Any) -> int | None:
    """A wait status, or 23.02's ``{status, return_code, signal}``; a signal is 128 + n."""
    if isinstance(value, dict) and ("return_code" in value or "signal" in value):
        signal = value.get("signal")
        if isinstance(signal, dict):
            signal = signal.get("id", signal.get("signal_id"))
        if killed := number(signal):
            return 128 + killed
        return number(value.get("return_code"))
    status = number(value)
    if status is None:
        return None
    return 128 + (status & 0x7F) if status & 0x7F else (status >> 8) & 0xFF


def exit_pair(text: str) -> int | None:
    """sacct's ``code:signal``."""
    code, colon, signal = text.partition(":")
    if not (colon and code.isdecimal() and signal.isdecimal()):
        return None
    return 128 + int(signal) if int(signal) else int(code)
