"""Orders to all parts of a WPG on several nodes; each ends when every part has answered.

Images are written in two phases. Every part writes its share beside the older image; when all have,
they are told that the new one counts (``SettleOrder``), and only then the older one's slots are
free. Whatever dies between, there is an image that every node has.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from plexrl_slurm.core.ids import CallId
from plexrl_slurm.core.messages import ImagesLeft, Persist, Room, SaveImage, Switch
from plexrl_slurm.daemons.fallback import Kept
from plexrl_slurm.daemons.gang_candidates import Candidates
from plexrl_slurm.daemons.gang_facts import Position
from plexrl_slurm.daemons.gang_view import Asked, Gang, Part
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.logs import say
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

#: When a switch or a save has failed on one part, the others have so long to end theirs.
PATIENCE_S = 60.0


class GangOrders:
    """Of :class:`GangHub`: what goes to the agents and comes back."""

    def __init__(
        self,
        shell: Shell,
        *,
        epoch: int,
        durable: str,
        post: Callable[[bytes, tm.Command], None],
        after_commit: Callable[[Callable[[], None]], None],
        persist_ended: Callable[[str, Position], None],
        order_id: Callable[[], str],
    ) -> None:
        """``durable``: the durable tier; ``persist_ended``: a copy to it failed; the rest as in
        :class:`AgentHub`."""
        self._shell, self._epoch, self._durable = shell, epoch, durable
        self._post, self._after_commit = post, after_commit
        self._persist_ended, self._order_id = persist_ended, order_id
        #: Starts a gang anew; of the :class:`GangHub`.
        self.restart: Callable[[Gang, str], None] = lambda _gang, _reason: None
        #: Told that newer images of a deployment are damaged; see :class:`AgentHub`.
        self.on_left: Callable[[tm.Done, str], None] = lambda _done, _node: None

    def run(self, gang: Gang, order: tm.RunOrder) -> None:
        """One part of a call, on all ranks."""
        self.await_run(gang, order.call, order.part)
        for part in gang.parts:
            self._post(part.address, order)

    def await_run(self, gang: Gang, call: str, number: int) -> Asked:
        def ended(answers: list[tm.Done]) -> None:
            bad = _first_bad(answers)
            self._shell.run_ended(
                gang.id,
                CallId(call),
                number,
                ok=bad is None,
                result=answers[0].result,
                error=bad.error if bad is not None else "",
            )

        asked = gang.asked[_run(call, number)] = Asked(ended)
        return asked

    def switch(self, gang: Gang, step: Switch, durable: Durable | None) -> None:
        """First every node has the incoming's image; only then the ranks begin, for one of them
        that does not would keep the others waiting."""
        kept = None
        if durable is not None:
            kept = Kept(progress=durable.progress, folder=Path(durable.path))
        self._fetch(gang, step, Candidates(image=gang.settled.get(step.incoming), kept=kept))

    def _fetch(self, gang: Gang, step: Switch, images: Candidates) -> None:
        wanted = images.best
        if wanted is None:
            why = "; ".join([f"no image of {step.incoming}", *images.damaged])
            self._failed(gang, why, self._left(gang, step, images))
            return

        def fetched(answers: list[tm.Done]) -> None:
            if (problems := _damaged(answers, gang)) and (error := _without(images, problems)):
                self._failed(gang, error)
            elif problems:
                self.settle(gang, {step.incoming: images.image})
                self._fetch(gang, step, images)
            elif (bad := _first_bad(answers)) is not None:
                left = self._left(gang, step, images) if images.damaged else None
                self._failed(gang, bad.error, left, Room(bad.room))
            else:
                self.settle(gang, {step.incoming: wanted})
                self._ask(gang, order, switched)

        def order(name: str) -> tm.Command:
            return tm.SwitchOrder(
                epoch=self._epoch,
                id=name,
                wpg=gang.id,
                incarnation=gang.incarnation,
                incoming=step.incoming,
                outgoing=step.outgoing or "",
                progress=step.outgoing_progress,
                image=wanted,
            )

        def switched(answers: list[tm.Done]) -> None:
            left = self._left(gang, step, images) if images.damaged else None
            self._image_ended(gang, step.outgoing, step.outgoing_progress, answers, left)

        def fetch(name: str) -> tm.Command:
            return tm.FetchOrder(
                epoch=self._epoch,
                id=name,
                wpg=gang.id,
                deployment=step.incoming,
                image=wanted,
                durable_path=images.path,
            )

        self._ask(gang, fetch, fetched)

    def save(self, gang: Gang, step: SaveImage) -> None:
        """An image of the resident, on all nodes or none."""

        def order(name: str) -> tm.Command:
            return tm.SaveOrder(
                epoch=self._epoch,
                id=name,
                wpg=gang.id,
                incarnation=gang.incarnation,
                deployment=step.deployment,
                progress=step.progress,
            )

        self._ask(gang, order, lambda a: self._image_ended(gang, step.deployment, step.progress, a))

    def _image_ended(
        self,
        gang: Gang,
        deployment: str | None,
        progress: Position,
        answers: list[tm.Done],
        left: ImagesLeft | None = None,
    ) -> None:
        """The second phase of a save: every node has the new image, or the older one counts."""
        bad = _first_bad(answers)
        if deployment is not None:
            image = progress if bad is None else gang.settled.get(deployment)
            self.settle(gang, {deployment: image})
        if bad is not None:
            # On some node the ranks may have begun.
            room = Room.LOST if any(done.room for done in answers) else Room.ENOUGH
            self._failed(gang, bad.error, left, room)
            return
        moved = sum(done.moved_bytes for done in answers)
        self._shell.switch_ended(gang.id, ok=True, moved_bytes=moved, left=left)

    def _left(self, gang: Gang, step: Switch, images: Candidates) -> ImagesLeft:
        """What the core and the database are told of the incoming."""
        self.on_left(images.report(gang.id, step.incoming), gang.held.nodes)
        return images.left

    def _failed(
        self,
        gang: Gang,
        error: str,
        left: ImagesLeft | None = None,
        room: Room = Room.ENOUGH,
    ) -> None:
        say(log, "switch_failed", wpg=gang.id, reason=error)
        gang.show(gang, error)
        self._shell.switch_ended(
            gang.id, ok=False, moved_bytes=0, error=error, left=left, room=room
        )

    def settle(self, gang: Gang, images: dict[str, Position | None]) -> None:
        for deployment, progress in images.items():
            if progress is None:
                gang.settled.pop(deployment, None)
            else:
                gang.settled[deployment] = progress
        order = tm.SettleOrder(epoch=self._epoch, wpg=gang.id, images=images)
        for part in gang.parts:
            if images and part.address:
                self._post(part.address, order)

    def persist(self, gang: Gang, step: Persist, known: Position | None) -> bool:
        """Every node copies its share, then one makes the durable image whole. False: there is
        no image, or an agent that has not said hello."""
        image = gang.settled.get(step.deployment)
        if image is None or not all(part.address for part in gang.parts):
            return False
        order = tm.PersistOrder(
            epoch=self._epoch,
            id=self._order_id(),
            wpg=gang.id,
            deployment=step.deployment,
            folder=self._durable,
            image=image,
            share=self._order_id(),
        )

        def written(answers: list[tm.Done]) -> None:
            if (bad := _first_bad(answers)) is not None:
                say(log, "persist_failed", deployment=step.deployment, reason=bad.error)
                self._persist_ended(step.deployment, step.progress)
                return
            shares = [done.result for done in answers]
            last = msgspec.structs.replace(order, id=self._order_id(), known=known, shares=shares)
            self._post(gang.parts[0].address, last)

        gang.copies[order.id] = Asked(written), step
        for part in gang.parts:
            self._post(part.address, order)
        return True

    def _ask(
        self,
        gang: Gang,
        order: Callable[[str], tm.Command],
        then: Callable[[list[tm.Done]], None],
    ) -> None:
        name = self._order_id()
        gang.asked[name] = Asked(then)
        for part in gang.parts:
            self._post(part.address, order(name))

    def done(self, gang: Gang, part: Part, report: tm.Done) -> None:
        """A part has answered an order."""
        key = _run(report.call, report.part) if report.what == "run" else report.order
        asked = gang.copies[key][0] if key in gang.copies else gang.asked.get(key)
        if asked is None:
            if part.said is not None and report.what == "run":
                part.said.ended(report)  # not every part has been heard yet
            self._post_ack(part.address, report)
            return
        asked.answers[gang.parts.index(part)] = report
        if len(asked.answers) < len(gang.parts):
            if not report.ok and report.what in ("switch", "save"):
                loop = asyncio.get_running_loop()
                loop.call_later(PATIENCE_S, self._give_up, gang, key, asked, report.error)
            return
        gang.asked.pop(key, None)
        gang.copies.pop(key, None)
        asked.then([asked.answers[index] for index in range(len(gang.parts))])
        self._acknowledge(gang, asked)

    def _give_up(self, gang: Gang, key: str, asked: Asked, error: str) -> None:
        """The ranks of another part wait for those of the one that has failed."""
        if gang.asked.get(key) is asked:
            self.restart(gang, f"an image failed on one of its nodes only: {error}")

    def lose_copies(self, gang: Gang) -> None:
        """An agent that wrote its share of them is gone."""
        for order, (asked, step) in list(gang.copies.items()):
            del gang.copies[order]
            self._acknowledge(gang, asked)
            self._persist_ended(step.deployment, step.progress)

    def forget(self, gang: Gang) -> None:
        """Nobody waits for them: the gang is down."""
        for asked in gang.asked.values():
            self._acknowledge(gang, asked)
        gang.asked.clear()

    def _acknowledge(self, gang: Gang, asked: Asked) -> None:
        for index, report in asked.answers.items():
            if gang.parts[index].address:
                self._post_ack(gang.parts[index].address, report)

    def _post_ack(self, address: bytes, report: tm.Done | tm.WpgChanged) -> None:
        post = self._post
        self._after_commit(lambda: post(address, tm.Ack(number=report.number)))


def _first_bad(answers: list[tm.Done]) -> tm.Done | None:
    return next((done for done in answers if not done.ok), None)


def _damaged(answers: list[tm.Done], gang: Gang) -> list[str]:
    """What is wrong with the shares of nodes, a sentence each."""
    return [
        f"{part.place.node}: {done.error}"
        for part, done in zip(gang.parts, answers, strict=True)
        if not done.ok and done.left is not None
    ]


def _without(images: Candidates, problems: list[str]) -> str:
    """Why the damaged image could not be set aside; "" if it was."""
    try:
        images.without_best(problems)
    except OSError as error:
        return f"{problems[0]}; it cannot be set aside ({error.strerror})"
    return ""


def _run(call: str, number: int) -> str:
    return f"run {call} {number}"
