"""What a switch costs, bytes over the measured rate of the WPG that moves them; a re-prefill."""

from typing import Final

from plexrl_slurm.core.estimates import ewma
from plexrl_slurm.core.ids import WpgId

_SECOND: Final = 1_000_000
#: Tokens a second that a re-prefill is believed to do before one has been seen.
PRIOR_PREFILL: Final = 4_000


class SwitchCosts:
    """Estimates switches; learns from those that ended."""

    def __init__(self, *, prior_bytes_per_s: int = 2 * 2**30, floor_us: int = 2_000) -> None:
        self._prior = prior_bytes_per_s
        #: What a switch costs however little it moves.
        self._floor_us = floor_us
        self._rates: dict[WpgId, int] = {}

    def bytes_per_s(self, wpg: WpgId) -> int:
        """The rate in use: measured, or the prior."""
        return self._rates.get(wpg, self._prior)

    def estimate_us(self, wpg: WpgId, moved_bytes: int) -> int:
        """Expected duration of moving so much."""
        return self._floor_us + moved_bytes * _SECOND // self._rates.get(wpg, self._prior)

    def learn(self, wpg: WpgId, *, moved_bytes: int, duration_us: int) -> None:
        """A switch ended; one that moved nothing teaches nothing."""
        if moved_bytes > 0 and duration_us > 0:
            rate = max(1, moved_bytes * _SECOND // duration_us)
            self._rates[wpg] = ewma(self._rates.get(wpg), rate)


class Prefills:
    """What computing tokens again costs on each WPG."""

    def __init__(self) -> None:
        self._per_s: dict[WpgId, int] = {}

    def estimate_us(self, wpg: WpgId, tokens: int) -> int:
        """Expected duration of so many."""
        return tokens * _SECOND // self._per_s.get(wpg, PRIOR_PREFILL)

    def learn(self, wpg: WpgId, *, tokens: int, took_us: int) -> None:
        """A call that was paused went on."""
        if tokens > 0 and took_us > 0:
            per_s = max(1, tokens * _SECOND // took_us)
            self._per_s[wpg] = ewma(self._per_s.get(wpg), per_s)
