"""Read ``#SBATCH`` and ``#PLEXRL`` lines: bytes in, a validated value out.

Slurm's own rules: only the comment head of a script counts, the first command ends it. An
``#SBATCH`` option that is not ours to interpret is passed on; a ``#PLEXRL`` one must be known.
"""

import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadScript

#: Options of ours on ``#PLEXRL`` lines.
PLEXRL_OPTIONS: Final = ("model", "seed", "priority", "max-slowdown")
#: ``#SBATCH`` options that we interpret, by Slurm's short name.
_SHORT: Final[Mapping[str, str]] = {
    "J": "job-name",
    "p": "partition",
    "A": "account",
    "o": "output",
    "e": "error",
    "D": "chdir",
    "t": "time",
    "G": "gpus",
    "a": "array",
}
_INTERPRETED: Final = frozenset(
    {"job-name", "partition", "account", "output", "error", "chdir", "time"}
)
_GPU_OPTIONS: Final = re.compile(
    r"gpus(-per-(node|task|socket))?|gpu-bind|gpu-freq|(cpus|mem|ntasks)-per-gpu"
)
_GPU_RESOURCE: Final = re.compile(r"(gres/)?gpu(:|=|$)")
_TIME_FORMS: Final = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes "
    "or days-hours:minutes:seconds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One ``#SBATCH`` option as the script gives it."""

    line: int
    #: Long name where we know it, else as written: ``mem``, ``c``.
    name: str
    #: ``None`` for a flag.
    value: str | None
    #: As written, for passing on.
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptHead:
    """What a batch script asks for."""

    path: str
    #: Interpreter line without ``#!``.
    interpreter: str
    #: The script to run: as given, its GPU requests commented out (line numbers stay).
    text: str
    #: The options that we interpret; the last of a repeated one counts, as with sbatch.
    sbatch: Mapping[str, str] = field(default_factory=dict)
    #: The other options, in order.
    passed_on: tuple[Option, ...] = ()
    #: GPU requests that were taken out: the service provides the GPUs.
    gpus: tuple[Option, ...] = ()
    models: tuple[str, ...] = ()
    seed: int | None = None
    priority: int | None = None
    max_slowdown: float | None = None


def read(path: str) -> ScriptHead:
    """Read and validate the script at ``path``; raises ``BadScript``."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        sentence = "no such file: check the path, or use --wrap for a command"
    except IsADirectoryError:
        sentence = "this is a folder: name a script"
    except OSError as error:
        sentence = f"it cannot be read ({error.strerror}): check the path and its permissions"
    else:
        return parse(data, path)
    raise BadScript(path, None, sentence)


def parse(data: bytes, path: str) -> ScriptHead:
    """The head of the script ``data``; raises ``BadScript`` naming ``path`` and line."""
    _refuse_unusable(data, path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = data[: error.start].count(b"\n") + 1
        raise BadScript(path, at, "batch script is not UTF-8 text: save it as UTF-8") from None
    sbatch: dict[str, str] = {}
    passed_on: list[Option] = []
    gpus: list[Option] = []
    plexrl = _PlexrlLines(path)
    lines = text.split("\n")
    head = _head_length(lines)
    for number, line in enumerate(lines, start=1):
        if number > head:
            if re.match(r"#PLEXRL\s", line):
                raise BadScript(
                    path,
                    number,
                    "a #PLEXRL line after the first command would be ignored: "
                    "move it up, below the #! line",
                )
        elif line.startswith("#PLEXRL"):
            plexrl.take(number, line)
        elif re.match(r"#SBATCH\s", line):
            kept: list[str] = []
            before = len(gpus)
            for option in _options(path, number, line):
                if _asks_for_gpus(option):
                    gpus.append(option)
                    continue
                kept.extend(option.words)
                if option.name in _INTERPRETED:
                    sbatch[option.name] = _checked(path, option)
                else:
                    passed_on.append(option)
            if len(gpus) > before:
                lines[number - 1] = f"#SBATCH {shlex.join(kept)}" if kept else f"#{line}"
    return ScriptHead(
        path=path,
        interpreter=lines[0][2:].strip(),
        text="\n".join(lines),
        sbatch=sbatch,
        passed_on=tuple(passed_on),
        gpus=tuple(gpus),
        models=tuple(plexrl.models),
        seed=plexrl.seed,
        priority=plexrl.priority,
        max_slowdown=plexrl.max_slowdown,
    )


def parse_time(text: str) -> int | None:
    """Seconds of a Slurm time limit; ``None`` for no limit; ``ValueError`` says the forms."""
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    numbers = [days, *parts] if dash else parts
    if len(parts) > 3 or not all(re.fullmatch("[0-9]+", number) for number in numbers):
        raise ValueError(f"invalid time limit {text!r}: write {_TIME_FORMS}")
    values = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*values, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(values) == 3:
        return (values[0] * 60 + values[1]) * 60 + values[2]
    return values[0] * 60 + (values[1] if len(values) == 2 else 0)


def parse_seed(text: str) -> int:
    """A job's seed: 0 to 2**63 - 1."""
    if re.fullmatch("[0-9]+", text) and int(text) < 2**63:
        return int(text)
    raise ValueError(f"seed {text!r} is not a whole number from 0 to 2**63 - 1")


def parse_priority(text: str) -> int:
    """A job's scheduling weight: 1 to 1000."""
    if re.fullmatch("[0-9]+", text) and 1 <= int(text) <= 1000:
        return int(text)
    raise ValueError(f"priority {text!r} is not a whole number from 1 to 1000")


