"""Gangs that take turns on the same GPUs: training and rollout of a shared pool.

One is awake. Its successor is woken only after it gave its memory back, what is left was
measured, and that is no more than it may keep. Whoever asks sees to it that nothing runs, and that
the state of a training gang is in an image: what sleeps forgets.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plexrl_slurm.core.errors import DeviceBusy
from plexrl_slurm.daemons.gang import Gang
from plexrl_slurm.engines import ranklink


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one gang of a group may take of each of its ranks' GPUs."""

    gang: Gang
    #: Awake: what must be free before it is woken.
    awake_bytes: int
    #: Asleep: contexts, graphs and workspaces that it cannot give back.
    residual_bytes: int


class SharedGpus:
    """A group of such gangs; all of them are up."""

    def __init__(self, shares: Mapping[str, Share], *, order_id: Callable[[], str]) -> None:
        self._shares, self._order_id = shares, order_id
        self._turn = asyncio.Lock()
        #: Start of the gang that sleeps: one that was started anew is awake.
        self._asleep: dict[str, int] = {}
        #: Bytes that were in use at each gang's last sleep or wake; for ``sinfo``.
        self.used: dict[str, int] = {}

    @property
    def awake(self) -> list[str]:
        """Who has device memory; more than one only after a start."""
        return [name for name in self._shares if not self._sleeps(name)]

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
                if self._sleeps(name):
                    await self._wake(name)
            except DeviceBusy:
                await self._undo(name, before)
                raise

    async def _undo(self, name: str, before: list[str]) -> None:
        if not self._sleeps(name):
            await self._order(name, ranklink.Sleep(limit=self._shares[name].residual_bytes))
            self._asleep[name] = self._shares[name].gang.incarnation
        for other in before:
            if self._sleeps(other):
                await self._wake(other, needed=0)  # it had that memory until now

    def _sleeps(self, name: str) -> bool:
        return self._asleep.get(name) == self._shares[name].gang.incarnation

    async def _sleep(self, name: str) -> None:
        share = self._shares[name]
        # Noted first: whatever the measurement says, its state is gone.
        self._asleep[name] = share.gang.incarnation
        await self._all_well(name, ranklink.Sleep(limit=share.residual_bytes))

    async def _wake(self, name: str, *, needed: int | None = None) -> None:
        share = self._shares[name]
        await self._all_well(
            name, ranklink.Wake(needed=share.awake_bytes if needed is None else needed)
        )
        del self._asleep[name]

    async def _all_well(self, name: str, operation: ranklink.Sleep | ranklink.Wake) -> None:
        answers = await self._order(name, operation)
        for answer in answers:
            if not answer.ok:
                raise DeviceBusy(f"WPG {name}: {answer.error}")

    async def _order(
        self, name: str, operation: ranklink.Sleep | ranklink.Wake
    ) -> list[ranklink.Answer]:
        gang = self._shares[name].gang
        answers: list[ranklink.Answer] = await gang.order(
            self._order_id(), [operation] * gang.processes
        )
        self.used[name] = sum(answer.used_bytes for answer in answers)
        return answers
