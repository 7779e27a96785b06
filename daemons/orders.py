"""What the shell asks of the agents, and what it knows of the files that they need."""

from dataclasses import dataclass
from typing import Protocol

from plexrl_slurm.core.ids import CallId, WpgId
from plexrl_slurm.core.messages import (
    Call,
    Expect,
    Grant,
    Pause,
    Persist,
    Run,
    SaveImage,
    Switch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where a snapshot's weights are."""

    model: str
    #: "" for the agent's host tier.
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """Newest image of a training deployment in the durable tier."""

    progress: tuple[int, int]
    path: str
    #: Progress of the one before it, if that is still there.
    spare: tuple[int, int] | None = None


class Orders(Protocol):
    """The way to the agents; implemented by ``agents.AgentHub``."""

    def switch(self, step: Switch, weights: Weights | None, durable: Durable | None) -> None: ...
    def persist(self, step: Persist, known: Durable | None) -> None: ...
    def save(self, step: SaveImage) -> None: ...
    def grant(self, step: Grant) -> None: ...
    def hint(self, step: Expect) -> None: ...
    def run(self, step: Run, call: Call, body: bytes, publish: str) -> None: ...
    def pause(self, step: Pause) -> None: ...
    def abort(self, wpg: WpgId, call: CallId) -> None: ...
