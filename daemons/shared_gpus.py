"""Gangs that take turns on the same GPUs: training and rollout of a shared group.

One is awake. Its successor is woken only after it gave its memory back, what is left was
measured, and that is no more than it may keep. Whoever asks sees to it that nothing runs, and that
the state of a training gang is in an image: what sleeps forgets. A gang comes up asleep.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core.errors import DeviceBusy
from plexrl_slurm.daemons.gang import Gang, GangLost
from plexrl_slurm.engines import ranklink

#: How the end of a grant begins that its own gang did not outlive.
WOKEN: Final = "its ranks died while they were woken"


class WakeLost(GangLost):
    """A gang went down before it was awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one gang of a group may take of all its GPUs together."""

    gang: Gang
    #: Awake: what must be free before it is woken.
    awake_bytes: int
    #: Asleep: contexts, graphs and workspaces that it cannot give back.
    residual_bytes: int


class SharedGpus:
    """A group of such gangs."""

    def __init__(self, shares: Mapping[str, Share], *, order_id: Callable[[], str]) -> None:
        self._shares, self._order_id = dict(shares), order_id
        self._turn = asyncio.Lock()
        #: Start of the gang that is awake: one that was started anew sleeps.
        self._awake: dict[str, int] = {}
        #: Bytes that were in use at each gang's last sleep or wake; for ``sinfo``.
        self.used: dict[str, int] = {}

    def add(self, name: str, share: Share) -> None:
        """One more, which sleeps."""
        self._shares[name] = share

    @property
    def awake(self) -> list[str]:
        """Who has device memory: one, or none."""
        return [
            name
            for name, share in self._shares.items()
            if share.gang.state == "up" and self._awake.get(name) == share.gang.incarnation
        ]

    @property
    def names(self) -> list[str]:
        """All of them."""
        return list(self._shares)

    async def grant(self, name: str) -> None:
        """Make ``name`` the only one that is awake.

        Raises ``DeviceBusy`` if the memory is not free: then ``name`` sleeps, and whoever had
        its turn is awake again, without its state. Raises ``GangLost`` if a gang is lost meanwhile.
        """
        async with self._turn:
            before = [other for other in self.awake if other != name]
            try:
                for other in before:
                    await self._sleep(other)
                if name not in self.awake:
                    await self._wake(name)
            except DeviceBusy:
                for other in before:
                    if other not in self.awake:
                        await self._wake(other, needed=0)  # it had that memory until now
                raise

    async def _sleep(self, name: str) -> None:
        share = self._shares[name]
        # Noted first: whatever the measurement says, its state is gone.
        self._awake.pop(name, None)
        others = sum(other.residual_bytes for key, other in self._shares.items() if key != name)
        ranks = share.gang.processes
        await self._all_well(
            name, ranklink.Sleep(limit=share.residual_bytes // ranks, beside=others // ranks)
        )

    async def _wake(self, name: str, *, needed: int | None = None) -> None:
        share = self._shares[name]
        wanted = share.awake_bytes // share.gang.processes if needed is None else needed
        born = share.gang.incarnation
        share.gang.waking = True
        try:
            await self._all_well(name, ranklink.Wake(needed=wanted))
        except GangLost as problem:
            raise WakeLost(f"{WOKEN}: {problem}") from problem
        finally:
            share.gang.waking = False
        share.gang.lost_wakes = 0
        self._awake[name] = born

    async def _all_well(self, name: str, operation: ranklink.Sleep | ranklink.Wake) -> None:
        gang = self._shares[name].gang
        answers: list[ranklink.Answer] = await gang.order(
            self._order_id(), [operation] * gang.processes
        )
        self.used[name] = sum(answer.used_bytes for answer in answers)
        for answer in answers:
            if not answer.ok:
                raise DeviceBusy(f"WPG {name}: {answer.error}")
