"""``plexrl-agentd``: the one agent of a held node.

Starts, watches and restarts the ranks of the node's WPGs; owns the host tier; outlives any end
of the daemon and tells the next one what it has. Started, and respawned, by the hold's batch
script; exits 0 only when it is told that the hold is given back.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from plexrl_slurm import logs
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.daemons import agent_private
from plexrl_slurm.daemons.agent_config import AgentConfig, devices_of, visible_gpus
from plexrl_slurm.daemons.agent_orders import Orders
from plexrl_slurm.daemons.agent_private import PrivateFolder
from plexrl_slurm.daemons.agent_turns import Turns
from plexrl_slurm.daemons.folders import tidy_siblings
from plexrl_slurm.daemons.gang import Gang
from plexrl_slurm.daemons.gang_part import GangPart
from plexrl_slurm.daemons.part_orders import PartOrders
from plexrl_slurm.daemons.snapshot_links import SnapshotLinks
from plexrl_slurm.engines import ranklink
from plexrl_slurm.logs import say
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.bulk import bulk_key
from plexrl_slurm.transport.links import AgentLink, Inbox

log = logging.getLogger(__name__)

BEAT_S = 1.0
#: How long an agent that ends with its node's memory may take to save snapshots of it.
SETTLE_S = 5.0
#: Longest wait for an image of a WPG on several nodes before a hello.
STILL_S = 10.0


class Agent:
    """State of the process."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._epoch = now_us()
        self._daemon_epoch = 0
        self._moving = 0
        self._still = asyncio.Event()
        self._still.set()
        self._number = 0
        self._unacknowledged: dict[int, tm.Done | tm.WpgChanged] = {}
        #: What the daemon was told last of the images here.
        self._said: tm.Stock | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        #: The hold is given back, and the host tier with it.
        self._clear_host = False
        self._problem: BaseException | None = None
        #: GPUs that Slurm gave this node's agent; ``None``: it said nothing about GPUs.
        self._gpus = visible_gpus(os.environ)
        self._tier = config.tier(f"{config.agent}.{self._epoch}")
        self._links = SnapshotLinks(
            self._tier.snapshots,
            agent=config.agent,
            key=bulk_key(Path(config.state_dir)),
            room=self._tier.make_room,
            here=self._snapshot_came,
        )
        self._orders = Orders(
            self._tier,
            report=self._report,
            published=self._snapshot_here,
            number=self._next_number,
            tidy=self._tidy,
        )
        self._turns = Turns(self._orders, report=self._report, number=self._next_number)
        self._parts = PartOrders(
            self._tier,
            self._orders,
            report=self._report,
            send=lambda ready: self._link.send(ready),
            number=self._next_number,
        )
        self._folder = PrivateFolder()
        self._private = self._folder.path
        self._context = zmq.asyncio.Context()
        self._ranks = self._context.socket(zmq.ROUTER)
        self._inbox = Inbox(self._ranks)
        self._ranks.setsockopt(zmq.LINGER, 0)
        self._ranks.setsockopt(zmq.SNDHWM, 0)
        self._ranks.setsockopt(zmq.RCVHWM, 0)
        self._ranks_endpoint = f"ipc://{self._private}/ranks"
        self._ranks.bind(self._ranks_endpoint)
        self._link = AgentLink(Path(config.state_dir), agent=config.agent, endpoint=config.endpoint)

    async def run(self) -> None:
        """Serve until told that the hold is given back."""
        await self._tier.own()
        if self._config.snapshots_dir:  # a node of Slurm's: its folder lies beside earlier holds'
            for folder in self._config.homes:
                tidy_siblings(folder, say=lambda gone: say(log, "left_over", folder=gone))
        await asyncio.to_thread(
            agent_private.tidy, say=lambda gone: say(log, "left_over", path=gone)
        )
        await self._links.start(self._config.endpoint)
        loops: list[asyncio.Task[Any]] = [
            asyncio.create_task(coroutine)
            for coroutine in (self._hear_daemon(), self._hear_ranks(), self._beat())
        ]
        await self._say_hello()
        stop: asyncio.Task[Any] = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait({*loops, stop}, return_when=asyncio.FIRST_COMPLETED)
        for task in loops:
            task.cancel()
        await asyncio.gather(*(gang.stop() for gang in self._orders.gangs.values()))
        await self._links.close()
        self._link.close()
        self._inbox.close()
        self._ranks.close()
        self._folder.close()
        if self._clear_host:
            await self._tier.snapshots.settle(seconds=SETTLE_S)
            self._tier.clear()
        for task in done - {stop}:
            task.result()
        if self._problem is not None:
            # An exit code other than 0 has the hold's script start another agent.
            raise self._problem

    def terminate(self) -> None:
        """Leave ``run``. When Slurm ends the job, nothing may stay in the node's memory."""
        self._clear_host = bool(self._config.snapshots_dir)
        self._stop.set()

    # -- daemon ------------------------------------------------------------------------------
    async def _hear_daemon(self) -> None:
        while True:
            command = await self._link.receive()
            match command:
                case tm.WhoAreYou(epoch=epoch):
                    if epoch >= self._daemon_epoch:
                        self._spawn(self._say_hello())
                case tm.Ack(number=number):
                    self._acknowledged(number)
                case _ if command.epoch < self._daemon_epoch:
                    say(log, "old_daemon_ignored", epoch=command.epoch)
                case tm.Welcome():
                    self._daemon_epoch, self._said = command.epoch, None
                    self._welcome(command)
                case tm.SwitchOrder() if self._orders.samples(command):
                    self._spawn(self._switch_when_here(command))
                case tm.SwitchOrder():
                    self._begin(command, self._orders.switch(command))
                case tm.SaveOrder():
                    self._begin(command, self._orders.save(command))
                case tm.RunOrder():
                    if self._orders.may_run(command):
                        self._orders.running[command.id] = (command.wpg, command.call, command.part)
                        if command.publish:
                            self._tier.snapshots.publishing(command.publish)
                        self._spawn(self._orders.run(command))
                case tm.AbortOrder():
                    for order, (wpg, call, _) in list(self._orders.running.items()):
                        if (wpg, call) == (command.wpg, command.call):
                            await self._orders.gangs[wpg].abort(order, pause=command.pause)
                case tm.GrantOrder():
                    self._move(self._turns.grant(command))
                case tm.PersistOrder():
                    by = self._parts if command.share else self._orders
                    self._spawn(by.persist(command))
                case tm.BringOrder():
                    self._links.want(command.snapshot, command.bytes, command.sources)
                case tm.SafeOrder():
                    self._tier.snapshots.is_elsewhere(command.snapshot)
                case tm.ExpectOrder():
                    self._spawn(self._tier.expect(command, quiet=self._still.is_set))
                case tm.EvictOrder():
                    self._spawn(self._orders.evict(command))
                case tm.PrepareOrder() | tm.StartOrder() | tm.SettleOrder():
                    if (rest := self._parts.work(command)) is not None:
                        self._spawn(rest)
                case tm.FetchOrder():
                    if (rest := self._parts.work(command)) is not None:
                        self._move(rest)
                case tm.DropOrder():
                    self._links.drop(command.snapshots)
                    self._tier.drop(command)
                    self._tidy()
                    self._orders.dropped(command)
                case tm.StopOrder():
                    self._clear_host = not command.keep_host
                    self._stop.set()

    async def _switch_when_here(self, order: tm.SwitchOrder) -> None:
        """Begin it when the snapshot is on this node; what runs elsewhere on it goes on."""
        try:
            path = order.snapshot_path or await self._links.ready(order)
        except PlexError as problem:
            if order.epoch >= self._daemon_epoch and self._orders.may_run(order):
                await self._orders.not_switched(order, str(problem))
            return
        if order.epoch >= self._daemon_epoch:  # a newer daemon has not heard of it
            self._begin(order, self._orders.switch(order, path))

    async def _snapshot_here(
        self, name: str, size: int, origin: str = "", took_us: int = 0
    ) -> None:
        if not origin:
            self._links.published(name)
        await self._link.send(
            tm.SnapshotHere(
                agent=self._config.agent,
                epoch=self._epoch,
                snapshot=name,
                bytes=size,
                origin=origin,
                took_us=took_us,
            )
        )

    def _snapshot_came(self, name: str, size: int, origin: str, took_us: int) -> None:
        self._spawn(self._snapshot_here(name, size, origin, took_us))

    def _begin(self, order: tm.SwitchOrder | tm.SaveOrder, work: Coroutine[Any, Any, None]) -> None:
        if not self._orders.may_run(order):
            work.close()
            return
        self._move(self._parts.moving(order.wpg, work))

    def _move(self, work: Coroutine[Any, Any, None]) -> None:
        self._moving += 1
        self._still.clear()
        self._spawn(self._moved(work))

    async def _moved(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._moving -= 1
            if self._moving == 0:
                self._still.set()
                self._spawn(self._tier.idle(quiet=self._still.is_set))
            self._tidy()

    def _tidy(self) -> None:
        self._tier.drop_again(quiet=self._moving == 0)

    async def _say_hello(self) -> None:
        # Ranks that wait for others, which may never come, must not keep the agent silent.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STILL_S if self._parts.busy() else None):
                await self._still.wait()
        finished = [
            report
            for report in self._unacknowledged.values()
            if isinstance(report, tm.Done) and report.what in ("run", "persist")
        ]
        # The state of the WPGs and the images, below, say what the other reports said.
        self._unacknowledged = {report.number: report for report in finished}
        ended = {report.order for report in finished}
        running: dict[str, list[tuple[str, int]]] = {name: [] for name in self._orders.gangs}
        for order, (wpg, call, part) in self._orders.running.items():
            if order not in ended:
                running[wpg].append((call, part))
        await self._link.send(
            tm.Hello(
                agent=self._config.agent,
                hold=self._config.hold,
                node=self._config.node,
                component=self._config.component,
                restarts=self._config.restarts,
                epoch=self._epoch,
                pid=os.getpid(),
                wpgs=[
                    tm.WpgHeld(
                        name=name,
                        state="moving" if name in self._parts.busy() else gang.state,
                        resident=self._orders.resident.get(name, ""),
                        progress=self._orders.progress.get(name, (0, 0)),
                        running=running[name],
                        incarnation=gang.newest,
                        pids=gang.pids,
                        awake=self._turns.is_awake(name),
                        beside=self._orders.beside.get(name, ""),
                    )
                    for name, gang in self._orders.gangs.items()
                ],
                images=self._tier.images(),
                snapshots=self._tier.snapshots.names(),
                fetched=self._tier.snapshots.fetched_names(),
                source=self._links.source(),
                gpus=self._gpus,
                finished=finished,
            )
        )

    def _welcome(self, welcome: tm.Welcome) -> None:
        for config in welcome.wpgs:
            if config.name in self._orders.gangs:
                continue
            devices = devices_of(config.devices, self._gpus)
            if devices is None:
                self._lacks_gpus(config)
                continue
            gang = self._gang(config, welcome.models, devices)
            self._orders.gangs[config.name] = gang
            self._turns.add(config, gang)
            if config.nodes > 1:
                self._tier.part(config.name, world=config.world, ranks=config.ranks)
            elif gang.trains:
                self._tier.store(config.name, config.world)
            gang.start()
        self._links.keep_only(welcome.snapshots)
        self._tier.keep_only(deployments=welcome.deployments, snapshots=welcome.snapshots)
        self._tier.forget_idle(self._orders.gangs)

    def _gang(self, config: tm.WpgConfig, models: dict[str, dict[str, Any]], devices: str) -> Gang:
        make: Callable[..., Gang] = Gang
        if config.nodes > 1:
            make = partial(GangPart, ready=lambda p, n: self._spawn(self._parts.ready(p, n)))
        return make(
            config,
            models=models,
            endpoint=self._ranks_endpoint,
            folder=Path(self._config.state_dir) / "ranks",
            specs=self._private,
            writer=self._tier.writer,
            send=self._send_rank,
            changed=self._gang_changed,
            devices=devices,
        )

    def _lacks_gpus(self, config: tm.WpgConfig) -> None:
        """A WPG that cannot be started here."""
        reason = (
            f"Slurm gave node {self._config.node} {len(self._gpus or ())} GPUs and its WPGs need "
            f"{max(config.devices) + 1}: correct gpus_per_node of the hold, or Slurm's gres.conf"
        )
        say(log, "gpus_missing", wpg=config.name, reason=reason)
        self._spawn(
            self._report(
                tm.WpgChanged(
                    number=self._next_number(),
                    name=config.name,
                    state="down",
                    reason=reason,
                    incarnation=0,
                    pids=[],
                    at_us=now_us(),
                )
            )
        )

    async def _report(self, report: tm.Done | tm.WpgChanged) -> None:
        self._unacknowledged[report.number] = report
        await self._link.send(report)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _acknowledged(self, number: int) -> None:
        report = self._unacknowledged.pop(number, None)
        if isinstance(report, tm.Done) and report.what == "run":
            self._orders.running.pop(report.order, None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            stock = self._tier.stock()
            news = stock if stock != self._said else None
            self._said = stock
            beat = tm.Beat(agent=self._config.agent, epoch=self._epoch, stock=news)
            await self._link.send(beat)

    # -- ranks -------------------------------------------------------------------------------
    async def _send_rank(self, identity: bytes, data: bytes) -> None:
        await self._ranks.send_multipart([identity, data])

    async def _hear_ranks(self) -> None:
        while True:
            identity, data = await self._inbox.receive()
            name = identity.decode()
            if (gang := self._orders.gangs.get(name.rsplit("/", 2)[0])) is not None:
                gang.heard(name, ranklink.decode_report(data))

    def _gang_changed(self, gang: Gang, reason: str) -> None:
        name = gang.config.name
        say(log, "gang", wpg=name, state=gang.state, pids=gang.pids, reason=reason)
        finished = {
            report.order for report in self._unacknowledged.values() if isinstance(report, tm.Done)
        }
        self._orders.gang_changed(gang, finished=finished)
        self._spawn(
            self._report(
                tm.WpgChanged(
                    number=self._next_number(),
                    name=name,
                    state=gang.state,
                    reason=reason,
                    incarnation=gang.incarnation,
                    pids=list(gang.pids),
                    at_us=now_us(),
                )
            )
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("a task of the agent failed", exc_info=problem)
            self._problem = self._problem or problem
            self._stop.set()


async def serve(config: AgentConfig) -> None:
    """Run an agent until it is stopped."""
    agent = Agent(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.terminate)
    await agent.run()


def main() -> None:
    """``plexrl-agentd CONFIG.json``."""
    logs.set_up()
    try:
        uvloop.run(serve(AgentConfig.read(Path(sys.argv[1]))))
    except PlexError as problem:
        sys.stderr.write(f"plexrl-agentd: error: {problem}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
