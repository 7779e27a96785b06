"""Read a TOML file table by table and collect everything that is wrong, with key and line."""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.core.errors import BadConfig

#: Not compiled before they are needed: every command imports this.
_ARRAY = r"\[\[\s*([\w.-]+)\s*\]\]"
_TABLE = r"\[\s*([\w.-]+)\s*\]"
_KEY = r"([\w.-]+)\s*="
_BYTES = r"(\d+(?:\.\d+)?)\s*(|B|[KMGT]i?B)"
#: More is a slip of the finger, and would not fit where it is stored or computed with.
_MOST: Final = 10**9
_MOST_BYTES: Final = 2**60
#: Of a file's name, and of a path.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_LONGEST_SHOWN: Final = 60


def load(path: Path) -> tuple[dict[str, Any], str]:
    """The file's data and its text."""
    try:
        text = path.read_bytes().decode("utf-8")
        return tomllib.loads(text), text
    except FileNotFoundError:
        problem = "there is no such file: start from examples/partition.toml"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror}): check the path and its permissions"
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text: save it as UTF-8"
    except tomllib.TOMLDecodeError as error:
        problem = f"it is not TOML ({str(error)[:1].lower()}{str(error)[1:]}): correct that place"
    except (ValueError, RecursionError):  # digits by the thousand, brackets by the thousand
        problem = "it has a number or a list that is too long to be read: correct that place"
    raise BadConfig(str(path), (problem,))


def key_lines(text: str) -> dict[str, int]:
    """Line of every table and key: ``{"partition.policy": 4, "wpg[1].engine": 12}``."""
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate((raw.strip() for raw in text.splitlines()), start=1):
        if match := re.match(_ARRAY, line):
            counts[match[1]] = counts.get(match[1], -1) + 1
            prefix = f"{match[1]}[{counts[match[1]]}]"
        elif match := re.match(_TABLE, line):
            head, _, rest = match[1].partition(".")
            prefix = f"{head}[{counts[head]}].{rest}" if head in counts and rest else match[1]
        elif match := re.match(_KEY, line):
            found.setdefault(f"{prefix}.{match[1]}".lstrip("."), number)
            continue
        else:
            continue
        found.setdefault(prefix, number)
        found.setdefault(prefix.partition("[")[0], number)
    return found


def nearest(name: str, known: Iterable[str], *, all_of_them: bool = False) -> str:
    """``did you mean ...``, or the known names; ``all_of_them``: both."""
    import difflib  # only for a mistake

    known = list(known)
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        guess = f"did you mean {close[0]}?"
        return f"{guess} Known are {', '.join(known)}" if all_of_them else guess
    return f"known are {', '.join(known)}"


class Report:
    """Problems and warnings found so far."""

    def __init__(self, text: str) -> None:
        self.warnings: list[str] = []
        self._problems: list[tuple[int, str]] = []
        self._told: set[str] = set()
        self._text = text

    @cached_property
    def _lines(self) -> dict[str, int]:
        return key_lines(self._text)

    def bad(self, key: str, sentence: str) -> None:
        """Note a problem at ``key``, or at the nearest table around it that the file has."""
        self._told.add(key)
        at = key
        while at not in self._lines and "." in at:
            at = at.rpartition(".")[0]
        line = self._lines.get(at, 0)
        where = f"line {line}, {key}" if line else key
        self._problems.append((line, f"{where}: {sentence}"))

    def unknown(self, prefix: str, data: Mapping[str, Any], known: Iterable[str]) -> None:
        """Note every key of ``data`` that is not ``known``."""
        known = list(known)
        for name in data:
            if name not in known:
                key = f"{prefix}.{name}".lstrip(".")
                self.bad(key, f"unknown key {name}; {nearest(name, known)}")

    def has(self, key: str) -> bool:
        """Whether the file mentions ``key``."""
        return key in self._lines

    def told(self, key: str) -> bool:
        """Whether there is a problem at ``key`` already."""
        return key in self._told

    def sentences(self) -> tuple[str, ...]:
        """The problems, in the order of the file."""
        return tuple(sentence for _, sentence in sorted(self._problems, key=lambda each: each[0]))


