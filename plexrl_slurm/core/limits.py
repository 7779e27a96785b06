"""What users, accounts and QOSes may have at once, and who is over it. Pure.

Slurm's words: a job over a submit limit is refused when it comes, one over another limit waits.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.sizes import in_words

#: The QOS of a job that names none.
NORMAL: Final = "normal"


class Scope(StrEnum):
    """Whose limit it is."""

    USER = "user"
    ACCOUNT = "account"
    QOS = "qos"
    #: A QOS's, for each user.
    QOS_USER = "qos_user"


class HeldKind(StrEnum):
    """Slurm's reason words for whoever waits, and ours where it has none."""

    PRIORITY = "Priority"
    #: Slurm itself would not start it yet, or never.
    DEPENDENCY = "Dependency"
    NEVER = "DependencyNeverSatisfied"
    BEGIN_TIME = "BeginTime"
    OWNER = "JobHeldUser"
    INVALID_QOS = "InvalidQOS"
    USER_JOBS = "AssocMaxJobsLimit"
    ACCOUNT_JOBS = "AssocGrpJobsLimit"
    QOS_JOBS = "QOSGrpJobsLimit"
    QOS_USER_JOBS = "QOSMaxJobsPerUserLimit"
    USER_SUBMIT = "AssocMaxSubmitJobLimit"
    ACCOUNT_SUBMIT = "AssocGrpSubmitJobsLimit"
    QOS_SUBMIT = "QOSGrpSubmitJobsLimit"
    QOS_USER_SUBMIT = "QOSMaxSubmitJobPerUserLimit"
    ASSOC_GPU = "AssocGrpGRESMinutes"
    QOS_GPU = "QOSGrpGRESMinutes"
    QOS_USER_GPU = "QOSMaxGRESMinutesPerUser"
    ASSOC_MEMORY = "AssocGrpMemLimit"
    QOS_MEMORY = "QOSGrpMemLimit"
    QOS_USER_MEMORY = "QOSMaxMemoryPerUser"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One reason why a job waits. An ``Obstacle`` without a place."""

    kind: HeldKind
    sentence: str

    @property
    def word(self) -> str:
        """For squeue."""
        return str(self.kind)

    def told(self, _now_us: int) -> str:
        """The sentence."""
        return self.sentence

    def view(self, _now_us: int) -> dict[str, object]:
        """For programs."""
        return {"kind": str(self.kind), "word": self.word, "sentence": self.sentence}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one user, account or QOS may have; ``None``: as much as there is."""

    #: Jobs that have a place.
    max_jobs: int | None = None
    #: Those, and the ones that wait.
    max_submit: int | None = None
    #: In 24 hours.
    gpu_us_per_day: int | None = None
    #: Of declared models' states and weights, of jobs that have a place.
    host_bytes: int | None = None

    def over(self, general: "Limits") -> "Limits":
        """These, and the general ones where these say nothing."""
        return Limits(
            max_jobs=_first(self.max_jobs, general.max_jobs),
            max_submit=_first(self.max_submit, general.max_submit),
            gpu_us_per_day=_first(self.gpu_us_per_day, general.gpu_us_per_day),
            host_bytes=_first(self.host_bytes, general.host_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """A quality of service that jobs may ask for."""

    name: str
    #: Of the queue; the largest of all is the whole factor.
    priority: int = 0
    #: The scheduler's weight of a job is its own priority times this.
    weight: int = 1
    #: It may have what the reservation keeps free.
    reserved: bool = False
    #: Who may ask for it; empty: everybody.
    users: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()
    #: Of all its jobs together, and of each user's.
    limits: Limits = field(default_factory=Limits)
    per_user: Limits = field(default_factory=Limits)

    def admits(self, user: str, account: str) -> bool:
        """Whether this user may ask for it."""
        return not (self.users or self.accounts) or user in self.users or account in self.accounts


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRules:
    """All limits of a partition."""

    qos: Mapping[str, Qos] = field(default_factory=dict)
    #: Of each user and each account that has none of its own.
    users: Limits = field(default_factory=Limits)
    accounts: Limits = field(default_factory=Limits)
    user: Mapping[str, Limits] = field(default_factory=dict)
    account: Mapping[str, Limits] = field(default_factory=dict)

    def found(self, name: str) -> Qos | None:
        """The QOS of that name; there is always a normal one."""
        return self.qos.get(name) or (Qos(name=NORMAL) if name == NORMAL else None)

    def daily(self) -> bool:
        """Whether any limit is one of GPU time."""
        every = [self.users, self.accounts, *self.user.values(), *self.account.values()]
        for qos in self.qos.values():
            every += [qos.limits, qos.per_user]
        return any(limits.gpu_us_per_day is not None for limits in every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A job, as limits see it."""

    job: JobId
    user: str
    account: str
    qos: str
    #: Of its declared models.
    host_bytes: int = 0


class Key(NamedTuple):
    """One limit's owner."""

    scope: Scope
    name: str
    #: Of a QOS's limit for each user.
    user: str = ""

    def words(self) -> str:
        """For a sentence."""
        if self.scope is Scope.QOS_USER:
            return f"user {self.user} with qos {self.name}"
        return f"{self.scope} {self.name}"

    def table(self) -> str:
        """Where an admin finds it."""
        if self.scope in (Scope.QOS, Scope.QOS_USER):
            return f"[qos.{self.name}]"
        return f"[limits.{self.scope}.{self.name}]"


_JOBS: Final = {
    Scope.USER: HeldKind.USER_JOBS,
    Scope.ACCOUNT: HeldKind.ACCOUNT_JOBS,
    Scope.QOS: HeldKind.QOS_JOBS,
    Scope.QOS_USER: HeldKind.QOS_USER_JOBS,
}
_SUBMIT: Final = {
    Scope.USER: HeldKind.USER_SUBMIT,
    Scope.ACCOUNT: HeldKind.ACCOUNT_SUBMIT,
    Scope.QOS: HeldKind.QOS_SUBMIT,
    Scope.QOS_USER: HeldKind.QOS_USER_SUBMIT,
}
_GPU: Final = {
    Scope.USER: HeldKind.ASSOC_GPU,
    Scope.ACCOUNT: HeldKind.ASSOC_GPU,
    Scope.QOS: HeldKind.QOS_GPU,
    Scope.QOS_USER: HeldKind.QOS_USER_GPU,
}
_MEMORY: Final = {
    Scope.USER: HeldKind.ASSOC_MEMORY,
    Scope.ACCOUNT: HeldKind.ASSOC_MEMORY,
    Scope.QOS: HeldKind.QOS_MEMORY,
    Scope.QOS_USER: HeldKind.QOS_USER_MEMORY,
}


def keys_of(subject: Subject) -> tuple[Key, ...]:
    """Everybody whose limits count for a job."""
    return (
        Key(Scope.USER, subject.user),
        Key(Scope.ACCOUNT, subject.account),
        Key(Scope.QOS, subject.qos),
        Key(Scope.QOS_USER, subject.qos, subject.user),
    )


class Tally:
    """Who has how much, now and as a pass goes on."""

    def __init__(self, rules: LimitRules, gpu_us: Mapping[Key, int] | None = None) -> None:
        """``gpu_us``: used in the last 24 hours."""
        self._rules, self._gpu_us = rules, gpu_us or {}
        self._jobs: Counter[Key] = Counter()
        self._submitted: Counter[Key] = Counter()
        self._bytes: Counter[Key] = Counter()

    def submit(self, subject: Subject) -> None:
        """It waits, or has a place."""
        for key in keys_of(subject):
            self._submitted[key] += 1

    def enter(self, subject: Subject) -> None:
        """It has a place."""
        for key in keys_of(subject):
            self._jobs[key] += 1
            self._bytes[key] += subject.host_bytes

    def leave(self, subject: Subject) -> None:
        """It has none any more."""
        for key in keys_of(subject):
            self._jobs[key] -= 1
            self._bytes[key] -= subject.host_bytes

    def submitted(self, subject: Subject) -> tuple[int, ...]:
        """How many jobs wait or have a place, by whoever's limits count for this one."""
        return tuple(self._submitted[key] for key in keys_of(subject))

    def assume(self, subject: Subject, submitted: Iterable[int]) -> None:
        """The same from another one."""
        self._submitted.update(dict(zip(keys_of(subject), submitted, strict=True)))

    def refusal(self, subject: Subject) -> Held | None:
        """Why one more job like this may not even wait; ``None`` if it may."""
        for key, limits in self._limits(subject):
            most, have = limits.max_submit, self._submitted[key]
            if most is not None and have >= most:
                if most == 0:
                    return Held(kind=_SUBMIT[key.scope], sentence=_none(key, "max_submit"))
                return Held(
                    kind=_SUBMIT[key.scope],
                    sentence=(
                        f"{key.words()} has {_jobs(have)} waiting or running, and max_submit is "
                        f"{most}: wait for one to end, or ask your admin for more ({key.table()})"
                    ),
                )
            if limits.host_bytes is not None and subject.host_bytes > limits.host_bytes:
                sentence = _too_much(key, subject, limits.host_bytes)
                return Held(kind=_MEMORY[key.scope], sentence=sentence)
        return None

    def holds(self, subject: Subject) -> Held | None:
        """What keeps a waiting job from a place, if there were one."""
        return next(self._holding(subject), None)

    def holding(self, subject: Subject) -> tuple[Held, ...]:
        """Every limit that does."""
        return tuple(self._holding(subject))

    def _holding(self, subject: Subject) -> Iterator[Held]:
        for key, limits in self._limits(subject):
            if (most := limits.max_jobs) is not None and self._jobs[key] >= most:
                sentence = _none(key, "max_jobs")
                if most:
                    sentence = (
                        f"{key.words()} has {_jobs(self._jobs[key])} running, and max_jobs is "
                        f"{most}: it starts when {_ends(self._jobs[key] - most + 1)}"
                    )
                yield Held(kind=_JOBS[key.scope], sentence=sentence)
            if (day := limits.gpu_us_per_day) is not None and self._gpu_us.get(key, 0) >= day:
                used = self._gpu_us.get(key, 0) // 1_000_000
                sentence = _none(key, "gpu_seconds_per_day")
                if day:
                    sentence = (
                        f"{key.words()} used {used:,} GPU-seconds in 24 hours, and "
                        f"gpu_seconds_per_day is {day // 1_000_000:,}: it starts when less of them "
                        f"lies in the last 24 hours"
                    )
                yield Held(kind=_GPU[key.scope], sentence=sentence)
            room = limits.host_bytes
            if room is not None and self._bytes[key] + subject.host_bytes > room:
                # It was lowered since, or nobody asked.
                sentence = _too_much(key, subject, room)
                if subject.host_bytes <= room:
                    sentence = (
                        f"jobs of {key.words()} have {in_words(self._bytes[key])} of host memory, "
                        f"this one needs {in_words(subject.host_bytes)}, and host_bytes is "
                        f"{in_words(room)}: it starts when one of them ends"
                    )
                yield Held(kind=_MEMORY[key.scope], sentence=sentence)

    def _limits(self, subject: Subject) -> Iterator[tuple[Key, Limits]]:
        rules = self._rules
        qos = rules.found(subject.qos) or Qos(name=subject.qos)
        user, account, of_qos, of_qos_user = keys_of(subject)
        yield user, rules.user.get(subject.user, rules.users)
        yield account, rules.account.get(subject.account, rules.accounts)
        yield of_qos, qos.limits
        yield of_qos_user, qos.per_user


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _none(key: Key, limit: str) -> str:
    """Of a limit of 0: no end of another job changes anything."""
    return (
        f"{limit} of {key.words()} is 0, so that none of its jobs starts: ask your admin for more "
        f"({key.table()})"
    )


def _too_much(key: Key, subject: Subject, most: int) -> str:
    return (
        f"the job's models need {in_words(subject.host_bytes)} of host memory, and host_bytes of "
        f"{key.words()} is {in_words(most)}: declare fewer or smaller models, or ask your admin "
        f"for more ({key.table()})"
    )


def _ends(count: int) -> str:
    return "one of them ends" if count == 1 else f"{count} of them have ended"


def _jobs(count: int) -> str:
    return f"{count} job{'s' if count != 1 else ''}"
