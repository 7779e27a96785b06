"""What an agent does for its daemon: run, switch, save, persist. Each ends in a report, or, if
the gang was lost, in none: that the gang is down was said.
"""

import contextlib
from collections.abc import Awaitable, Callable, Collection

import msgspec

from plexrl_slurm import wire
from plexrl_slurm.core.errors import PlexError, StorageFull
from plexrl_slurm.core.messages import Room
from plexrl_slurm.daemons.gang import Gang, GangLost
from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.engines import ranklink
from plexrl_slurm.memory.refusals import WRITTEN, refused
from plexrl_slurm.transport import messages as tm


class Orders:
    """The WPGs of a node, what each has, and what runs there."""

    def __init__(
        self,
        tier: HostTier,
        *,
        report: Callable[[tm.Done], Awaitable[None]],
        published: Callable[[str, int], Awaitable[None]],
        number: Callable[[], int],
        tidy: Callable[[], None],
    ) -> None:
        """``published`` is told a snapshot and its bytes before its publish has ended; ``number``:
        of the next report; ``tidy``: something that was dropped may be back."""
        self.gangs: dict[str, Gang] = {}
        #: What is in the device memory of each WPG.
        self.resident: dict[str, str] = {}
        #: Of whom a tail runs on in the second engine of a rollout WPG, if it has not ended.
        self.beside: dict[str, str] = {}
        #: What has taken effect on the resident of each training WPG.
        self.progress: dict[str, tuple[int, int]] = {}
        #: ``order id -> (wpg, call, part)`` of runs whose report is not acknowledged.
        self.running: dict[str, tuple[str, str, int]] = {}
        self._tier, self._report, self._published = tier, report, published
        self._number, self._tidy = number, tidy

    def may_run(self, order: tm.RunOrder | tm.SwitchOrder | tm.SaveOrder) -> bool:
        """Whether the gang that it is for is the one that is up."""
        gang = self.gangs.get(order.wpg)
        return gang is not None and gang.state == "up" and gang.incarnation == order.incarnation

    def samples(self, order: tm.SwitchOrder) -> bool:
        """Whether it is for a rollout WPG, which can begin it."""
        return self.may_run(order) and not self.gangs[order.wpg].trains

    def dropped(self, order: tm.DropOrder) -> None:
        """Forget residents that are no more."""
        for known in (self.resident, self.beside):
            for wpg in [w for w, d in known.items() if d in order.deployments]:
                del known[wpg]

    def gang_changed(self, gang: Gang, *, finished: Collection[str]) -> None:
        """Its state is another; ``finished``: the orders whose reports are under way."""
        name = gang.config.name
        if gang.state != "up":
            was = self.resident.pop(name, None)
            if was is not None and gang.trains:
                self._tier.doubt(name, was)
            self.beside.pop(name, None)
        if gang.state == "down":
            for order, (wpg, _, _) in list(self.running.items()):
                if wpg == name and order not in finished:
                    del self.running[order]

    async def run(self, order: tm.RunOrder) -> None:
        """A call, or a part of one."""
        gang = self.gangs[order.wpg]
        path = str(self._tier.snapshots.path(order.publish)) if order.publish else ""
        if gang.trains and self.resident.get(order.wpg) != order.deployment:
            # It is created in the resident's place, of which nothing is certain from now on.
            self.resident.pop(order.wpg, None)
        operation = ranklink.Call(
            call=order.call, deployment=order.deployment, body=order.body, publish_path=path
        )
        try:
            answers = await gang.order(order.id, [operation] * gang.processes)
            if order.publish:
                answers = await self._made_safe(order, answers)
        except GangLost:
            self.running.pop(order.id, None)
            return
        finally:
            self._tier.snapshots.published_or_not(order.publish)
            self._tidy()
        if order.id not in self.running:
            return  # its gang was lost since, and it will be run again
        if gang.trains:
            self._took_effect(order, ok=all(answer.ok for answer in answers))
        done = self._done(order.id, order.wpg, "run", answers, order.call, order.part)
        if gang.config.number:  # the node of rank 0 tells it
            done = msgspec.structs.replace(done, result=b"")
        await self._report(done)

    async def _made_safe(
        self, order: tm.RunOrder, answers: list[ranklink.Answer]
    ) -> list[ranklink.Answer]:
        """A publish ends when the loss of this node would not lose the snapshot."""
        path, body = self._tier.snapshots.path(order.publish), wire.decode_body(order.body)
        durable = isinstance(body, wire.Publish) and body.path
        if durable or not all(answer.ok for answer in answers) or not path.exists():
            return answers
        await self._published(order.publish, path.stat().st_size)
        try:
            await self._tier.snapshots.made_safe(order.publish)
        except OSError as problem:
            self._tier.snapshots.drop(order.publish)
            said = refused(problem, path, WRITTEN)
            return [ranklink.Answer(order.id, False, error=str(said))]
        return answers

    def _took_effect(self, order: tm.RunOrder, *, ok: bool) -> None:
        """Note how far the device's state is; a failed call is passed without an effect."""
        if ok:
            self.resident[order.wpg] = order.deployment
        elif self.resident.get(order.wpg) != order.deployment:
            return
        last = not ok or order.part + 1 == order.parts
        self.progress[order.wpg] = (order.seq + 1, 0) if last else (order.seq, order.part + 1)

    async def not_switched(self, order: tm.SwitchOrder, reason: str) -> None:
        """It could not begin: what was there is there."""
        answer = ranklink.Answer(order.id, False, error=reason)
        await self._report(self._done(order.id, order.wpg, "switch", [answer]))

    async def switch(self, order: tm.SwitchOrder, path: str = "") -> None:
        """Another deployment or snapshot into the WPG; the resident's image out of it.

        ``path``: the file of a snapshot.
        """
        gang = self.gangs[order.wpg]
        if not gang.trains:
            operation = ranklink.Load(incoming=order.incoming, load_path=path, model=order.model)
            with contextlib.suppress(GangLost), self._tier.snapshots.reading(order.incoming):
                answers = await gang.order(order.id, [operation])
                self.beside[order.wpg] = order.beside
                if answers[0].ok:
                    self.resident[order.wpg] = order.incoming
                else:
                    self.resident.pop(order.wpg, None)
                await self._report(self._done(order.id, order.wpg, "switch", answers))
            return
        self._tier.returns(order.incoming)
        passage, left, full, error = None, None, False, f"no image of {order.incoming}"
        try:
            out = await self._measure(order.wpg, order.id, order.outgoing)
            passage = await self._tier.begin_switch(order, out=out)
            left = passage.left
        except PlexError as problem:
            error, full = str(problem), isinstance(problem, StorageFull)
        except GangLost:
            return
        if passage is None or passage.held is None:
            if left is not None and left.damaged:
                error += f": {'; '.join(left.damaged)}"
            answer = ranklink.Answer(order.id, False, error=error)
            await self._report_switch(order, [answer], left, Room.SHORT if full else Room.ENOUGH)
            return
        operations: list[ranklink.Operation] = [
            ranklink.Load(
                incoming=order.incoming,
                load_path=str(path),
                outgoing=order.outgoing,
                save_path=str(passage.saves[rank]) if passage.saves else "",
                progress=order.progress,
            )
            for rank, path in enumerate(passage.loads)
        ]
        ok = False
        try:
            answers = await gang.order(order.id, operations)
            ok = all(answer.ok for answer in answers)
        except GangLost:
            return
        finally:
            self._tier.end(passage, order.outgoing, order.progress, ok=ok)
        if ok:
            self.resident[order.wpg] = order.incoming
            self.progress[order.wpg] = passage.held.progress
        else:
            self.resident.pop(order.wpg, None)
        await self._report_switch(order, answers, left, _room(answers))

    async def _report_switch(
        self,
        order: tm.SwitchOrder,
        answers: list[ranklink.Answer],
        left: tm.ImagesLeft | None,
        room: Room,
    ) -> None:
        done = self._done(order.id, order.wpg, "switch", answers)
        await self._report(
            msgspec.structs.replace(done, deployment=order.incoming, left=left, room=str(room))
        )

    async def save(self, order: tm.SaveOrder) -> None:
        """An image of the resident, which stays."""
        gang = self.gangs[order.wpg]
        self._tier.returns(order.deployment)
        try:
            out = await self._measure(order.wpg, order.id, order.deployment)
            passage, ok = await self._tier.begin_save(order, out=out), False
        except GangLost:
            return
        except StorageFull as problem:
            answer = ranklink.Answer(order.id, False, error=str(problem))
            done = self._done(order.id, order.wpg, "save", [answer])
            await self._report(msgspec.structs.replace(done, room=str(Room.SHORT)))
            return
        operations: list[ranklink.Operation] = [
            ranklink.Save(order.deployment, str(path), order.progress) for path in passage.saves
        ]
        try:
            answers = await gang.order(order.id, operations)
            ok = all(answer.ok for answer in answers)
        except GangLost:
            return
        finally:
            self._tier.end(passage, order.deployment, order.progress, ok=ok)
        done = self._done(order.id, order.wpg, "save", answers)
        await self._report(msgspec.structs.replace(done, room=str(_room(answers))))

    async def _measure(self, wpg: str, order: str, deployment: str) -> int:
        """Bytes of the image that leaves or is saved next; 0: none. Raises ``GangLost``."""
        if not deployment:
            return 0
        gang = self.gangs[wpg]
        asked: list[ranklink.Operation] = [ranklink.Measure(deployment)]
        answers = await gang.order(f"measure {order}", asked * gang.processes)
        return sum(answer.slab_bytes for answer in answers)

    async def persist(self, order: tm.PersistOrder) -> None:
        """The newest image to the durable tier."""
        progress, ok, error, size, left = (0, 0), True, "", 0, None
        try:
            found = await self._tier.persist(order)
            if found.held is not None:
                progress, size = found.held.progress, found.held.bytes
            else:
                damaged = list(found.damaged)
                ok, error = False, "; ".join(damaged) or f"no image of {order.deployment}"
                # What it goes on from is the durable image.
                left = tm.ImagesLeft(image=order.known, durable=order.known, damaged=damaged)
        except (PlexError, KeyError, OSError) as problem:
            ok, error = False, str(problem)
        await self._report(
            tm.Done(
                number=self._number(),
                wpg=order.wpg,
                order=order.id,
                what="persist",
                ok=ok,
                deployment=order.deployment,
                progress=progress,
                error=error,
                moved_bytes=size,
                left=left,
            )
        )

    async def evict(self, order: tm.EvictOrder) -> None:
        """An image out of host memory."""
        ok, error, size = True, "", 0
        try:
            size = await self._tier.evict(order)
        except (PlexError, OSError) as problem:
            ok, error = False, str(problem)
        done = tm.Done(
            number=self._number(), wpg=order.wpg, order=order.id, what="evict", ok=ok,
            deployment=order.deployment, error=error, moved_bytes=size,
        )  # fmt: skip
        await self._report(done)

    def _done(
        self,
        order: str,
        wpg: str,
        what: str,
        answers: list[ranklink.Answer],
        call: str = "",
        part: int = 0,
    ) -> tm.Done:
        bad = next((answer for answer in answers if not answer.ok), None)
        return tm.Done(
            number=self._number(),
            wpg=wpg,
            order=order,
            what=what,
            ok=bad is None,
            call=call,
            part=part,
            result=answers[0].result,
            error=bad.error if bad is not None else "",
            moved_bytes=sum(answer.moved_bytes for answer in answers),
            started_us=min(answer.started_us for answer in answers),
            ended_us=max(answer.ended_us for answer in answers),
        )


def _room(answers: list[ranklink.Answer]) -> Room:
    return Room.LOST if any(answer.full for answer in answers) else Room.ENOUGH
