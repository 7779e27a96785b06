"""Read ``#SBATCH`` and ``#PLEXRL`` lines: bytes in, a validated value out.

Slurm's own rules: only the comment head of a script counts, the first command ends it; a word may
be quoted, a backslash takes the next character as it is, ``#`` begins a comment. What an
``#SBATCH`` option means is Slurm's business; a ``#PLEXRL`` one must be known.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.slurm.sbatch_options import (
    Option,
    Takes,
    changes,
    last_value,
    respelled,
    scan,
    without_gpus,
)

#: Options of ours on ``#PLEXRL`` lines.
PLEXRL_OPTIONS: Final = ("model", "seed", "priority", "max-slowdown", "qos")
#: Options that ``plexrl sbatch`` carries out itself where there is no Slurm.
INTERPRETED: Final = frozenset(
    {"job-name", "partition", "account", "output", "error", "chdir", "time"}
)
#: A job of several components begins another one with this word.
HETJOB: Final = frozenset({"hetjob", "packjob"})
_MAGIC: Final = "#SBATCH"
_TIME_FORMS: Final = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes "
    "or days-hours:minutes:seconds"
)
_NOT_HERE: Final = "is not possible here: submit one job for each element"
_CODEC: Final = ("utf-8", "surrogateescape")


class ScriptHead(NamedTuple):
    """What a batch script asks for."""

    path: str
    #: The script as it was given.
    text: str
    #: ``#SBATCH`` options in order, up to a word that is none.
    options: tuple[Option, ...] = ()
    #: Line, begin and end of every ``#SBATCH`` word.
    places: tuple[tuple[int, int, int], ...] = ()
    #: The word at which Slurm would stop reading, and its line.
    stray: tuple[str, int] | None = None
    #: Line of ``#SBATCH hetjob``.
    hetjob: int | None = None
    models: tuple[str, ...] = ()
    seed: int | None = None
    priority: int | None = None
    max_slowdown: float | None = None
    qos: str | None = None

    @property
    def gpus(self) -> tuple[Option, ...]:
        """Requests for GPUs, which the service provides."""
        return tuple(each for each in self.options if without_gpus(each.name, each.value)[0])

    def value(self, name: str) -> str | None:
        """Value of an ``#SBATCH`` option; the last one counts, as with sbatch."""
        return last_value(self.options, name)

    def has(self, name: str) -> bool:
        """Whether the script gives the ``#SBATCH`` option."""
        return any(option.name == name for option in self.options)

    def line(self, option: Option) -> int:
        """Where an option stands."""
        return self.places[option.first][0]

    def without(self, *names: str) -> str:
        """The script without GPU requests and without the options ``names``; its lines stay."""

        def change(option: Option) -> tuple[str, ...]:
            if option.name in names:
                return ()
            asked, rest = without_gpus(option.name, option.value)
            if not asked:
                return option.words
            return () if rest is None else respelled(option, rest)

        found = changes(self.options, change)
        if not found:
            return self.text
        lines = self.text.split("\n")
        left = {line: 0 for line, _, _ in self.places}
        for line, _, _ in self.places:
            left[line] += 1
        for (first, last), words in sorted(found.items(), reverse=True):
            for index in range(last, first - 1, -1):
                number, begin, end = self.places[index]
                put = " ".join(map(quoted, words)) if index == first else ""
                text = lines[number - 1]
                kept = text[:begin] if put else text[:begin].rstrip()
                lines[number - 1] = kept + put + text[end:]
                left[number] -= not put
        originals = self.text.split("\n")
        for number, count in left.items():
            if count == 0:
                lines[number - 1] = f"#{originals[number - 1]}"
        return "\n".join(lines)


def read(path: str) -> ScriptHead:
    """Read and validate the script at ``path``; raises ``BadScript``."""
    return parse(load(path), path)


def load(path: str) -> bytes:
    """The script at ``path``; raises ``BadScript``."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        sentence = "no such file: check the path, or use --wrap for a command"
    except IsADirectoryError:
        sentence = "this is a folder: name a script"
    except OSError as error:
        sentence = f"it cannot be read ({error.strerror}): check the path and its permissions"
    raise BadScript(path, None, sentence)


def check_without_slurm(head: ScriptHead) -> None:
    """Refuse what only Slurm can do, and what it would refuse; raises ``BadScript``."""
    try:
        head.text.encode()
    except UnicodeEncodeError as error:
        at = head.text.count("\n", 0, error.start) + 1
        raise BadScript(head.path, at, "batch script is not UTF-8 text: save it as UTF-8") from None
    if head.hetjob is not None:
        raise BadScript(head.path, head.hetjob, f"hetjob {_NOT_HERE}")
    for option in head.options:
        line = head.line(option)
        if option.name == "array":
            raise BadScript(head.path, line, f"--array {_NOT_HERE}")
        if option.name in INTERPRETED and not option.value:
            raise BadScript(head.path, line, f"--{option.name} needs a value")
        if option.name == "time":
            try:
                parse_time(option.value or "")
            except ValueError as error:
                raise BadScript(head.path, line, str(error)) from None
    if head.stray is not None:
        word, line = head.stray
        raise BadScript(head.path, line, f"{word!r} is not an option: write --name=value")


def encoded(text: str) -> bytes:
    """A script's bytes, those that were no UTF-8 too."""
    return text.encode(*_CODEC)


