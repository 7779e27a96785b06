"""Everything that the queue is decided by and that does not change while a daemon lives. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plexrl_slurm.core.limits import NORMAL, LimitRules, Qos
from plexrl_slurm.core.priority import Weights
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.turns import TurnRules


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Order, limits and reservation of one partition."""

    weights: Weights = field(default_factory=Weights)
    #: Of accounts that have others than 1.
    shares: Mapping[str, int] = field(default_factory=dict)
    limits: LimitRules = field(default_factory=LimitRules)
    turns: TurnRules = field(default_factory=TurnRules)
    reservation: Reservation = field(default_factory=Reservation)
    #: Whoever takes an empty training WPG comes after those that join others.
    joins_first: bool = False

    @property
    def most_qos(self) -> int:
        """The largest priority of a QOS."""
        return max((qos.priority for qos in self.limits.qos.values()), default=0)

    def wrong_qos(self, name: str, user: str, account: str) -> str | None:
        """Why this user may not ask for a QOS; ``None``: it is right."""
        qos = self.limits.found(name)
        if qos is None:
            return unknown_qos(name, (NORMAL, *self.limits.qos))
        if not qos.admits(user, account):
            return (
                f"qos {qos.name} is not for user {user} in account {account or 'default'}: leave "
                f"--qos out, or ask your admin ([qos.{qos.name}])"
            )
        return None

    def qos(self, name: str) -> Qos:
        """The QOS of that name; one that was taken away gives nothing."""
        return self.limits.found(name) or Qos(name=name)


def unknown_qos(name: str, known: Iterable[str]) -> str:
    """One sentence."""
    there = ", ".join(sorted(set(known)))
    return f"unknown qos {name[:60]!r}; this partition has {there}: submit with one of these"
