"""Which image a WPG on several nodes loads when its newest one is damaged: the next older one.

Each node says whether its share is whole; one that is not makes the image none. What one node
decides by itself (:mod:`plexrl_slurm.daemons.fallback`) is decided here by the daemon, once.
"""

from dataclasses import dataclass, field

from plexrl_slurm.core.messages import ImagesLeft
from plexrl_slurm.daemons.fallback import Kept, newest_below
from plexrl_slurm.daemons.gang_facts import Position
from plexrl_slurm.memory import durable
from plexrl_slurm.transport import messages as tm


@dataclass(slots=True, kw_only=True)
class Candidates:
    """Images of a deployment that were not found to be damaged."""

    #: On all nodes.
    image: Position | None
    #: The newest in the durable tier.
    kept: Kept | None
    #: What is wrong with newer ones, a sentence each.
    damaged: list[str] = field(default_factory=list)

    @property
    def durable(self) -> Position | None:
        """Progress of the newest in the durable tier."""
        return self.kept.progress if self.kept is not None else None

    @property
    def best(self) -> Position | None:
        """The newest, which is loaded."""
        return max((at for at in (self.image, self.durable) if at is not None), default=None)

    @property
    def path(self) -> str:
        """Where the nodes get the newest; "": they have it."""
        return str(self.kept.folder) if self.kept is not None and self.image != self.best else ""

    def without_best(self, problems: list[str]) -> None:
        """Some node's share of the newest is damaged. Raises ``OSError``."""
        if self.kept is not None and self.path:
            bad = self.kept
            durable.set_aside(bad.folder)
            self.kept = newest_below(bad.folder.parent, bad.progress)
        else:
            self.image = None
        self.damaged.extend(problems)

    @property
    def left(self) -> ImagesLeft:
        """What the core is told."""
        return ImagesLeft(image=self.best, durable=self.durable)

    def report(self, wpg: str, deployment: str) -> tm.Done:
        """What an agent would have said if the WPG lay on its node alone."""
        return tm.Done(
            number=0,
            wpg=wpg,
            order="",
            what="switch",
            ok=self.best is not None,
            deployment=deployment,
            left=tm.ImagesLeft(image=self.best, durable=self.durable, damaged=self.damaged),
        )
