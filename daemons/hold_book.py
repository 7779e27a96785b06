"""Decides about holds, and writes decisions to the journal where they are news."""

from collections.abc import Sequence
from typing import Protocol

from plexrl_slurm.core.hold_news import HoldNews, KeepRules, left_out, to_do
from plexrl_slurm.core.holding import Demand, Fault, HoldAction, HoldView
from plexrl_slurm.daemons.hold_views import rules_of
from plexrl_slurm.slurm_settings import HoldSettings


class HoldJournal(Protocol):
    """See :class:`plexrl_slurm.journal.JournalledCore`."""

    def held(self, news: HoldNews, at_us: int, actions: Sequence[HoldAction]) -> None:
        """What is to be done with the holds."""

    def excluded(self, faults: Sequence[Fault], at_us: int, nodes: list[str]) -> None:
        """A hold was asked for that is not to have some nodes; ``faults`` that were not told."""


class HoldBook:
    """One a daemon."""

    def __init__(self, settings: HoldSettings) -> None:
        self.journal: HoldJournal | None = None
        self._rules = keep_rules(settings)
        self._written: dict[str, HoldView] = {}
        self._rest: tuple[Demand, tuple[int, ...]] | None = None
        self._faults = 0

    def decide(
        self, at_us: int, views: Sequence[HoldView], demand: Demand, failed_us: Sequence[int]
    ) -> tuple[HoldAction, ...]:
        """What to do now."""
        actions = to_do(at_us, views, demand, failed_us, self._rules)
        if self.journal is not None:
            now, rest = {each.id: each for each in views}, (demand, tuple(failed_us))
            if actions or now != self._written or rest != self._rest:
                news = HoldNews(
                    holds=tuple(each for each in views if self._written.get(each.id) != each),
                    gone=tuple(name for name in self._written if name not in now),
                    demand=demand,
                    failed_us=rest[1],
                )
                self._written, self._rest = now, rest
                self.journal.held(news, at_us, actions)
        return actions

    def left_out(self, at_us: int, faults: Sequence[Fault]) -> list[str]:
        """Nodes that the next hold is not to have; ``faults``: all, oldest first."""
        nodes = left_out(at_us, faults, self._rules)
        if self.journal is not None and faults:
            self.journal.excluded(faults[self._faults :], at_us, nodes)
            self._faults = len(faults)
        return nodes


def keep_rules(settings: HoldSettings) -> KeepRules:
    """The site's wishes, as the decision takes them."""
    return KeepRules(
        rules=rules_of(settings),
        exclude_after=settings.exclude_after,
        exclude_us=settings.exclude_us,
    )
