"""Every error this project raises on purpose.

A subclass states its default message as its docstring, keeps the facts as attributes, and
hands the same facts to ``super().__init__`` in order, so that it survives pickling between
processes. ``explain`` is one sentence: what was wrong, where, and what to do.
"""

from typing import ClassVar, Final

#: What to do about a folder in which nothing can be written, by what the system says of it.
_REMEDIES: Final = {
    "Permission denied": "give the service's user the right to write there",
    "Operation not permitted": "give the service's user the right to write there",
    "Read-only file system": "mount it writable",
    "Not a directory": "a file is where a folder belongs: move it away",
    "File exists": "a file is where a folder belongs: move it away",
    "No such file or directory": "make the folder again, or mount what belongs there",
}


class PlexError(Exception):
    """PlexRL could not do what was asked."""

    #: What the CLI exits with; see docs/cli.md.
    exit_code: ClassVar[int] = 1
    #: True if the same request may succeed later without any change.
    retryable: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.explain() or (type(self).__doc__ or "").strip()

    def explain(self) -> str:
        """One sentence for a person, made from the attributes."""
        return ""


class BadInput(PlexError, ValueError):
    """What was given cannot be used. ``sentence`` says what, where and what to do."""

    exit_code = 65

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def explain(self) -> str:
        return self.sentence


class StepSkipped(BadInput):
    """An optimizer step was skipped and its gradients are gone: a failure that changed state.

    The caller sees it fail; a replay runs it again, because it took effect.
    """


