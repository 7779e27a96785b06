"""The one place that reads clocks."""

import time
from collections.abc import Callable
from typing import Final

#: While the clock catches up, our time passes slower by one part in so many.
_SLOWER: Final = 16


def now_us() -> int:
    """UTC microseconds since the epoch."""
    return time.time_ns() // 1000


def _running_us() -> int:
    return time.monotonic_ns() // 1000


class Steady:
    """UTC that is never set back: then it goes on from where it was, a little slower, until the
    clock has caught up. For whoever measures stretches of time in UTC."""

    def __init__(
        self, wall: Callable[[], int] = now_us, running: Callable[[], int] = _running_us
    ) -> None:
        self._wall, self._running = wall, running
        self._last, self._at = wall(), running()

    def __call__(self) -> int:
        at = self._running()
        slow = self._last + (at - self._at) * (_SLOWER - 1) // _SLOWER
        self._last, self._at = max(self._wall(), slow), at
        return self._last


#: The scheduler's time.
steady_us: Final = Steady()
