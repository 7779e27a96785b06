"""What is known of a partition's holds, and what can be done with them."""

from dataclasses import dataclass, field
from enum import StrEnum

from plexrl_slurm.core.errors import BadInput


class HoldPhase(StrEnum):
    """Where a hold's Slurm job is."""

    #: Submitted and not started, or requeued by Slurm.
    PENDING = "pending"
    RUNNING = "running"
    #: Cancelled, or being given back; an ended hold is no longer shown at all.
    ENDING = "ending"


class Renewal(StrEnum):
    """What happens before a hold's time limit."""

    #: Extend; if Slurm refuses, replace.
    AUTO = "auto"
    #: Only extend; if Slurm refuses, the next hold is asked for when the old one is given back.
    #: (One that lost a node or its batch script is replaced all the same.)
    EXTEND = "extend"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldView:
    """One hold as it is now."""

    id: str
    phase: HoldPhase
    submitted_us: int
    started_us: int | None = None
    #: When its time limit ends it; ``None``: never, or not started.
    limit_end_us: int | None = None
    #: Its WPGs are up.
    ready: bool = False
    #: A deployment or a snapshot in use lives on it.
    in_use: bool = False
    #: Since when nothing has lived on it; ``None``: something does, or it has not been up yet.
    idle_since_us: int | None = None
    #: Since when everybody who lives on it would have found a place on the others, with every
    #: promise kept; ``None``: somebody would not, or nobody lives on it.
    vacant_since_us: int | None = None
    #: It gets nothing new, and what lives on it moves away.
    draining: bool = False
    #: Nothing is left on it.
    drained: bool = False
    #: The hold that it was submitted to replace; stays when that one is gone.
    replaces: str = ""
    #: The node of its batch script is gone: nobody starts its agents again.
    batch_lost: bool = False
    lost_nodes: int = 0
    #: It has every WPG that it was made for.
    whole: bool = True
    #: One of its pools has no WPG left.
    useless: bool = False
    #: It was made before the settings had some of the WPGs that another one would have.
    outdated: bool = False
    #: Slurm accepted a longer limit, and ``limit_end_us`` does not show it yet.
    extending: bool = False
    #: Slurm refused a longer limit.
    extend_refused: bool = False
    #: Slurm's reason while it is pending.
    pending_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRules:
    """What the site wants."""

    min: int = 1
    #: Pending and running ones together; a hold and its replacement count once.
    max: int = 1
    #: So long before its limit a hold is renewed.
    renew_before_us: int = 900_000_000
    renewal: Renewal = Renewal.AUTO
    #: Of one hold; ``None``: none is asked for, so none can be extended.
    time_limit_us: int | None = None
    #: Demand waits so long before one more hold is asked for.
    scale_up_after_us: int = 60_000_000
    #: A hold above ``min`` that is idle so long is given back; 0: never.
    idle_release_us: int = 0
    #: So long before its limit a hold that is not renewed yet is emptied and given back, so that
    #: its replacement can start on the same GPUs; ``None``: a third of ``renew_before_us``.
    last_call_us: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise BadInput(
                f"hold.min is {self.min} and hold.max is {self.max}: write 0 <= min <= max"
            )
        if self.time_limit_us is not None and self.renew_before_us >= self.time_limit_us:
            raise BadInput(
                "hold.renew_before_seconds is not shorter than hold.time_limit, so that a hold "
                "would be renewed as soon as it starts: lower it, or raise the limit"
            )

    @property
    def call_us(self) -> int:
        """``last_call_us`` or its default."""
        return self.renew_before_us // 3 if self.last_call_us is None else self.last_call_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the holds cannot serve now."""

    #: Since when the oldest job or deployment has waited for a WPG that one more hold would give.
    waiting_since_us: int | None = None
    #: Deployments whose WPG is gone found no other.
    homeless: bool = False

    def __bool__(self) -> bool:
        return self.homeless or self.waiting_since_us is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Ask Slurm for one more hold."""

    #: The hold that it shall replace, or "".
    replaces: str = ""
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Raise the time limit of a running hold."""

    hold: str
    #: Absolute, from its start.
    limit_us: int
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Put nothing new on a hold and move away what lives there."""

    hold: str
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undrain:
    """Use a draining hold again."""

    hold: str
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Cancel its Slurm job: nothing lives on it."""

    hold: str
    reason: str = field(compare=False)


HoldAction = Submit | Extend | Drain | Undrain | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A hold, agent or rank failed because of a node."""

    node: str
    at_us: int
    reason: str