class BadScript(PlexError, ValueError):
    """A batch script cannot be used."""

    exit_code = 65

    def __init__(self, path: str, line: int | None, sentence: str) -> None:
        super().__init__(path, line, sentence)
        self.path, self.line, self.sentence = path, line, sentence

    def explain(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{where}: {self.sentence}"


class BadConfig(PlexError, ValueError):
    """The partition's configuration cannot be used. ``problems`` are whole sentences."""

    exit_code = 78

    def __init__(self, path: str, problems: tuple[str, ...]) -> None:
        super().__init__(path, problems)
        self.path, self.problems = path, problems

    def explain(self) -> str:
        return "\n".join(f"{self.path}: {problem}" for problem in self.problems)


class UnknownModel(PlexError, KeyError):
    """The catalogue has no such model."""

    exit_code = 65

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(name, known)
        self.name, self.known = name, known

    def explain(self) -> str:
        return f"unknown model {self.name!r}; this partition offers: {', '.join(self.known)}"


class ModelTooLarge(PlexError, ValueError):
    """No WPG of this partition can hold the model."""

    exit_code = 65

    def __init__(self, model: str, needed_bytes: int, largest_bytes: int, pool: str) -> None:
        super().__init__(model, needed_bytes, largest_bytes, pool)
        self.model, self.needed_bytes, self.largest_bytes = model, needed_bytes, largest_bytes
        self.pool = pool

    def explain(self) -> str:
        needed, largest = self.needed_bytes / 2**30, self.largest_bytes / 2**30
        return (
            f"model {self.model} needs {needed:.2f} GiB on a {self.pool} WPG; the largest holds "
            f"{largest:.2f} GiB: choose a smaller model or ask the admin for a larger WPG"
        )


class NotFound(PlexError, LookupError):
    """There is no such thing, or it is not yours."""

    exit_code = 66

    def __init__(self, what: str, name: str) -> None:
        super().__init__(what, name)
        self.what, self.name = what, name

    def explain(self) -> str:
        return f"no {self.what} {self.name!r} that you may see"


class Denied(PlexError, PermissionError):
    """You may not do that."""

    exit_code = 77

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def explain(self) -> str:
        return self.sentence


class Unauthenticated(Denied):
    """We do not know who you are."""


class CredentialsUnavailable(PlexError, RuntimeError):
    """MUNGE cannot make or check credentials now. ``sentence`` says where and what to do."""

    exit_code = 75
    retryable = True

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def explain(self) -> str:
        return self.sentence


class NotAdmitted(PlexError, RuntimeError):
    """The job waits for its turn, so it has no credentials yet."""

    exit_code = 75

    def __init__(self, slurm_id: str, reason: str) -> None:
        super().__init__(slurm_id, reason)
        self.slurm_id, self.reason = slurm_id, reason

    def explain(self) -> str:
        return f"job {self.slurm_id} is not admitted yet: {self.reason or 'it waits for its turn'}"


class DaemonUnavailable(PlexError, ConnectionError):
    """The partition's daemon does not answer."""

    exit_code = 69
    retryable = True

    def __init__(self, partition: str, where: str) -> None:
        super().__init__(partition, where)
        self.partition, self.where = partition, where

    def explain(self) -> str:
        return (
            f"the daemon of partition {self.partition!r} does not answer at {self.where}: "
            f"start it with `plexrl partition up`, or ask your admin"
        )


class DatabaseUnavailable(PlexError, RuntimeError):
    """The database cannot be used now."""

    exit_code = 75
    retryable = True

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def explain(self) -> str:
        return f"database {self.url}: {self.reason}"


class StorageFull(PlexError, OSError):
    """A file system or memory budget has no room."""

    exit_code = 74
    retryable = True

    def __init__(self, where: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(where, needed_bytes, free_bytes)
        self.where, self.needed_bytes, self.free_bytes = where, needed_bytes, free_bytes

    def explain(self) -> str:
        return (
            f"{self.where} has {_size(self.free_bytes)} free and "
            f"{_size(self.needed_bytes)} are needed: free space there, then try again"
        )


class DeviceBusy(PlexError):
    """Device memory that should be free is not. ``sentence`` says whose, how much, what to do."""

    exit_code = 74
    retryable = True

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def explain(self) -> str:
        return self.sentence


class StorageFailed(PlexError, OSError):
    """A disk does not do its work."""

    exit_code = 74
    retryable = True

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where, self.reason = where, reason

    def explain(self) -> str:
        remedy = _REMEDIES.get(self.reason, "see what dmesg says of its disk")
        return f"{self.where} cannot be written ({self.reason}): {remedy}"


class StorageRefused(PlexError, OSError):
    """A file or folder cannot be used: its rights, its mount or its disk."""

    exit_code = 74
    retryable = True

    def __init__(self, where: str, why: str, remedy: str) -> None:
        """``why`` such as "cannot be written (Permission denied)"."""
        super().__init__(where, why, remedy)
        self.where, self.why, self.remedy = where, why, remedy

    def explain(self) -> str:
        return f"{self.where} {self.why}: {self.remedy}"


def _size(size: int) -> str:
    """``4.0 KiB``, ``1.5 GiB``."""
    unit, power = next(
        ((unit, power) for unit, power in (("GiB", 30), ("MiB", 20)) if size >= 2**power),
        ("KiB", 10),
    )
    return f"{size / 2**power:.1f} {unit}"


class InvalidTransition(PlexError, RuntimeError):
    """A state machine was asked for a step it does not have."""

    exit_code = 70

    def __init__(self, subject: str, start: str, finish: str, story: tuple[str, ...]) -> None:
        super().__init__(subject, start, finish, story)
        self.subject, self.start, self.finish, self.story = subject, start, finish, story

    def explain(self) -> str:
        return "\n  ".join((f"{self.subject}: {self.start} -> {self.finish}", *self.story))


class BadImage(PlexError, ValueError):
    """An image file is torn, foreign, or of another layout."""

    exit_code = 65

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def explain(self) -> str:
        return f"image {self.path}: {self.reason}"


class SlurmUnavailable(PlexError, RuntimeError):
    """Slurm did not answer."""

    exit_code = 75
    retryable = True

    def __init__(self, sentence: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def explain(self) -> str:
        return self.sentence


class SlurmRejected(PlexError, RuntimeError):
    """Slurm refused the request."""

    def __init__(self, argv: tuple[str, ...], stderr: str) -> None:
        super().__init__(argv, stderr)
        self.argv, self.stderr = argv, stderr

    def explain(self) -> str:
        return f"{self.argv[0]}: {self.stderr.strip()}"
