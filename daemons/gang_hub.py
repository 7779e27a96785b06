"""WPGs that lie on several nodes: one to the core, one part at each of their agents.

The parts live and die together. An incarnation begins when every agent has ended the ranks of the
one before and has said what images it has (``PartReady``); what every node has is *settled*, and
only that counts. Then all ranks start and meet at an address that no earlier rank knows. Orders go
to every part in the same order, and an order has ended when every part has answered.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

import msgspec

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, WpgId
from plexrl_slurm.core.messages import WpgDown, WpgUp
from plexrl_slurm.daemons.gang import pause_after
from plexrl_slurm.daemons.gang_facts import Position, Said, common_images, merge
from plexrl_slurm.daemons.gang_orders import GangOrders
from plexrl_slurm.daemons.gang_view import Gang, Part
from plexrl_slurm.daemons.layout import HeldWpg, Place
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.logs import say
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

Recover = Callable[[tm.Hello, Collection[WpgId]], Awaitable[tuple[list[str], list[str]]]]


class GangHub:
    """Of :class:`AgentHub`: what is different if a WPG has several agents."""

    def __init__(
        self,
        shell: Shell,
        orders: GangOrders,
        *,
        epoch: int,
        post: Callable[[bytes, tm.Command], None],
        recover: Recover,
        address_of: Callable[[Place], Awaitable[str]],
    ) -> None:
        """``address_of``: where the other nodes reach one; the rest as in :class:`AgentHub`."""
        self.orders = orders
        orders.restart = self._down
        self._gangs: dict[str, Gang] = {}
        self._shell, self._epoch = shell, epoch
        self._post, self._recover, self._address_of = post, recover, address_of

    def get(self, wpg: str) -> Gang | None:
        """The WPG, if it lies on several nodes."""
        return self._gangs.get(wpg)

    def expect(self, held: HeldWpg, show: Callable[[Gang, str], None]) -> None:
        """A hold has it; ``show``: it has changed, and why."""
        parts = [Part(place=place) for place in held.places]
        self._gangs[held.id] = Gang(held=held, parts=parts, show=show)

    def end(self, wpg: str) -> None:
        """A node of it is lost, or its hold: the agents that live end their parts."""
        gang = self._gangs.pop(wpg, None)
        if gang is None:
            return
        self.orders.forget(gang)
        if gang.pause is not None:
            gang.pause.cancel()
        for part in gang.parts:
            if part.address:
                order = tm.PrepareOrder(epoch=self._epoch, wpg=wpg, incarnation=0)
                self._post(part.address, order)

    def addresses(self, wpg: str) -> list[bytes]:
        """Of the agents that have parts of it."""
        gang = self._gangs.get(wpg)
        return [part.address for part in gang.parts if part.address] if gang is not None else []

    def failures(self) -> Iterable[tuple[Place, str, int]]:
        """Parts that did not start, and how often in a row."""
        for gang in self._gangs.values():
            for part in gang.parts:
                if part.failures:
                    yield part.place, gang.id, part.failures

    # -- agents ------------------------------------------------------------------------------
    def take(self, address: bytes, place: Place, hello: tm.Hello) -> tm.Hello:
        """An agent has said hello: remember what it says of parts; the rest is answered."""
        mine: set[str] = set()
        for gang in self._gangs.values():
            for part in gang.parts:
                if part.place == place:
                    mine.add(gang.id)
                    part.address, part.ready = address, None
                    part.said = Said.of(hello, gang.id)
        return msgspec.structs.replace(
            hello,
            wpgs=[held for held in hello.wpgs if held.name not in mine],
            images=[image for image in hello.images if image.wpg not in mine],
            finished=[
                done for done in hello.finished if done.wpg not in mine or done.what != "run"
            ],
        )

    async def welcomed(self, address: bytes) -> None:
        """Its agent knows what it is to run."""
        for gang in list(self._gangs.values()):
            part = gang.part_of(address)
            if part is None or not all(each.address for each in gang.parts):
                continue
            if gang.incarnation:
                order = tm.PrepareOrder(
                    epoch=self._epoch, wpg=gang.id, incarnation=gang.incarnation
                )
                self._post(address, order)
            else:
                await self._meet(gang)

    def lost(self, address: bytes, reason: str) -> None:
        """Its process has ended."""
        for gang in list(self._gangs.values()):
            part = gang.part_of(address)
            if part is None:
                continue
            part.address, part.said = b"", None
            self.orders.lose_copies(gang)
            if gang.incarnation:
                self._down(gang, reason)

    async def _meet(self, gang: Gang) -> None:
        """Every part was heard by this daemon: is it a gang that lives, or is one to be started?"""
        said = [part.said for part in gang.parts if part.said is not None]
        found = merge(said) if len(said) == len(gang.parts) else None
        gang.incarnation = max((each.incarnation for each in said), default=0)
        if found is None:
            self._prepare(gang)
            return
        for part, each in zip(gang.parts, said, strict=True):
            part.state, part.pids, part.said = "up", each.pids, None
        gang.up = True
        gang.settled, settle = common_images([each.images for each in said])
        await self._tell(gang, settle, finished=found.finished)
        for call, number in found.running:
            asked = self.orders.await_run(gang, call, number)
            for index, each in enumerate(said):
                for done in each.finished:
                    if (done.call, done.part) == (call, number):
                        asked.answers[index] = done
        gang.show(gang, "")
        self._shell.feed(
            WpgUp(
                at_us=now_us(),
                cause=CauseId(f"hello of the agents of {gang.id}"),
                wpg=gang.id,
                resident=DeploymentId(found.resident) if found.resident else None,
                progress=found.progress if found.resident else None,
                running=tuple((CallId(call), number) for call, number in found.running),
            )
        )

    async def _tell(
        self, gang: Gang, settle: dict[str, Position | None], *, finished: list[tm.Done]
    ) -> None:
        """The agents, which image counts; the core, what there is."""
        self.orders.settle(gang, settle)
        first = gang.parts[0].place
        hello = tm.Hello(
            agent=gang.id,
            hold=first.hold,
            node=first.node,
            epoch=0,
            pid=0,
            wpgs=[],
            images=[
                tm.ImageHeld(wpg=gang.id, deployment=deployment, progress=progress, bytes=0)
                for deployment, progress in gang.settled.items()
            ],
            snapshots=[],
            finished=finished,
        )
        await self._recover(hello, [gang.id])

    # -- incarnations ------------------------------------------------------------------------
    def _prepare(self, gang: Gang) -> None:
        """End what lives of it, everywhere; the next incarnation follows."""
        gang.incarnation += 1
        if gang.pause is not None:
            gang.pause.cancel()
        for part in gang.parts:
            part.ready, part.state, part.pids = None, "down", []
            if part.address:
                order = tm.PrepareOrder(
                    epoch=self._epoch, wpg=gang.id, incarnation=gang.incarnation
                )
                self._post(part.address, order)

    async def ready(self, address: bytes, report: tm.PartReady) -> None:
        """No rank of an earlier incarnation lives at this part."""
        gang = self._gangs.get(report.wpg)
        part = gang.part_of(address) if gang is not None else None
        if gang is None or part is None or report.incarnation != gang.incarnation:
            return
        part.ready = report
        answers = [each.ready for each in gang.parts if each.ready is not None]
        if len(answers) < len(gang.parts):
            return
        said = [each.said.finished for each in gang.parts if each.said is not None]
        for each in gang.parts:
            each.said = None
        gang.settled, settle = common_images([each.images for each in answers])
        await self._tell(gang, settle, finished=finished_by_all(said, len(gang.parts)))
        meeting = await self._address_of(gang.parts[0].place)
        if report.incarnation != gang.incarnation or self._gangs.get(gang.id) is not gang:
            return
        order = tm.StartOrder(
            epoch=self._epoch,
            wpg=gang.id,
            incarnation=gang.incarnation,
            address=meeting,
            port=answers[0].port,
            name=f"{gang.id}.{gang.incarnation}.{self._epoch}",
        )
        failures = max(each.failures for each in gang.parts)
        loop = asyncio.get_running_loop()
        gang.pause = loop.call_later(pause_after(failures), self._start, gang, order)

    def _start(self, gang: Gang, order: tm.StartOrder) -> None:
        gang.pause = None
        say(log, "gang_starts", wpg=gang.id, incarnation=order.incarnation, at=order.address)
        for part in gang.parts:
            self._post(part.address, order)

    def changed(self, address: bytes, report: tm.WpgChanged) -> None:
        """A part came up or went down."""
        gang = self._gangs.get(report.name)
        part = gang.part_of(address) if gang is not None else None
        if gang is None or part is None:
            return
        if report.incarnation == 0 and report.state == "down":
            part.failures += 1_000  # its GPUs are not there
            gang.show(gang, report.reason)
            return
        if not gang.incarnation:
            part.said = None  # it is not as it said any more
            return
        if report.incarnation != gang.incarnation:
            return
        part.state, part.pids = report.state, report.pids
        say(log, "wpg_part", name=gang.id, node=part.place.node, state=report.state)
        if report.state == "down":
            part.failures = 0 if gang.up else part.failures + 1
            self._down(gang, f"{part.place.node}: {report.reason}")
        elif all(each.state == "up" for each in gang.parts) and not gang.up:
            gang.up = True
            for each in gang.parts:
                each.failures = 0
            gang.show(gang, "")
            self._shell.feed(WpgUp(at_us=now_us(), cause=CauseId("gang is up"), wpg=gang.id))
        else:
            gang.show(gang, report.reason)

    def done(self, address: bytes, report: tm.Done) -> bool:
        """An order has ended at an agent; false: of a WPG that lies on one node."""
        gang = self._gangs.get(report.wpg)
        if gang is None:
            return False
        part = gang.part_of(address)
        if part is not None:
            self.orders.done(gang, part, report)
        return True

    def _down(self, gang: Gang, reason: str) -> None:
        was_up, gang.up = gang.up, False
        self.orders.forget(gang)
        self._prepare(gang)
        gang.show(gang, reason)
        if was_up:
            self._shell.feed(
                WpgDown(at_us=now_us(), cause=CauseId(reason), wpg=gang.id, reason=reason)
            )

    def drop(self, deployments: Iterable[str]) -> None:
        """They are no more."""
        for gang in self._gangs.values():
            for deployment in deployments:
                gang.settled.pop(deployment, None)


def finished_by_all(said: list[list[tm.Done]], parts: int) -> list[tm.Done]:
    """Runs that ended on every part; what the first part says of them."""
    if len(said) < parts:
        return []
    ended = [{(done.call, done.part): done for done in each} for each in said]
    return [done for key, done in ended[0].items() if all(key in each for each in ended)]
