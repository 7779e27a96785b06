"""The daemon's view of its agents: who is there, what they have, and orders to them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import asdict

import msgspec

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, WpgId
from plexrl_slurm.core.messages import Granted, Room, WpgUp
from plexrl_slurm.daemons.agent_reports import AgentReports
from plexrl_slurm.daemons.agent_views import AgentView, WpgView
from plexrl_slurm.daemons.gang_hub import GangHub
from plexrl_slurm.daemons.gang_orders import GangOrders
from plexrl_slurm.daemons.image_stories import ImageStories
from plexrl_slurm.daemons.layout import HeldWpg, Place
from plexrl_slurm.daemons.order_post import OrderPost
from plexrl_slurm.daemons.shared_gpus import WOKEN
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.daemons.snapshot_places import SnapshotPlaces
from plexrl_slurm.logs import say
from plexrl_slurm.settings import Settings
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.links import AgentServer

log = logging.getLogger(__name__)


class AgentHub(AgentReports, OrderPost):
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
        self.snapshots = SnapshotPlaces(self._post, epoch=epoch, sampler_of=self._sampler_of)
        orders = GangOrders(
            shell,
            epoch=epoch,
            durable=str(settings.durable_dir),
            post=self._post,
            after_commit=after_commit,
            persist_ended=lambda name, progress: self._persist_ended(name, progress, ok=False),
            order_id=self.order_id,
        )
        orders.on_left = lambda done, node: self.on_left(done, node)
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
                self.snapshots.gone(address)
                self._post(address, tm.StopOrder(epoch=self._epoch))

    def forget_hold(self, hold: str, reason: str) -> None:
        """It has no nodes any more (it may get others)."""
        for place in [place for place in self._places if place.hold == hold]:
            self.forget_place(place, reason)

    def _refuse(self, address: bytes, agent: AgentView, reason: str) -> None:
        if not agent.refused:
            say(log, "agent_refused", agent=agent.name, pid=agent.pid, reason=reason)
        agent.refused = True
        self.snapshots.gone(address)
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
        self.snapshots.hello(address, hello)
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
                self.stories.durable(done.deployment, done.progress)
        finished, place = hello.finished, self.agents[address].place
        hello = self.gangs.take(address, place, hello)
        alone = [held.id for held in wpgs if self.gangs.get(held.id) is None]
        deployments, snapshots = await self._recover(hello, alone)
        for name, kept in self._shell.durable.items():
            self.stories.durable(name, kept.progress)
        for done in finished:
            self._acknowledge(address, done.number)
        for wpg in alone:
            self.wpgs[wpg].agent = address
        self.snapshots.fetch_again()
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
                        awake=gang.awake,
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
                    order=report.order,
                )
                self._acknowledge(address, report.number)
            case tm.Done(what="persist"):
                self._persist_done(address, report)
                self._acknowledge(address, report.number)
            case tm.Done(what="grant"):
                self._granted(report)
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
                    room=Room(report.room),
                )
                self._acknowledge(address, report.number)
            case tm.SnapshotHere():
                self.snapshots.here(address, report)
            case tm.Beat(stock=tm.Stock() as stock):
                agent = self.agents[address]
                agent.stock = stock
                self.stories.heard(agent.place.node, stock)
            case tm.Hello() | tm.Beat() | tm.PartReady():
                pass

    def _granted(self, report: tm.Done) -> None:
        view = self.wpgs.get(report.wpg)
        if not report.ok:
            say(log, "grant_refused", wpg=report.wpg, reason=report.error)
        if view is not None and report.ok:
            view.lost_wakes = 0
        elif view is not None and report.error.startswith(WOKEN):
            view.lost_wakes, view.reason = view.lost_wakes + 1, report.error
        self._shell.feed(
            Granted(
                at_us=now_us(),
                cause=CauseId(f"GPUs of {report.wpg}"),
                wpg=WpgId(report.wpg),
                number=report.part,
                ok=report.ok,
                awake=WpgId(report.awake),
                error=report.error,
            )
        )

    def _sampler_of(self, snapshot: str) -> bytes:
        """Agent of the WPG that will sample from it; "" if there is none."""
        wpg = self._shell.sampled_at(DeploymentId(snapshot))
        view = self.wpgs.get(wpg) if wpg is not None else None
        return view.agent if view is not None else b""

    def _acknowledge(self, address: bytes, number: int) -> None:
        self._after_commit(lambda: self._post(address, tm.Ack(number=number)))


async def _name_of(place: Place) -> str:
    return place.node
