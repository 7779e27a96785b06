"""Life of a job, as a table: which step is allowed, and what it means in words."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class JobState(StrEnum):
    """Where a job is on its way through the queue."""

    PENDING = "pending"
    ADMITTED = "admitted"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


#: States that a job never leaves.
ENDED: Final = frozenset(
    {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT}
)

JOB_STEPS: Final[Mapping[tuple[JobState, JobState], str]] = {
    (JobState.PENDING, JobState.ADMITTED): "a daemon claimed it",
    (JobState.PENDING, JobState.FAILED): "it ended before it was admitted",
    (JobState.PENDING, JobState.CANCELLED): "cancelled while it waited",
    (JobState.ADMITTED, JobState.PENDING): "requeued: its daemon's lease expired",
    (JobState.ADMITTED, JobState.RUNNING): "its controller began",
    (JobState.ADMITTED, JobState.COMPLETED): "its controller ended without a call",
    (JobState.ADMITTED, JobState.FAILED): "its controller could not start",
    (JobState.ADMITTED, JobState.CANCELLED): "cancelled before it began",
    (JobState.ADMITTED, JobState.TIMEOUT): "its time limit passed before it began",
    (JobState.RUNNING, JobState.COMPLETED): "its controller ended well",
    (JobState.RUNNING, JobState.FAILED): "its controller failed",
    (JobState.RUNNING, JobState.CANCELLED): "cancelled while it ran",
    (JobState.RUNNING, JobState.TIMEOUT): "its time limit passed",
}


def starts(finish: JobState) -> tuple[JobState, ...]:
    """States from which ``finish`` can be reached in one step, in order of the enum."""
    return tuple(state for state in JobState if (state, finish) in JOB_STEPS)
