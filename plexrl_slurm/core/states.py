"""States of a job, and the steps between them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.core.ids import JobId


class JobState(StrEnum):
    """Where a job is between ``plexrl sbatch`` and its bill."""

    #: Queued: not placed yet.
    PENDING = "pending"
    #: Placed: home WPGs fixed, its controller may start.
    ADMITTED = "admitted"
    #: Its controller has been seen.
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


#: States that a job never leaves.
ENDED: Final = frozenset(
    {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT}
)

#: Every legal step, and what it means.
STEPS: Final[Mapping[tuple[JobState, JobState], str]] = {
    (JobState.PENDING, JobState.ADMITTED): "a daemon claimed and placed it",
    (JobState.PENDING, JobState.FAILED): "it can never be placed, or its submission broke off",
    (JobState.PENDING, JobState.CANCELLED): "cancelled before it was placed",
    (JobState.ADMITTED, JobState.RUNNING): "its controller called",
    (JobState.ADMITTED, JobState.PENDING): "its places were given up before it started",
    (JobState.ADMITTED, JobState.COMPLETED): "its controller ended without a call",
    (JobState.ADMITTED, JobState.FAILED): "its controller failed to start",
    (JobState.ADMITTED, JobState.CANCELLED): "cancelled before its controller called",
    (JobState.ADMITTED, JobState.TIMEOUT): "its time limit passed before its controller called",
    (JobState.RUNNING, JobState.COMPLETED): "its controller ended well",
    (JobState.RUNNING, JobState.FAILED): "its controller ended badly, or its lease lapsed",
    (JobState.RUNNING, JobState.CANCELLED): "cancelled",
    (JobState.RUNNING, JobState.TIMEOUT): "its time limit passed",
}


def check_step(job: JobId, start: JobState, finish: JobState) -> str:
    """What the step means; raises ``InvalidTransition`` if there is none."""
    meaning = STEPS.get((start, finish))
    if meaning is None:
        known = tuple(f"{start} -> {to}: {why}" for (at, to), why in STEPS.items() if at is start)
        raise InvalidTransition(f"job {job}", start, finish, known or (f"{start} is final",))
    return meaning
