"""The daemon's view of its agents: who is there, what they have, and orders to them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import asdict

import msgspec

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, WpgId
from plexrl_slurm.core.messages import (
    Call,
    ImagesLeft,
    Persist,
    Run,
    SaveImage,
    Switch,
    WpgDown,
    WpgUp,
)
from plexrl_slurm.daemons.agent_views import AgentView, WpgView
from plexrl_slurm.daemons.gang_hub import GangHub
from plexrl_slurm.daemons.gang_orders import GangOrders
from plexrl_slurm.daemons.gang_view import Gang
from plexrl_slurm.daemons.image_stories import ImageStories
from plexrl_slurm.daemons.layout import HeldWpg, Place
from plexrl_slurm.daemons.orders import Durable, Weights
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.logs import say
from plexrl_slurm.settings import Settings
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.links import AgentServer

log = logging.getLogger(__name__)

#: A WPG that failed to start so often in a row will not.
NEVER = 4


class AgentHub:
    """Implements ``orders.Orders``."""

    def __init__(
        self,
        server: AgentServer,
        shell: Shell,
        *,
        epoch: int,
        settings: Settings,
        recover: Callable[[tm.Hello, Collection[WpgId]], Awaitable[tuple[list[str], list[str]]]],
        persisted: Callable[[tm.Done], None],
        after_commit: Callable[[Callable[[], None]], None],
        address_of: Callable[[Place], Awaitable[str]] | None = None,
    ) -> None:
        """``recover`` rebuilds the core's knowledge of what lives on some WPGs when their agent is
        first heard, and returns the deployments and snapshots of the partition that still exist;
        ``persisted`` writes down that an image is durable; ``after_commit`` runs a function when
        everything written so far is durable; ``address_of``: where other nodes reach one."""
        self.agents: dict[bytes, AgentView] = {}
        self.wpgs: dict[str, WpgView] = {}
        self._server, self._shell, self._epoch, self._settings = server, shell, epoch, settings
        self._recover, self._persisted, self._after_commit = recover, persisted, after_commit
        #: Called with the report of a switch or a persist that met damaged images, or found none,
        #: and its node.
        self.on_left: Callable[[tm.Done, str], None] = lambda _done, _node: None
        #: Called with a node and what failed there.
        self.on_fault: Callable[[str, str], None] = lambda _node, _reason: None
        #: Orders whose reports somebody waits for.
        self._asked: dict[str, asyncio.Future[tm.Done]] = {}
        self.stories = ImageStories()
        self._orders = 0
        #: Where agents are expected, and what they are to run.
        self._places: dict[Place, tuple[HeldWpg, ...]] = {}
        self._expected_us: dict[Place, int] = {}
        self._restarts: dict[str, int] = {}
        #: Holds that may still get their nodes: an agent of theirs may be earlier than the news.
        self._awaited: set[str] = set()
        #: Persists under way: ``deployment -> (address, progress)``.
        self._persisting: dict[str, tuple[bytes, tuple[int, int]]] = {}
        orders = GangOrders(
            shell,
            epoch=epoch,
            durable=str(settings.durable_dir),
            post=self._post,
            after_commit=after_commit,
            persist_ended=lambda name, progress: self._persist_ended(name, progress, ok=False),
            order_id=self.order_id,
        )
        #: WPGs that lie on several nodes.
        self.gangs = GangHub(
            shell,
            orders,
            epoch=epoch,
            post=self._post,
            recover=recover,
            address_of=address_of or _name_of,
        )

    # -- holds -------------------------------------------------------------------------------
    def await_hold(self, hold: str) -> None:
        """Agents of ``hold`` may come before :meth:`expect` says where."""
        self._awaited.add(hold)

    def expect(
        self, hold: str, wpgs: Iterable[HeldWpg], places: Iterable[Place], *, restarts: int = 0
    ) -> None:
        """The hold has these nodes: agents anywhere else in it are not wanted, nor those of a
        time before Slurm had requeued it so often."""
        self._awaited.discard(hold)
        self._restarts[hold] = restarts
        for place in places:
            self._places[place], self._expected_us[place] = (), now_us()
        for held in wpgs:
            for place in held.places:
                self._places[place] += (held,)
            self.wpgs[held.id] = WpgView(name=held.id, agent=b"", node=held.nodes)
            if len(held.places) > 1:
                self.gangs.expect(held, self._show)
        for address, agent in self.agents.items():
            if agent.place.hold == hold and not agent.welcome:
                self._post(address, tm.WhoAreYou(epoch=self._epoch))

    def forget_place(self, place: Place, reason: str) -> None:
        """The node is lost: whoever comes back from there is told to drop what it has."""
        self._expected_us.pop(place, None)
        for held in self._places.pop(place, ()):
            self.wpgs.pop(held.id, None)
            self.gangs.end(held.id)
            for other in set(held.places) & self._places.keys():
                self._places[other] = tuple(w for w in self._places[other] if w is not held)
        for address, agent in self.agents.items():
            if agent.place == place:
                self._refuse(address, agent, reason)

    def stop_hold(self, hold: str) -> None:
        """The hold is given back: its agents end."""
        self._awaited.discard(hold)
        for address, agent in self.agents.items():
            if agent.place.hold == hold:
                agent.refused = True
                self._post(address, tm.StopOrder(epoch=self._epoch))

    def forget_hold(self, hold: str, reason: str) -> None:
        """It has no nodes any more (it may get others)."""
        for place in [place for place in self._places if place.hold == hold]:
            self.forget_place(place, reason)

    def hopeless(self) -> list[tuple[Place, str]]:
        """Places with a WPG that does not start there, however often it is tried."""
        failing = [
            (place, held.id, view.failures)
            for place, wpgs in self._places.items()
            for held in wpgs
            if (view := self.wpgs.get(held.id)) is not None
        ]
        return [
            (place, f"WPG {wpg} does not start: {self.wpgs[wpg].reason}")
            for place, wpg, failures in (*failing, *self.gangs.failures())
            if failures >= NEVER
        ]

    def heard_us(self) -> dict[Place, int]:
        """When each agent was heard last."""
        return {
            agent.place: agent.heard_us
            for agent in self.agents.values()
            if agent.place in self._places and not agent.refused
        }

    def unheard_us(self) -> dict[Place, int]:
        """Since when each agent is awaited that has not said a word."""
        heard = {agent.place for agent in self.agents.values()}
        return {place: at for place, at in self._expected_us.items() if place not in heard}

    def _refuse(self, address: bytes, agent: AgentView, reason: str) -> None:
        if not agent.refused:
            say(log, "agent_refused", agent=agent.name, pid=agent.pid, reason=reason)
        agent.refused = True
        for deployment, (where, progress) in list(self._persisting.items()):
            if where == address:
                self._persist_ended(deployment, progress, ok=False)
        self._post(address, self._stop_order())

    def _stop_order(self) -> tm.StopOrder:
        """For an agent whose hold is not given back by us: without Slurm the next one takes over
        its folders."""
        return tm.StopOrder(epoch=self._epoch, keep_host=self._settings.backend == "local")

    async def listen(self) -> None:
        """Hear the agents for ever."""
        while True:
            try:
                address, report = await self._server.receive()
            except msgspec.DecodeError as problem:  # an agent of another version
                say(log, "report_unreadable", reason=problem)
                continue
            agent = self.agents.get(address)
            if isinstance(report, tm.Hello):
                await self._hello(address, report)
            elif isinstance(report, tm.PartReady) and agent is not None and not agent.refused:
                await self.gangs.ready(address, report)
            elif agent is None or (isinstance(report, tm.Beat) and report.epoch != agent.epoch):
                await self._server.send(address, tm.WhoAreYou(epoch=self._epoch))
            elif agent.refused:
                await self._server.send(address, self._stop_order())
            else:
                agent.heard_us = now_us()
                if agent.welcome:
                    self._heard(address, report)

    # -- reports -----------------------------------------------------------------------------
    async def _hello(self, address: bytes, hello: tm.Hello) -> None:
        place = Place(hold=hello.hold, component=hello.component, node=hello.node)
        known = self.agents.get(address)
        agent = AgentView(
            name=hello.agent,
            place=place,
            epoch=hello.epoch,
            pid=hello.pid,
            heard_us=now_us(),
        )
        if known is not None and known.epoch == hello.epoch and known.refused:
            # It was declared lost; what it has is another's since.
            say(log, "agent_came_back_and_is_stopped", agent=hello.agent, pid=hello.pid)
            await self._server.send(address, self._stop_order())
            return
        self.agents[address] = agent
        if place not in self._places:
            if hello.hold in self._awaited:
                return  # it is asked again when the hold is known to run
            self._refuse(address, agent, "it is of no node that is held")
            return
        if hello.restarts < self._restarts[hello.hold]:
            self._refuse(address, agent, "it is of a time before Slurm requeued its hold")
            return
        agent.welcome = True
        if known is not None and known.epoch == hello.epoch and known.welcome:
            for done in hello.finished:
                self._heard(address, done)
            return
        say(log, "agent_hello", agent=hello.agent, epoch=hello.epoch, pid=hello.pid)
        if known is not None:
            self._started_again(address)
        await self._welcome(address, hello, self._places[place])

    def _started_again(self, address: bytes) -> None:
        """An agent that was known is another process now."""
        for deployment, (where, progress) in list(self._persisting.items()):
            if where == address:
                self._persist_ended(deployment, progress, ok=False)
        for view in self.wpgs.values():
            if view.agent == address:
                # The new agent counts the starts of its gangs anew.
                view.incarnation = 0
                if view.state != "down":
                    self._down(view, "its agent was started again")
        self.gangs.lost(address, "its agent was started again")

    async def _welcome(self, address: bytes, hello: tm.Hello, wpgs: tuple[HeldWpg, ...]) -> None:
        for done in hello.finished:
            if done.what == "persist" and done.ok:
                self._persisted(done)
        finished, place = hello.finished, self.agents[address].place
        hello = self.gangs.take(address, place, hello)
        alone = [held.id for held in wpgs if self.gangs.get(held.id) is None]
        deployments, snapshots = await self._recover(hello, alone)
        for done in finished:
            self._acknowledge(address, done.number)
        for wpg in alone:
            self.wpgs[wpg].agent = address
        for gang in hello.wpgs:
            view = self.wpgs.get(gang.name)
            if view is None or view.agent != address:
                continue
            view.state, view.incarnation, view.pids = gang.state, gang.incarnation, gang.pids
            if gang.state == "up":
                running = tuple((CallId(call), part) for call, part in gang.running)
                self._shell.feed(
                    WpgUp(
                        at_us=now_us(),
                        cause=CauseId(f"hello of {hello.agent}"),
                        wpg=WpgId(gang.name),
                        resident=DeploymentId(gang.resident) if gang.resident else None,
                        progress=gang.progress if gang.resident else None,
                        running=running,
                    )
                )
        await self._server.send(
            address,
            tm.Welcome(
                epoch=self._epoch,
                wpgs=[held.config(held.places.index(place)) for held in wpgs],
                models={name: asdict(model) for name, model in self._settings.models.items()},
                deployments=deployments,
                snapshots=snapshots,
            ),
        )
        await self.gangs.welcomed(address)

    def ask(
        self, address: bytes, order: tm.PersistOrder | tm.EvictOrder
    ) -> "asyncio.Future[tm.Done]":
        """Its report, which nobody else hears."""
        self._asked[order.id] = asyncio.get_running_loop().create_future()
        self._post(address, order)
        return self._asked[order.id]

    def _heard(self, address: bytes, report: tm.Report) -> None:
        if isinstance(report, tm.Done) and (asked := self._asked.pop(report.order, None)):
            self._acknowledge(address, report.number)
            if not asked.done():
                asked.set_result(report)
            return
        match report:
            case tm.WpgChanged():
                self.gangs.changed(address, report)
                self._changed(address, report)
                self._acknowledge(address, report.number)
            case tm.Done() if report.what != "persist" and self.gangs.done(address, report):
                pass
            case tm.Done(what="run"):
                self._shell.run_ended(
                    WpgId(report.wpg),
                    CallId(report.call),
                    report.part,
                    ok=report.ok,
                    result=report.result,
                    error=report.error,
                )
                self._acknowledge(address, report.number)
            case tm.Done(what="persist"):
                self._persist_done(address, report)
                self._acknowledge(address, report.number)
            case tm.Done():
                if not report.ok:
                    say(log, "switch_failed", wpg=report.wpg, reason=report.error)
                    if (view := self.wpgs.get(report.wpg)) is not None:
                        view.reason = report.error
                left = self._left(report)
                damaged = "; ".join(report.left.damaged) if report.left is not None else ""
                self._shell.switch_ended(
                    WpgId(report.wpg),
                    ok=report.ok,
                    moved_bytes=report.moved_bytes,
                    error=report.error or damaged,
                    left=left,
                )
                self._acknowledge(address, report.number)
            case tm.Beat(stock=tm.Stock() as stock):
                agent = self.agents[address]
                agent.stock = stock
                self.stories.heard(agent.place.node, stock)
            case tm.Hello() | tm.Beat() | tm.PartReady():
                pass

    def _left(self, report: tm.Done) -> ImagesLeft | None:
        """What an agent says of images that are not what the core believes."""
        if report.left is None:
            return None
        view = self.wpgs.get(report.wpg)
        if report.left.damaged or report.left.image is None:
            self.on_left(report, view.node if view is not None else "")
        return ImagesLeft(image=report.left.image, durable=report.left.durable)

    def _changed(self, address: bytes, report: tm.WpgChanged) -> None:
        view = self.wpgs.get(report.name)
        if view is None or view.agent != address or report.incarnation < view.incarnation:
            return
        view.incarnation, view.pids, view.reason = report.incarnation, report.pids, report.reason
        say(log, "wpg", name=report.name, state=report.state, reason=report.reason)
        if report.state == "up" and view.state != "up":
            view.state, view.failures = "up", 0
            self._shell.feed(
                WpgUp(at_us=now_us(), cause=CauseId("gang is up"), wpg=WpgId(report.name))
            )
        elif report.state == "down":
            # Without a start there never was a gang: its GPUs are not there.
            view.failures += NEVER if report.incarnation == 0 else view.state != "up"
            self._down(view, report.reason)
        else:
            view.state = report.state

    def _down(self, view: WpgView, reason: str) -> None:
        was_up, view.state, view.reason = view.state == "up", "down", reason
        if was_up:
            self._shell.feed(
                WpgDown(at_us=now_us(), cause=CauseId(reason), wpg=WpgId(view.name), reason=reason)
            )

    def _show(self, gang: Gang, reason: str) -> None:
        """For people."""
        view = self.wpgs[gang.id]
        states = {part.state for part in gang.parts}
        view.state = "up" if gang.up else "down" if states == {"down"} else "starting"
        view.incarnation, view.reason = gang.incarnation, reason or view.reason
        view.pids = [pid for part in gang.parts for pid in part.pids]
        if gang.up:
            view.reason = reason

    def _persist_done(self, address: bytes, done: tm.Done) -> None:
        where, asked = self._persisting.get(done.deployment, (b"", (0, 0)))
        if where != address:
            return  # nobody asked it, or not since the deployment came back to it
        if done.ok:
            self._persisted(done)
            after = self._persist_ended
            self._after_commit(lambda: after(done.deployment, done.progress, ok=True))
        else:
            say(log, "persist_failed", deployment=done.deployment, reason=done.error)
            self._persist_ended(done.deployment, asked, ok=False, left=self._left(done))

    def _persist_ended(
        self,
        deployment: str,
        progress: tuple[int, int],
        *,
        ok: bool,
        left: ImagesLeft | None = None,
    ) -> None:
        if self._persisting.pop(deployment, None) is not None:
            self._shell.persisted(DeploymentId(deployment), progress, ok=ok, left=left)

    def _acknowledge(self, address: bytes, number: int) -> None:
        self._after_commit(lambda: self._post(address, tm.Ack(number=number)))

    # -- orders ------------------------------------------------------------------------------
    def switch(self, step: Switch, weights: Weights | None, durable: Durable | None) -> None:
        view = self.wpgs[step.wpg]
        if (gang := self.gangs.get(step.wpg)) is not None:
            self.gangs.orders.switch(gang, step, durable)
            return
        self._post(
            view.agent,
            tm.SwitchOrder(
                epoch=self._epoch,
                id=self.order_id(),
                wpg=step.wpg,
                incarnation=view.incarnation,
                incoming=step.incoming,
                outgoing=step.outgoing or "",
                progress=step.outgoing_progress,
                snapshot_path=weights.path if weights else "",
                model=weights.model if weights else "",
                durable_path=durable.path if durable else "",
                durable_progress=durable.progress if durable else (0, 0),
            ),
        )

    def save(self, step: SaveImage) -> None:
        view = self.wpgs[step.wpg]
        if (gang := self.gangs.get(step.wpg)) is not None:
            self.gangs.orders.save(gang, step)
            return
        self._post(
            view.agent,
            tm.SaveOrder(
                epoch=self._epoch,
                id=self.order_id(),
                wpg=step.wpg,
                incarnation=view.incarnation,
                deployment=step.deployment,
                progress=step.progress,
            ),
        )

    def persist(self, step: Persist, known: Durable | None) -> None:
        view, gang = self.wpgs.get(step.wpg), self.gangs.get(step.wpg)
        if gang is not None:
            if self.gangs.orders.persist(gang, step, known.progress if known else None):
                self._persisting[step.deployment] = (gang.parts[0].address, step.progress)
            else:
                self._shell.persist_later(step)
            return
        if view is None or not view.agent:
            # Its agent has not said hello since it was last lost.
            self._shell.persist_later(step)
            return
        self._persisting[step.deployment] = (view.agent, step.progress)
        self._post(
            view.agent,
            tm.PersistOrder(
                epoch=self._epoch,
                id=self.order_id(),
                wpg=step.wpg,
                deployment=step.deployment,
                folder=str(self._settings.durable_dir),
                known=known.progress if known else None,
            ),
        )

    def run(self, step: Run, call: Call, body: bytes, publish: str) -> None:
        view, gang = self.wpgs[step.wpg], self.gangs.get(step.wpg)
        order = tm.RunOrder(
            epoch=self._epoch,
            id=self.order_id(),
            wpg=step.wpg,
            incarnation=view.incarnation if gang is None else gang.incarnation,
            call=step.call,
            part=step.part,
            deployment=step.deployment,
            seq=call.seq,
            parts=call.parts,
            body=body,
            publish=publish,
        )
        if gang is None:
            self._post(view.agent, order)
        else:
            self.gangs.orders.run(gang, order)

    def abort(self, wpg: WpgId, call: CallId) -> None:
        for address in self._agents_of(wpg):
            self._post(address, tm.AbortOrder(epoch=self._epoch, wpg=wpg, call=call))

    def _agents_of(self, wpg: str) -> list[bytes]:
        """Those that have said hello."""
        view = self.wpgs.get(wpg)
        alone = [view.agent] if view is not None and view.agent else []
        return self.gangs.addresses(wpg) or alone

    def drop(self, *, deployments: list[str], snapshots: list[str]) -> None:
        """Tell every agent to delete what nobody needs any more."""
        order = tm.DropOrder(epoch=self._epoch, deployments=deployments, snapshots=snapshots)
        self.gangs.drop(deployments)
        for deployment in deployments:
            self.stories.forget(deployment)
        for address in self.agents:
            self._post(address, order)

    def drop_at(self, wpg: WpgId, *, deployments: list[str]) -> None:
        """They have left this WPG: its agent's images of them are garbage."""
        addresses = self._agents_of(wpg)
        if self.gangs.get(wpg) is not None:
            self.gangs.drop(deployments)
        order = tm.DropOrder(epoch=self._epoch, deployments=deployments, snapshots=[])
        for address in addresses:
            self._post(address, order)
        for deployment in deployments:
            if self._persisting.get(deployment, (b"",))[0] in addresses:
                del self._persisting[deployment]  # the core has forgotten it with the move

    def order_id(self) -> str:
        """Of the next order."""
        self._orders += 1
        return f"{self._epoch}.{self._orders}"

    def _post(self, address: bytes, command: tm.Command) -> None:
        # Without a task of its own: the link's queue has no limit, so this never waits.
        self._server.post(address, command)


async def _name_of(place: Place) -> str:
    return place.node