def parse_max_slowdown(text: str) -> float:
    """How much slower than alone the job may run: 1.0 or more."""
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) and 1.0 <= float(text) <= 1000.0:
        return float(text)
    raise ValueError(f"max-slowdown {text!r} is not a number from 1.0 to 1000, such as 1.2")


def parse_model(text: str) -> str:
    """A name of the catalogue."""
    if text and not re.search(r"\s", text):
        return text
    raise ValueError(f"model {text!r} is not a name")


def _refuse_unusable(data: bytes, path: str) -> None:
    """Slurm refuses the same scripts, in these words."""
    if not data:
        raise BadScript(path, None, "batch script is empty: write a #! line and commands")
    if not data.strip():
        raise BadScript(path, None, "batch script contains only whitespace: write commands")
    if b"\0" in data:
        raise BadScript(
            path, None, "batch script contains a NUL character, so it is a binary: use --wrap"
        )
    if not data.startswith(b"#!"):
        raise BadScript(
            path,
            1,
            "this does not look like a batch script: the first line must start with #! followed "
            "by the path to an interpreter, for instance #!/bin/sh",
        )
    if b"\r\n" in data:
        raise BadScript(
            path,
            data[: data.index(b"\r\n")].count(b"\n") + 1,
            r"batch script contains DOS line breaks (\r\n) instead of expected UNIX line breaks "
            r"(\n): convert it with dos2unix",
        )
    if not data[2:].split(b"\n")[0].strip():
        raise BadScript(path, 1, "the #! line names no interpreter: write for instance #!/bin/sh")


def _head_length(lines: list[str]) -> int:
    for index, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            return index
    return len(lines)


def _words(path: str, number: int, line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise BadScript(path, number, f"{str(error).lower()}: close the quotes") from None


def _options(path: str, number: int, line: str) -> Iterator[Option]:
    words = _words(path, number, line.removeprefix("#SBATCH"))
    while words:
        word = words.pop(0)
        value: str | None = None
        used: tuple[str, ...] = (word,)
        if word.startswith("--"):
            name, equals, given = word[2:].partition("=")
            value = given if equals else None
        elif len(word) > 1 and word.startswith("-"):
            name, value = _SHORT.get(word[1], word[1]), word[2:] or None
        elif word == "hetjob":
            name = word
        else:
            raise BadScript(path, number, f"{word!r} is not an option: write --name=value")
        if value is None and words and not words[0].startswith("-"):
            value = words.pop(0)
            used = (word, value)
        if name in ("array", "hetjob"):
            raise BadScript(
                path, number, f"{word} is not possible here: submit one job for each element"
            )
        yield Option(line=number, name=name, value=value, words=used)


def _asks_for_gpus(option: Option) -> bool:
    if option.name == "gres" or option.name.startswith("tres-per-"):
        return any(_GPU_RESOURCE.match(each) for each in (option.value or "").split(","))
    return _GPU_OPTIONS.fullmatch(option.name) is not None


def _checked(path: str, option: Option) -> str:
    if not option.value:
        raise BadScript(path, option.line, f"--{option.name} needs a value")
    if option.name == "time":
        try:
            parse_time(option.value)
        except ValueError as error:
            raise BadScript(path, option.line, str(error)) from None
    return option.value


class _PlexrlLines:
    """The ``#PLEXRL`` lines of one script, read one at a time."""

    def __init__(self, path: str) -> None:
        self.models: list[str] = []
        self.seed: int | None = None
        self.priority: int | None = None
        self.max_slowdown: float | None = None
        self._path = path
        self._seen: dict[str, int] = {}

    def take(self, number: int, line: str) -> None:
        """Read one line."""
        rest = line.removeprefix("#PLEXRL")
        words = _words(self._path, number, rest)
        if not rest[:1].isspace() or not words:
            raise self._bad(number, "malformed #PLEXRL line: write #PLEXRL --model=NAME")
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or not name:
                raise self._bad(number, f"{word!r} is not an option: write #PLEXRL --model=NAME")
            if name not in PLEXRL_OPTIONS:
                raise self._bad(number, f"unknown #PLEXRL option --{name}; {_nearest(name)}")
            if not equals and words and not words[0].startswith("--"):
                value = words.pop(0)
            if not value:
                raise self._bad(number, f"--{name} needs a value: write --{name}=VALUE")
            self._put(number, name, value)

    def _put(self, number: int, name: str, value: str) -> None:
        try:
            if name == "model":
                if value in self.models:
                    raise self._bad(number, f"--model={value} is given twice: delete one")
                self.models.append(parse_model(value))
                return
            if name in self._seen:
                first = self._seen[name]
                raise self._bad(number, f"--{name} is given twice (line {first} too): delete one")
            self._seen[name] = number
            if name == "seed":
                self.seed = parse_seed(value)
            elif name == "priority":
                self.priority = parse_priority(value)
            else:
                self.max_slowdown = parse_max_slowdown(value)
        except BadScript:  # a ValueError too
            raise
        except ValueError as error:
            raise self._bad(number, str(error)) from None

    def _bad(self, number: int, sentence: str) -> BadScript:
        return BadScript(self._path, number, sentence)


def _nearest(name: str) -> str:
    if close := difflib.get_close_matches(name, PLEXRL_OPTIONS, n=1, cutoff=0.5):
        return f"did you mean --{close[0]}?"
    return f"known are {', '.join(f'--{known}' for known in PLEXRL_OPTIONS)}"


#: Command-line twins of the ``#PLEXRL`` options use the same parsers.
PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "model": parse_model,
    "seed": parse_seed,
    "priority": parse_priority,
    "max-slowdown": parse_max_slowdown,
}
