"""The one place that reads clocks."""

import time


def now_us() -> int:
    """UTC microseconds since the epoch."""
    return time.time_ns() // 1000
