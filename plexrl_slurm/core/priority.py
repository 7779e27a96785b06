"""How urgent a waiting job is, in Slurm's multifactor words. Pure.

Sources: Slurm's pages "Multifactor Priority Plugin" (factors, weights, half-life) and "Classic
Fairshare Algorithm" (``F = 2 ** (-UE / S)``).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

DAY_US: Final = 86_400_000_000
#: A job's own priority is at most so much.
HIGHEST: Final = 1000
#: What was used more half-lives ago than this is as good as forgotten.
REMEMBERED: Final = 16

_Job = TypeVar("_Job")


class Owner(NamedTuple):
    """Who is charged: a user, in an account."""

    account: str
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What each factor, between 0 and 1, is worth at most."""

    age: int = 1_000
    fairshare: int = 10_000
    qos: int = 10_000
    #: Of the job's own priority.
    job: int = 1_000
    #: Whoever has waited so long has the whole age factor.
    max_age_us: int = 7 * DAY_US
    #: After so long, what was used counts half; 0: nothing is ever forgotten.
    half_life_us: int = 7 * DAY_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Each between 0 and 1."""

    age: float
    fairshare: float
    qos: float
    job: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """The parts of a priority; whole numbers, so that they add up."""

    age: int
    fairshare: int
    qos: int
    job: int

    @property
    def total(self) -> int:
        """Larger goes first."""
        return self.age + self.fairshare + self.qos + self.job


def factors(
    *, waited_us: int, fairshare: float, qos: int, most_qos: int, priority: int, weights: Weights
) -> Factors:
    """``qos`` is a QOS's priority, ``most_qos`` the largest of all; ``priority`` the job's own."""
    return Factors(
        age=_share(waited_us, weights.max_age_us),
        fairshare=fairshare,
        qos=_share(qos, most_qos),
        job=_share(priority, HIGHEST),
    )


def weighted(found: Factors, weights: Weights) -> Priority:
    """Each factor times its weight, rounded down."""
    return Priority(
        age=int(found.age * weights.age),
        fairshare=int(found.fairshare * weights.fairshare),
        qos=int(found.qos * weights.qos),
        job=int(found.job * weights.job),
    )


def aged(found: Priority, waited_us: int, weights: Weights) -> int:
    """What a priority is when the job has waited ``waited_us``, all else being equal."""
    age = int(_share(waited_us, weights.max_age_us) * weights.age)
    return found.total - found.age + age


def in_order(
    jobs: Iterable[_Job],
    *,
    at_us: int,
    guard_us: int,
    priority: Callable[[_Job], float],
    since_us: Callable[[_Job], int],
    number: Callable[[_Job], int],
) -> list[_Job]:
    """Who is next in the queue: first those that have waited ``guard_us``, the oldest of them
    first; then by priority, then by age, then by number."""

    def rank(job: _Job) -> tuple[int, float, int, int]:
        since = since_us(job)
        late = at_us - since >= guard_us
        return (0, 0, since, number(job)) if late else (1, -priority(job), since, number(job))

    return sorted(jobs, key=rank)


class Usage:
    """GPU-microseconds by owner, which count half after each half-life."""

    def __init__(self, half_life_us: int) -> None:
        self._half_life_us = half_life_us
        #: What it was worth at an instant.
        self._used: dict[Owner, tuple[float, int]] = {}

    def add(self, owner: Owner, gpu_us: int, at_us: int) -> None:
        """``owner`` used so much at ``at_us``; the order of the facts does not matter."""
        used, then_us = self._used.get(owner, (0.0, at_us))
        if at_us >= then_us:
            self._used[owner] = (used * self._left(at_us - then_us) + gpu_us, at_us)
        else:
            self._used[owner] = (used + gpu_us * self._left(then_us - at_us), then_us)

    def of(self, owner: Owner) -> tuple[float, int]:
        """What it was worth at an instant, as it is kept."""
        return self._used[owner]

    def set(self, owner: Owner, gpu_us: float, at_us: int) -> None:
        """The same from another one."""
        self._used[owner] = (gpu_us, at_us)

    def at(self, now_us: int) -> dict[Owner, float]:
        """What is left of it."""
        return {
            owner: used * self._left(max(0, now_us - then_us))
            for owner, (used, then_us) in self._used.items()
        }

    def _left(self, age_us: int) -> float:
        return 2.0 ** (-age_us / self._half_life_us) if self._half_life_us else 1.0


def fair_shares(
    usage: Mapping[Owner, float], shares: Mapping[str, int], owners: Iterable[Owner] = ()
) -> dict[Owner, float]:
    """The fair-share factor of everybody who has used something or is among ``owners``.

    ``shares`` are the accounts' own; an account without has 1, and users of an account have equal
    ones. ``F = 2 ** (-UE / S)``, where S is the owner's part of all shares, U the part of all that
    was used, and ``UE = U + (UE of the account - U) * S / (S of the account)``: 1 for whoever has
    used nothing, 1/2 for whoever has used just the share, towards 0 for whoever has used more.
    """
    members: dict[str, set[str]] = defaultdict(set)
    for owner in (*usage, *owners):
        members[owner.account].add(owner.user)
    of_account: dict[str, float] = defaultdict(float)
    for owner, used in usage.items():
        of_account[owner.account] += used
    all_shares = sum(shares.get(account, 1) for account in shares.keys() | members.keys())
    all_used = sum(of_account.values())
    found: dict[Owner, float] = {}
    for account, users in members.items():
        share = _share(shares.get(account, 1), all_shares) / len(users)
        above = of_account[account] / all_used if all_used > 0 else 0.0
        for user in users:
            owner = Owner(account, user)
            used = usage.get(owner, 0.0) / all_used if all_used > 0 else 0.0
            effective = used + (above - used) / len(users)
            found[owner] = 2.0 ** (-effective / share) if share > 0 else 0.0
    return found


def _share(part: int, whole: int) -> float:
    return min(1.0, max(0, part) / whole) if whole > 0 else 0.0
