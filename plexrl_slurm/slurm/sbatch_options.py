"""sbatch's options, as far as one must know them to see where the script begins.

Names and their arguments are those of Slurm 22.05 to 26.05; options of site plugins are asked
for. What an option means is sbatch's own business, except for the few that are interpreted here:
requests for GPUs are taken out, and the partition is ours.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from plexrl_slurm.core.errors import BadInput

# Named tuples and numbers: `plexrl sbatch` imports this, and making a dataclass or an enumeration
# takes as long as a request to the daemon.


class Takes:
    """What follows an option, as in ``getopt_long``."""

    NOTHING: Final = 0
    VALUE: Final = 1
    #: ``--name`` or ``--name=VALUE``, never ``--name VALUE``.
    PERHAPS: Final = 2


_FLAGS: Final = (
    "consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit "
    "oversubscribe parsable quiet reboot spread-job spread-segments stepmgr test-only usage "
    "use-min-nodes verbose version wait"
)
_VALUES: Final = (
    "account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment "
    "constraint container container-id container-type context core-spec cores-per-socket cpu-freq "
    "cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude export "
    "export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket "
    "gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type "
    "mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile "
    "nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket "
    "ntasks-per-tres open-mode output partition power prefer priority profile qos reservation "
    "resources segment signal sockets-per-node switches tasks-per-node thread-spec "
    "threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap"
)
_PERHAPS: Final = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
#: Later than 22.05: abbreviations of older names stay unambiguous.
_NEWER: Final = (
    "consolidate-segments container-id container-type external extra mem-update oom-kill-step "
    "resources resv-ports segment spread-segments stepmgr tres-bind tres-per-task"
)
LONG: Final[Mapping[str, int]] = (
    dict.fromkeys(_FLAGS.split(), Takes.NOTHING)
    | dict.fromkeys(_VALUES.split(), Takes.VALUE)
    | dict.fromkeys(_PERHAPS.split(), Takes.PERHAPS)
)
_LETTERS: Final = (
    "A=account B=extra-node-info C=constraint D=chdir F=nodefile G=gpus H=hold J=job-name "
    "L=licenses M=clusters N=nodes O=overcommit Q=quiet S=core-spec V=version W=wait a=array "
    "b=begin c=cpus-per-task d=dependency e=error h=help i=input k=no-kill m=distribution "
    "n=ntasks o=output p=partition q=qos s=oversubscribe t=time v=verbose w=nodelist x=exclude"
)
SHORT: Final[Mapping[str, str]] = dict(pair.split("=") for pair in _LETTERS.split())
_SAME: Final = {"cluster": "clusters", "tasks-per-node": "ntasks-per-node"}
_GPU: Final = re.compile(
    r"gpus(-per-(node|task|socket))?|gpu-(bind|freq)|(cpus|mem|ntasks)-per-gpu|ntasks-per-tres"
)
_RESOURCES: Final = frozenset({"gres", "tres-per-task", "tres-bind"})
#: A GPU, or a share of one.
_GPU_RESOURCE: Final = re.compile(r"(gres[:/])?(gpu|shard|mps)([:=/]|$)")
_IN_VARIABLES: Final = (
    "gpus gpus-per-node gpus-per-socket gpus-per-task gpu-bind gpu-freq gres cpus-per-gpu "
    "mem-per-gpu ntasks-per-gpu tres-per-task tres-bind"
)
#: Variables that ask for GPUs, and the options that they stand for.
GPU_VARIABLES: Final[Mapping[str, str]] = {
    f"SBATCH_{name.upper().replace('-', '_')}": name for name in _IN_VARIABLES.split()
}


class Option(NamedTuple):
    """One option, where it was found."""

    #: Long name in full; as written where nobody knows it.
    name: str
    #: ``None``: none was given.
    value: str | None
    #: How it is written alone.
    words: tuple[str, ...]
    #: The words that it came from: a group such as ``-vQ`` makes two options.
    first: int
    last: int

    def __str__(self) -> str:
        return " ".join(self.words)


class Scanned(NamedTuple):
    """A command line."""

    options: tuple[Option, ...]
    #: The script and its arguments.
    rest: tuple[str, ...]
    #: Whether ``--`` stood before them.
    dashes: bool = False

    def last(self, name: str) -> str | None:
        """Value of the option; the last one counts."""
        return last_value(self.options, name)

    def has(self, name: str) -> bool:
        """Whether the flag is given."""
        return any(option.name == name for option in self.options)


def last_value(options: Iterable[Option], name: str) -> str | None:
    """Value of the option ``name``; the last one counts."""
    return next((each.value for each in reversed(tuple(options)) if each.name == name), None)


def scan(
    words: Sequence[str],
    *,
    own: Mapping[str, int] | None = None,
    unknown: Callable[[str, str | None], int],
) -> Scanned:
    """Read options up to the first word that is none, as ``getopt_long`` does.

    ``own`` are further long options, which cannot be abbreviated. ``unknown`` says what an
    option takes that no table has, from its name and the next word.
    """
    options: list[Option] = []
    at = 0
    while at < len(words):
        word = words[at]
        following = words[at + 1] if at + 1 < len(words) else None
        if word == "--":
            return Scanned(options=tuple(options), rest=tuple(words[at + 1 :]), dashes=True)
        if not word.startswith("-") or word == "-":
            break
        found = list(
            _long(word, following, own or {}, unknown)
            if word.startswith("--")
            else _short(word, following)
        )
        used = 2 if len(found[-1][2]) == 2 else 1
        for name, value, alone in found:
            last = at + used - 1
            options.append(Option(name=name, value=value, words=alone, first=at, last=last))
        at += used
    return Scanned(options=tuple(options), rest=tuple(words[at:]))


def changes(
    options: Iterable[Option],
    change: Callable[[Option], tuple[str, ...]],
) -> dict[tuple[int, int], tuple[str, ...]]:
    """New words for every place where ``change`` makes other words of an option."""
    groups: dict[tuple[int, int], list[Option]] = {}
    for option in options:
        groups.setdefault((option.first, option.last), []).append(option)
    return {
        place: tuple(word for option in group for word in change(option))
        for place, group in groups.items()
        if any(change(option) != option.words for option in group)
    }


def respelled(option: Option, value: str) -> tuple[str, ...]:
    """The option with another value."""
    if len(option.words) == 2:
        return (option.words[0], value)
    if option.words[0].startswith("--"):
        return (f"{option.words[0].partition('=')[0]}={value}",)
    return (f"{option.words[0][:2]}{value}",)


_Found = tuple[str, str | None, tuple[str, ...]]


def _long(
    word: str,
    following: str | None,
    own: Mapping[str, int],
    unknown: Callable[[str, str | None], int],
) -> Iterator[_Found]:
    written, equals, value = word[2:].partition("=")
    name, takes = (written, own[written]) if written in own else _resolved(written)
    if takes is None:
        takes = Takes.PERHAPS if equals else unknown(written, following)
    if equals:
        yield name, value, (word,)
    elif takes == Takes.VALUE and following is not None:
        yield name, following, (word, following)
    else:
        yield name, None, (word,)


def _resolved(written: str) -> tuple[str, int | None]:
    """Full name, and what it takes; an abbreviation of several is left as it is written."""
    name = written
    if name not in LONG:
        fits = [each for each in LONG if each.startswith(written)]
        older = [each for each in fits if each not in _NEWER.split()]
        if len(older or fits) > 1:
            takes = {LONG[each] for each in older or fits}
            if len(takes) > 1:
                shown = " ".join(f"--{each}" for each in fits)
                raise BadInput(f"option --{written} is ambiguous: write one of {shown} in full")
            return written, takes.pop()
        if not fits:
            return written, None
        name = (older or fits)[0]
    return _SAME.get(name, name), LONG[name]


def _short(word: str, following: str | None) -> Iterator[_Found]:
    rest = word[1:]
    while rest:
        letter, rest = rest[0], rest[1:]
        name = SHORT.get(letter, letter)
        takes = LONG.get(name, Takes.NOTHING)
        if takes == Takes.NOTHING:
            yield name, None, (f"-{letter}",)
        elif rest:
            yield name, rest, (f"-{letter}{rest}",)
            return
        elif takes == Takes.VALUE and following is not None:
            yield name, following, (f"-{letter}", following)
        else:
            yield name, None, (f"-{letter}",)


def without_gpus(name: str, value: str | None) -> tuple[bool, str | None]:
    """Whether the option asks for GPUs, and what is left of its value without them."""
    if _GPU.fullmatch(name):
        return True, None
    if name not in _RESOURCES or value is None:
        return False, value
    parts = value.split(",")
    kept = [part for part in parts if not _GPU_RESOURCE.match(part.strip())]
    return len(kept) < len(parts), ",".join(kept) or None


def plugin_options(help_text: str) -> Mapping[str, int]:
    """Every long option that ``sbatch --help`` names, those of the site's plugins too."""
    found: dict[str, int] = {}
    for match in re.finditer(r"^\s+(?:-\w,? +)?--([\w-]+)(\[=|=)?", help_text, re.MULTILINE):
        takes = {"[=": Takes.PERHAPS, "=": Takes.VALUE}.get(match[2], Takes.NOTHING)
        found.setdefault(match[1], takes)
    return found
