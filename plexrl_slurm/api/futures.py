"""Outcomes of calls as the SDK reads them, and the long polls that wait for one."""

import asyncio
import math
from collections.abc import Awaitable
from typing import assert_never

from fastapi import Response

from plexrl_slurm import wire
from plexrl_slurm.api import proto
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.service import ModelReady, Outcome, Pending, SnapshotReady

#: How long one poll is held; the SDK gives up at 45 s.
WAIT_S = 20.0


class LongPolls:
    """Polls under way. A daemon that stops lets them go, and they answer "try again"."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopping = False

    async def wait(self, outcome: Awaitable[Outcome]) -> Outcome:
        """Await it in the current task; a stop makes it ``Pending``."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await outcome
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            task.uncancel()
            return Pending(queue_state="active", reason="the service is restarting")
        finally:
            self._tasks.discard(task)

    @property
    def wait_s(self) -> float:
        """How long a poll that comes now may wait."""
        return 0.0 if self._stopping else WAIT_S

    def stop(self) -> None:
        """Let every poll go, now and from now on."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()


def answer(outcome: Outcome, *, request_id: str) -> Response:
    """The body of ``retrieve_future``.

    JSON answers carry no ``type``: the same outcome answers calls of several types, and the SDK
    refuses a type that is not the one it expects, but not its absence.
    """
    match outcome:
        case Pending(queue_state=state, reason=reason):
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": state}
            return as_json(waiting | ({"queue_state_reason": reason} if reason else {}))
        case wire.Failed(message=message, category=category):
            return as_json({"error": message, "category": category})
        case wire.TrainOutput():
            return _protobuf(proto.forward_backward_bytes(outcome))
        case wire.SampleOutput():
            return _protobuf(proto.sample_bytes(outcome))
        case wire.OptimOutput(metrics=metrics):
            return as_json({"metrics": {name: _number(each) for name, each in metrics.items()}})
        case wire.Saved(uri=uri):
            return as_json({"path": uri})
        case wire.Created(parameters=parameters):
            return as_json({"parameters": parameters})
        case ModelReady(model_id=model_id):
            return as_json({"model_id": model_id})
        case SnapshotReady(uri=uri, sampling_session_id=session):
            return as_json({"path": uri, "sampling_session_id": session})
        case _:
            assert_never(outcome)


def _protobuf(data: bytes) -> Response:
    return Response(data, media_type="application/x-protobuf")


def _number(value: float) -> float | str:
    # JSON has no NaN, and the SDK wants a number; it also reads one from a string.
    return value if math.isfinite(value) else str(value)
