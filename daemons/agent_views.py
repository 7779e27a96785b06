"""Agents and their WPGs, as the daemon last heard of them."""

from dataclasses import dataclass, field

from plexrl_slurm.daemons.layout import Place
from plexrl_slurm.transport import messages as tm


@dataclass(slots=True)
class WpgView:
    """A WPG as its agent last described it."""

    name: str
    #: Address of its agent; empty until that has said hello.
    agent: bytes
    node: str = ""
    state: str = "starting"
    reason: str = ""
    incarnation: int = 0
    pids: list[int] = field(default_factory=list)
    #: Starts in a row that did not bring it up.
    failures: int = 0
    #: Times in a row that its ranks died while they were woken.
    lost_wakes: int = 0


@dataclass(slots=True)
class AgentView:
    """An agent that said hello."""

    name: str
    place: Place
    epoch: int
    pid: int
    heard_us: int
    #: It knows what it is to run.
    welcome: bool = False
    #: It was declared lost, or its hold is given back: nothing it says counts any more.
    refused: bool = False
    #: Its images, as it said last.
    stock: tm.Stock | None = None
