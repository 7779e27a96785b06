"""Where the state of a deployment is, and the steps it may take. One story per state."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.records import dataclass


class Residency(StrEnum):
    """Where the newest state is."""

    __hash__ = str.__hash__  # that of an Enum is a function in Python

    #: Nowhere: not yet created, or lost before its first image (calls make it anew).
    ABSENT = "absent"
    CREATING = "creating"
    #: A complete image that its WPG can load (host or durable tier), nothing on the device.
    HOST = "host"
    LOADING = "loading"
    RESIDENT = "resident"
    #: Resident, and an image is being written.
    SAVING = "saving"
    #: Its image is being written, then its place is taken.
    OFFLOADING = "offloading"


#: Every legal step, and what it means for a reader of the story.
STEPS: Final[Mapping[tuple[Residency, Residency], str]] = {
    (Residency.ABSENT, Residency.CREATING): "create began",
    (Residency.CREATING, Residency.RESIDENT): "create ended",
    (Residency.CREATING, Residency.ABSENT): "create failed, or the device was lost",
    (Residency.HOST, Residency.LOADING): "load began",
    (Residency.LOADING, Residency.RESIDENT): "load ended",
    (Residency.LOADING, Residency.HOST): "load failed, or the device was lost",
    (Residency.LOADING, Residency.ABSENT): "its only image is damaged or gone",
    (Residency.RESIDENT, Residency.SAVING): "saving an image began",
    (Residency.SAVING, Residency.RESIDENT): "saving an image ended",
    (Residency.SAVING, Residency.HOST): "lost while saving; the older image counts",
    (Residency.SAVING, Residency.ABSENT): "lost while saving its first image",
    (Residency.RESIDENT, Residency.OFFLOADING): "offload began",
    (Residency.OFFLOADING, Residency.HOST): "offload ended, or the older image counts",
    (Residency.OFFLOADING, Residency.RESIDENT): "there was no room for its image, and it stays",
    (Residency.OFFLOADING, Residency.ABSENT): "lost while offloading to its first image",
    (Residency.RESIDENT, Residency.HOST): "left clean, or the device was lost",
    (Residency.RESIDENT, Residency.ABSENT): "lost before its first image",
    (Residency.HOST, Residency.RESIDENT): "found resident",
    (Residency.ABSENT, Residency.RESIDENT): "found resident",
    (Residency.ABSENT, Residency.HOST): "its agent has an image whose report was lost",
    (Residency.HOST, Residency.ABSENT): "its only image is gone",
}

#: Lines of a story that are kept.
STORY_LINES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=False)
class Whereabouts:
    """Where one state is; ``step`` returns a new one and never mutates."""

    subject: str
    at: Residency
    story: tuple[str, ...] = ()

    def step(self, to: Residency, *, cause: CauseId) -> "Whereabouts":
        """Move to ``to``, or raise with the whole story of how we got here."""
        meaning = STEPS.get((self.at, to))
        if meaning is None:
            raise InvalidTransition(self.subject, self.at, to, self.story)
        return self.note(f"{self.at} -> {to}: {meaning}", cause=cause, at=to)

    def note(self, line: str, *, cause: CauseId, at: Residency | None = None) -> "Whereabouts":
        """One more line of the story."""
        story = (*self.story[1 - STORY_LINES :], f"[{cause}] {line}")
        return Whereabouts(self.subject, self.at if at is None else at, story)
