"""The daemon's view of its agents: who is there, what they have, and orders to them."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, WpgId
from plexrl_slurm.core.messages import Call, Run, SaveImage, Switch, WpgDown, WpgUp
from plexrl_slurm.daemons.shell import Shell, Weights
from plexrl_slurm.logs import say
from plexrl_slurm.settings import Settings
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.links import AgentServer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WpgView:
    """A WPG as its agent last described it."""

    name: str
    agent: bytes
    state: str = "starting"
    reason: str = ""
    incarnation: int = 0
    pids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class AgentView:
    """An agent that said hello."""

    name: str
    hold: str
    node: str
    epoch: int
    pid: int
    heard_us: int


class AgentHub:
    """Implements ``shell.Orders``."""

    def __init__(
        self,
        server: AgentServer,
        shell: Shell,
        *,
        epoch: int,
        settings: Settings,
        hold: str,
        configs: Mapping[str, tm.WpgConfig],
        recover: Callable[[tm.Hello], Awaitable[tuple[list[str], list[str]]]],
        after_commit: Callable[[Callable[[], None]], None],
    ) -> None:
        """``recover`` rebuilds the core's knowledge when an agent is first heard, and returns
        the deployments and snapshots that still exist; ``after_commit`` runs a function when
        everything written so far is durable."""
        self.agents: dict[bytes, AgentView] = {}
        self.wpgs: dict[str, WpgView] = {}
        self._server, self._shell, self._epoch, self._settings = server, shell, epoch, settings
        self._hold, self._configs = hold, configs
        self._recover, self._after_commit = recover, after_commit
        self._orders = 0

    async def listen(self) -> None:
        """Hear the agents for ever."""
        while True:
            address, report = await self._server.receive()
            agent = self.agents.get(address)
            if isinstance(report, tm.Hello):
                await self._hello(address, report)
            elif agent is None or (isinstance(report, tm.Beat) and report.epoch != agent.epoch):
                await self._server.send(address, tm.WhoAreYou(epoch=self._epoch))
            else:
                agent.heard_us = now_us()
                self._heard(address, report)

    # -- reports -----------------------------------------------------------------------------
    async def _hello(self, address: bytes, hello: tm.Hello) -> None:
        if hello.hold != self._hold:
            # Of a hold that was given up, or whose submission this daemon's forerunner forgot.
            say(log, "foreign_agent_stopped", agent=hello.agent, hold=hello.hold, pid=hello.pid)
            await self._server.send(address, tm.StopOrder(epoch=self._epoch, keep_host=True))
            return
        known = self.agents.get(address)
        say(log, "agent_hello", agent=hello.agent, epoch=hello.epoch, pid=hello.pid)
        self.agents[address] = AgentView(
            name=hello.agent,
            hold=hello.hold,
            node=hello.node,
            epoch=hello.epoch,
            pid=hello.pid,
            heard_us=now_us(),
        )
        if known is not None and known.epoch == hello.epoch:
            for done in hello.finished:
                self._heard(address, done)
            return
        if known is not None:
            for view in self.wpgs.values():
                if view.agent == address:
                    # The new agent counts the starts of its gangs anew.
                    view.incarnation = 0
                    if view.state != "down":
                        self._down(view, "its agent was started again")
        deployments, snapshots = await self._recover(hello)
        for done in hello.finished:
            self._acknowledge(address, done.number)
        for name in self._configs:
            self.wpgs.setdefault(name, WpgView(name=name, agent=address)).agent = address
        for held in hello.wpgs:
            view = self.wpgs.setdefault(held.name, WpgView(name=held.name, agent=address))
            view.state, view.incarnation, view.pids = held.state, held.incarnation, held.pids
            if held.state == "up":
                running = tuple((CallId(call), part) for call, part in held.running)
                self._shell.feed(
                    WpgUp(
                        at_us=now_us(),
                        cause=CauseId(f"hello of {hello.agent}"),
                        wpg=WpgId(held.name),
                        resident=DeploymentId(held.resident) if held.resident else None,
                        progress=held.progress if held.resident else None,
                        running=running,
                    )
                )
        await self._server.send(
            address,
            tm.Welcome(
                epoch=self._epoch,
                wpgs=list(self._configs.values()),
                models={name: asdict(model) for name, model in self._settings.models.items()},
                deployments=deployments,
                snapshots=snapshots,
            ),
        )

    def _heard(self, address: bytes, report: tm.Report) -> None:
        match report:
            case tm.WpgChanged():
                self._changed(address, report)
                self._acknowledge(address, report.number)
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
            case tm.Done():
                if not report.ok:
                    say(log, "switch_failed", wpg=report.wpg, reason=report.error)
                    if (view := self.wpgs.get(report.wpg)) is not None:
                        view.reason = report.error
                self._shell.switch_ended(
                    WpgId(report.wpg), ok=report.ok, moved_bytes=report.moved_bytes
                )
                self._acknowledge(address, report.number)
            case tm.Hello() | tm.Beat():
                pass

    def _changed(self, address: bytes, report: tm.WpgChanged) -> None:
        view = self.wpgs.setdefault(report.name, WpgView(name=report.name, agent=address))
        if report.incarnation < view.incarnation:
            return
        view.incarnation, view.pids, view.reason = report.incarnation, report.pids, report.reason
        say(log, "wpg", name=report.name, state=report.state, reason=report.reason)
        if report.state == "up" and view.state != "up":
            view.state = "up"
            self._shell.feed(
                WpgUp(at_us=now_us(), cause=CauseId("gang is up"), wpg=WpgId(report.name))
            )
        elif report.state == "down":
            self._down(view, report.reason)
        else:
            view.state = report.state

    def _down(self, view: WpgView, reason: str) -> None:
        was_up, view.state, view.reason = view.state == "up", "down", reason
        if was_up:
            self._shell.feed(
                WpgDown(at_us=now_us(), cause=CauseId(reason), wpg=WpgId(view.name), reason=reason)
            )

    def _acknowledge(self, address: bytes, number: int) -> None:
        self._after_commit(lambda: self._post(address, tm.Ack(number=number)))

    # -- orders ------------------------------------------------------------------------------
    def switch(self, step: Switch, weights: Weights | None) -> None:
        view = self.wpgs[step.wpg]
        self._post(
            view.agent,
            tm.SwitchOrder(
                epoch=self._epoch,
                id=self._order_id(),
                wpg=step.wpg,
                incarnation=view.incarnation,
                incoming=step.incoming,
                outgoing=step.outgoing or "",
                progress=step.outgoing_progress,
                snapshot_path=weights.path if weights else "",
                model=weights.model if weights else "",
            ),
        )

    def save(self, step: SaveImage) -> None:
        view = self.wpgs[step.wpg]
        self._post(
            view.agent,
            tm.SaveOrder(
                epoch=self._epoch,
                id=self._order_id(),
                wpg=step.wpg,
                incarnation=view.incarnation,
                deployment=step.deployment,
                progress=step.progress,
            ),
        )

    def run(self, step: Run, call: Call, body: bytes, publish: str) -> None:
        view = self.wpgs[step.wpg]
        self._post(
            view.agent,
            tm.RunOrder(
                epoch=self._epoch,
                id=self._order_id(),
                wpg=step.wpg,
                incarnation=view.incarnation,
                call=step.call,
                part=step.part,
                deployment=step.deployment,
                seq=call.seq,
                parts=call.parts,
                body=body,
                publish=publish,
            ),
        )

    def abort(self, wpg: WpgId, call: CallId) -> None:
        view = self.wpgs.get(wpg)
        if view is not None:
            self._post(view.agent, tm.AbortOrder(epoch=self._epoch, wpg=wpg, call=call))

    def drop(self, *, deployments: list[str], snapshots: list[str]) -> None:
        """Tell every agent to delete what nobody needs any more."""
        order = tm.DropOrder(epoch=self._epoch, deployments=deployments, snapshots=snapshots)
        for address in self.agents:
            self._post(address, order)

    def stop_agents(self) -> None:
        """The hold is given back."""
        for address in self.agents:
            self._post(address, tm.StopOrder(epoch=self._epoch))

    def _order_id(self) -> str:
        self._orders += 1
        return f"{self._epoch}.{self._orders}"

    def _post(self, address: bytes, command: tm.Command) -> None:
        # Without a task of its own: the link's queue has no limit, so this never waits.
        self._server.post(address, command)


def configs_of(settings: Settings) -> dict[str, tm.WpgConfig]:
    """The WPGs that the configuration asks for, by name."""
    configs: dict[str, tm.WpgConfig] = {}
    counts: dict[str, int] = {}
    for table in settings.wpgs:
        for index in range(table.count):
            number = counts.get(table.pool, 0)
            counts[table.pool] = number + 1
            name = f"{table.pool}-{number}"
            cores: tuple[int, ...] = table.cores[index] if index < len(table.cores) else ()
            options: dict[str, Any] = dict(table.options)
            configs[name] = tm.WpgConfig(
                name=name,
                engine=table.engine,
                world=table.gpus,
                gpus=table.gpus,
                options=options,
                cores=list(cores),
            )
    return configs
