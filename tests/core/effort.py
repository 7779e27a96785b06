"""How many examples a property is tried with: few in CI, ``PLEXRL_EXAMPLES`` at night."""

import os
import sys
from collections import Counter
from time import monotonic

from hypothesis import HealthCheck, settings

#: Examples of each property at night; 0: it is day.
MANY = int(os.environ.get("PLEXRL_EXAMPLES", "0"))
_SEEN: Counter[str] = Counter()
_BEGUN = monotonic()


def effort(few: int, *, costs: int = 1, steps: int = 30) -> settings:
    """``few`` examples by day, always the same. ``costs``: at night so many times fewer than of a
    cheap one: an example of it takes as much longer."""
    return settings(
        max_examples=max(few, MANY // costs),
        stateful_step_count=steps,
        deadline=None,
        derandomize=not MANY,
        database=None,
        print_blob=bool(MANY),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def tried(what: str) -> None:
    """Count one example; at night, tell every thousand."""
    _SEEN[what] += 1
    if MANY and _SEEN[what] % 1000 == 0:
        took_s = monotonic() - _BEGUN
        print(
            f"\n{what}: {_SEEN[what]:,} examples, {took_s:,.0f} s", file=sys.__stderr__, flush=True
        )