class Table:
    """One table of the file: takes known keys out, converted; then refuses the rest."""

    def __init__(self, report: Report, key: str, data: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.known: list[str] = []
        self.data = data
        self._report, self._key = report, key

    def take(
        self,
        name: str,
        convert: Callable[[object], object],
        *,
        to: str = "",
        required: bool = True,
    ) -> None:
        """Put ``convert(value)`` into ``values``; a ``ValueError`` becomes a problem."""
        self.known.append(name)
        key = f"{self._key}.{name}"
        if name not in self.data:
            if required:
                self._report.bad(key, f"it is missing: add {name} = ... to [{self._key}]")
            return
        try:
            self.values[to or name] = convert(self.data[name])
        except ValueError as error:
            self._report.bad(key, _shortened(str(error), self.data[name]))

    def finish(self) -> None:
        """Note the keys that nobody took."""
        self._report.unknown(self._key, self.data, self.known)


def mapping(report: Report, data: Mapping[str, Any], name: str, *, at: str = "") -> dict[str, Any]:
    """The table ``name`` of ``data``; empty if it is missing."""
    value = data.get(name, {})
    if isinstance(value, dict):
        return value
    key = f"{at}.{name}".lstrip(".")
    written = re.sub(r"\[\d+\]", "", key)  # as TOML has it, below the last [[wpg]]
    brackets = f"[{written}] with single brackets" if isinstance(value, list) else f"[{written}]"
    report.bad(key, f"it must be a table: write {brackets}")
    return {}


def array(report: Report, data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables ``[[name]]`` of ``data``."""
    value = data.get(name, [])
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    report.bad(name, f"it must be a list of tables: write [[{name}]] with double brackets")
    return []


# ---- converters: a value, or a ValueError whose text says what to write ---------------------


def as_text(value: object) -> str:
    """A string that is not empty."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, str):
        raise ValueError("it is empty: write something, or leave it out")
    raise ValueError(f"{value!r} is not text: write it in quotes")


def as_name(value: object) -> str:
    """A name that is safe in a URL, a file name and a table."""
    given = as_text(value)
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", given) and ".." not in given.split("/"):
        return given
    raise ValueError(f"{given!r} is not a name: use letters, digits, dot, dash and underscore")


def one_of(what: str, known: tuple[str, ...]) -> Callable[[object], str]:
    """A converter that accepts the ``known`` words."""

    def convert(value: object) -> str:
        if value in known:
            return str(value)
        raise ValueError(
            f"unknown {what} {value!r}; {nearest(str(value), known, all_of_them=True)}"
        )

    return convert


def as_count(value: object) -> int:
    """A whole number, 1 or more."""
    if type(value) is int and value >= 1:
        return _not_too_many(value)
    raise ValueError(f"{value!r} is not a whole number of 1 or more")


def as_count_or_none(value: object) -> int:
    """A whole number, 0 too."""
    if type(value) is int and value >= 0:
        return _not_too_many(value)
    raise ValueError(f"{value!r} is not a whole number of 0 or more")


def as_seconds(value: object) -> int:
    """Seconds, as microseconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return round(value * 1_000_000)
    raise ValueError(f"{value!r} is not a number of seconds, 0 or more")


def positive_seconds(value: object) -> int:
    """A tenth of a second or more, as microseconds."""
    microseconds = as_seconds(value)
    if microseconds < 100_000:
        raise ValueError(f"{value!r} is too short: write 0.1 seconds or more")
    return microseconds


def as_bytes(value: object) -> int:
    """Bytes, from a number or from text such as ``8GiB``."""
    match = re.fullmatch(_BYTES, value.strip()) if isinstance(value, str) else None
    size: float = value if type(value) is int else 0
    if match is not None:
        unit = match[2].removesuffix("B")
        size = float(match[1]) * (1024 if "i" in unit else 1000) ** " KMGT".index(unit[:1] or " ")
    if size < 1:
        raise ValueError(f'{value!r} is not a size: write bytes, or text such as "8GiB"')
    if size > _MOST_BYTES:
        raise ValueError(f"{value!r} is too large: write less than a million TiB")
    return int(size)


def as_switch(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not true or false")


def path_in(folder: Path) -> Callable[[object], Path]:
    """A converter to an absolute path; a relative one is relative to ``folder``."""
    return lambda value: absolute(folder, as_text(value))


def absolute(folder: Path, given: str) -> Path:
    """``given`` as an absolute path without links; ``ValueError`` if there can be none such."""
    if "\0" in given:
        raise ValueError(f"{given!r} is not a path: take the null byte out")
    if not given.startswith("~"):
        found = folder / given
    else:
        try:
            found = Path(given).expanduser()
        except RuntimeError:
            raise ValueError(
                f"{given!r} is in the home of nobody on this machine: write the whole path"
            ) from None
    encoded = os.fsencode(found)
    if len(encoded) > _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        raise ValueError(f"{given!r} is too long for a path: choose a shorter one")
    try:
        return found.resolve()
    except (RuntimeError, OSError):
        raise ValueError(f"{given!r} is a link that leads to itself: correct the link") from None


def _not_too_many(value: int) -> int:
    if value > _MOST:
        raise ValueError(f"{value!r} is too large: write {_MOST:,} or less")
    return value


def _shortened(sentence: str, value: object) -> str:
    """Without the middle of a long ``value``."""
    shown = repr(value)
    if len(shown) <= _LONGEST_SHOWN:
        return sentence
    half = _LONGEST_SHOWN // 2
    return sentence.replace(shown, f"{shown[:half]}...{shown[-half:]}")
