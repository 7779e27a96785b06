"""What is in the way of a job: a kind for programs, a word for squeue, a sentence for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool


class ObstacleKind(StrEnum):
    """What stands in the way."""

    #: The partition holds no WPG of the pool (now).
    NO_WPG = "no_wpg"
    #: All that there are, are being given back.
    DRAINING = "draining"
    #: Somebody is on every training WPG, and it is not to be shared, or has as many as it may.
    TRAIN_GPUS = "train_gpus"
    #: The same of rollout WPGs.
    ROLLOUT_GPUS = "rollout_gpus"
    #: On every WPG with room somebody's promised slowdown would be exceeded.
    PROMISE = "promise"
    DEVICE_MEMORY = "device_memory"
    HOST_MEMORY = "host_memory"
    #: Neither memory nor the disks below it have room for one more image.
    NVME = "nvme"
    #: No WPG that the partition can have would do, even an empty one.
    TOO_LARGE = "too_large"
    #: There is room, and it is kept free for others.
    RESERVATION = "reservation"
    #: Another job is to go first.
    PRIORITY = "priority"


#: As squeue has it: one word, Slurm's own where Slurm has one.
WORDS: Final[Mapping[ObstacleKind, str]] = {
    ObstacleKind.NO_WPG: "Resources",
    ObstacleKind.DRAINING: "Draining",
    ObstacleKind.TRAIN_GPUS: "Resources",
    ObstacleKind.ROLLOUT_GPUS: "Resources",
    ObstacleKind.PROMISE: "Promise",
    ObstacleKind.DEVICE_MEMORY: "DeviceMemory",
    ObstacleKind.HOST_MEMORY: "HostMemory",
    ObstacleKind.NVME: "NVMe",
    ObstacleKind.TOO_LARGE: "BadConstraints",
    ObstacleKind.RESERVATION: "Reservation",
    ObstacleKind.PRIORITY: "Priority",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One thing that is in the way of one job."""

    kind: ObstacleKind
    #: Without what changes from minute to minute.
    sentence: str
    pool: Pool | None = None
    #: The WPG that comes nearest to being a home.
    wpg: WpgId | None = None
    #: Whose promise it is.
    job: JobId | None = None
    needed_bytes: int = 0
    free_bytes: int = 0
    #: When the first of those who are in the way is expected to end.
    until_us: int | None = None

    @property
    def word(self) -> str:
        """For squeue."""
        return WORDS.get(self.kind, str(self.kind))

    def told(self, now_us: int) -> str:
        """The sentence, with how long it is expected to last."""
        if self.until_us is None:
            return self.sentence
        if self.until_us <= now_us:
            return f"{self.sentence}; the first was expected to end by now"
        left = lasting(self.until_us - now_us)
        return f"{self.sentence}; the first is expected to end in {left}"

    def view(self, now_us: int) -> dict[str, object]:
        """For programs."""
        return {
            "kind": str(self.kind),
            "word": self.word,
            "sentence": self.told(now_us),
            "pool": None if self.pool is None else str(self.pool),
            "wpg": self.wpg,
            "job_id": self.job,
            "needed_bytes": self.needed_bytes,
            "free_bytes": self.free_bytes,
            "until_us": self.until_us,
        }


def lasting(microseconds: int) -> str:
    """``3 h 10 min``, ``25 s``."""
    seconds = max(0, microseconds) // 1_000_000
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours, days = seconds // 60 % 60, seconds // 3600 % 24, seconds // 86_400
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def word_of(obstacles: Sequence[Obstacle]) -> str:
    """The one word for all of them; "" if there are none."""
    return obstacles[0].word if obstacles else ""