def parse(data: bytes, path: str) -> ScriptHead:
    """The head of the script ``data``; raises ``BadScript`` naming ``path`` and line."""
    _refuse_unusable(data, path)
    text = data.decode(*_CODEC)
    words: list[str] = []
    places: list[tuple[int, int, int]] = []
    hetjob: int | None = None
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
        elif line.startswith(_MAGIC) and hetjob is None:
            found = _words(path, number, line, len(_MAGIC))
            if found and found[0][0] in HETJOB:
                hetjob = number
                continue
            words += [word for word, _, _ in found]
            places += [(number, begin, end) for _, begin, end in found]
    try:
        scanned = scan(words, unknown=_value_if_any)
    except BadInput as error:
        raise BadScript(path, None, str(error)) from None
    stray = None
    if scanned.rest:
        stray = (scanned.rest[0], places[len(words) - len(scanned.rest)][0])
    return ScriptHead(
        path=path,
        text=text,
        options=scanned.options,
        places=tuple(places),
        stray=stray,
        hetjob=hetjob,
        models=tuple(plexrl.models),
        seed=plexrl.seed,
        priority=plexrl.priority,
        max_slowdown=plexrl.max_slowdown,
        qos=plexrl.qos,
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


def parse_qos(text: str) -> str:
    """A QOS of the partition."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        return text
    raise ValueError(f"qos {text!r} is not a name: use letters, digits, dot, dash and underscore")


def parse_model(text: str) -> str:
    """A name of the catalogue."""
    if text and not re.search(r"\s", text):
        return text
    raise ValueError(f"model {text!r} is not a name")


def quoted(word: str) -> str:
    """The word as it must stand in an ``#SBATCH`` line."""
    if re.search(r"[\s#'\"\\]", word) is None:
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


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


def _words(path: str, number: int, line: str, begin: int) -> list[tuple[str, int, int]]:
    """Words of a line from ``begin`` on, with their places, cut as sbatch cuts them."""
    found: list[tuple[str, int, int]] = []
    at = begin
    while True:
        while at < len(line) and line[at].isspace():
            at += 1
        start, word, quote = at, "", ""
        while at < len(line):
            letter = line[at]
            if letter == "\\" and at + 1 < len(line) and not (line[at + 1].isspace() and not quote):
                at += 1
                word += line[at]
            elif letter == quote:
                quote = ""
            elif quote:
                word += letter
            elif letter in "'\"":
                quote = letter
            elif letter.isspace() or letter == "#":
                break
            else:
                word += letter
            at += 1
        if quote:
            raise BadScript(path, number, f"no closing {quote}: close the quotes")
        if not word:  # Slurm reads no further than an empty word
            return found
        found.append((word, start, at))


def _value_if_any(_name: str, following: str | None) -> int:
    """Nothing but options may stand in a directive, so that another word is a value."""
    is_value = following is not None and not following.startswith("-")
    return Takes.VALUE if is_value else Takes.NOTHING


class _PlexrlLines:
    """The ``#PLEXRL`` lines of one script, read one at a time."""

    def __init__(self, path: str) -> None:
        self.models: list[str] = []
        self.seed: int | None = None
        self.priority: int | None = None
        self.max_slowdown: float | None = None
        self.qos: str | None = None
        self._path = path
        self._seen: dict[str, int] = {}

    def take(self, number: int, line: str) -> None:
        """Read one line."""
        rest = line.removeprefix("#PLEXRL")
        words = [word for word, _, _ in _words(self._path, number, line, len("#PLEXRL"))]
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
            elif name == "qos":
                self.qos = parse_qos(value)
            else:
                self.max_slowdown = parse_max_slowdown(value)
        except BadScript:  # a ValueError too
            raise
        except ValueError as error:
            raise self._bad(number, str(error)) from None

    def _bad(self, number: int, sentence: str) -> BadScript:
        return BadScript(self._path, number, sentence)


def _nearest(name: str) -> str:
    import difflib  # only for a mistake: the start-up of `plexrl sbatch` is measured

    if close := difflib.get_close_matches(name, PLEXRL_OPTIONS, n=1, cutoff=0.5):
        return f"did you mean --{close[0]}?"
    return f"known are {', '.join(f'--{known}' for known in PLEXRL_OPTIONS)}"


#: Command-line twins of the ``#PLEXRL`` options use the same parsers.
PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "model": parse_model,
    "seed": parse_seed,
    "priority": parse_priority,
    "max-slowdown": parse_max_slowdown,
    "qos": parse_qos,
}
