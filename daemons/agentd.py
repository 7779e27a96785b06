"""``plexrl-agentd``: the one agent of a held node.

Starts, watches and restarts the ranks of the node's WPGs; owns the host tier; outlives any end
of the daemon and tells the next one what it has. Started, and respawned, by the hold's batch
script; exits 0 only when it is told that the hold is given back.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from plexrl_slurm import logs
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.daemons.agent_config import AgentConfig, devices_of, visible_gpus
from plexrl_slurm.daemons.folders import tidy_siblings
from plexrl_slurm.daemons.gang import Gang, GangLost
from plexrl_slurm.engines import ranklink
from plexrl_slurm.logs import say
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.links import AgentLink, Inbox

log = logging.getLogger(__name__)

BEAT_S = 1.0


class Agent:
    """State of the process."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._epoch = now_us()
        self._daemon_epoch = 0
        self._gangs: dict[str, Gang] = {}
        self._resident: dict[str, str] = {}
        #: What has taken effect on the resident of each training WPG.
        self._progress: dict[str, tuple[int, int]] = {}
        #: ``order id -> (wpg, call, part)`` of runs whose report is not acknowledged.
        self._running: dict[str, tuple[str, str, int]] = {}
        self._moving = 0
        self._still = asyncio.Event()
        self._still.set()
        self._number = 0
        self._unacknowledged: dict[int, tm.Done | tm.WpgChanged] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        #: The hold is given back, and the host tier with it.
        self._clear_host = False
        self._problem: BaseException | None = None
        #: GPUs that Slurm gave this node's agent; ``None``: it said nothing about GPUs.
        self._gpus = visible_gpus(os.environ)
        self._tier = config.tier(f"{config.agent}.{self._epoch}")
        self._private = Path(tempfile.mkdtemp(prefix="plexrl-agent-"))
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
        loops: list[asyncio.Task[Any]] = [
            asyncio.create_task(coroutine)
            for coroutine in (self._hear_daemon(), self._hear_ranks(), self._beat())
        ]
        await self._say_hello()
        stop: asyncio.Task[Any] = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait({*loops, stop}, return_when=asyncio.FIRST_COMPLETED)
        for task in loops:
            task.cancel()
        await asyncio.gather(*(gang.stop() for gang in self._gangs.values()))
        self._link.close()
        self._inbox.close()
        self._ranks.close()
        shutil.rmtree(self._private, ignore_errors=True)
        if self._clear_host:
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
                    self._daemon_epoch = command.epoch
                    self._welcome(command)
                case tm.SwitchOrder():
                    self._begin(command, self._switch(command))
                case tm.SaveOrder():
                    self._begin(command, self._save(command))
                case tm.RunOrder():
                    if self._may_run(command):
                        self._running[command.id] = (command.wpg, command.call, command.part)
                        if command.publish:
                            self._tier.publishing(command.publish)
                        self._spawn(self._run(command))
                case tm.AbortOrder():
                    for order, (wpg, call, _) in list(self._running.items()):
                        if (wpg, call) == (command.wpg, command.call):
                            await self._gangs[wpg].abort(order)
                case tm.PersistOrder():
                    self._spawn(self._persist(command))
                case tm.ExpectOrder():
                    self._spawn(self._tier.expect(command, quiet=self._still.is_set))
                case tm.DropOrder():
                    self._tier.drop(command)
                    self._tidy()
                    for wpg in [w for w, d in self._resident.items() if d in command.deployments]:
                        del self._resident[wpg]
                case tm.StopOrder():
                    self._clear_host = not command.keep_host
                    self._stop.set()

    def _may_run(self, order: tm.RunOrder | tm.SwitchOrder | tm.SaveOrder) -> bool:
        gang = self._gangs.get(order.wpg)
        return gang is not None and gang.state == "up" and gang.incarnation == order.incarnation

    def _begin(self, order: tm.SwitchOrder | tm.SaveOrder, work: Coroutine[Any, Any, None]) -> None:
        if not self._may_run(order):
            work.close()
            return
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
        await self._still.wait()
        finished = [
            report
            for report in self._unacknowledged.values()
            if isinstance(report, tm.Done) and report.what in ("run", "persist")
        ]
        # The state of the WPGs and the images, below, say what the other reports said.
        self._unacknowledged = {report.number: report for report in finished}
        ended = {report.order for report in finished}
        running: dict[str, list[tuple[str, int]]] = {name: [] for name in self._gangs}
        for order, (wpg, call, part) in self._running.items():
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
                        state=gang.state,
                        resident=self._resident.get(name, ""),
                        progress=self._progress.get(name, (0, 0)),
                        running=running[name],
                        incarnation=gang.incarnation,
                        pids=gang.pids,
                    )
                    for name, gang in self._gangs.items()
                ],
                images=self._tier.images(),
                snapshots=self._tier.snapshot_names(),
                gpus=self._gpus,
                finished=finished,
            )
        )

    def _welcome(self, welcome: tm.Welcome) -> None:
        for config in welcome.wpgs:
            if config.name in self._gangs:
                continue
            devices = devices_of(config.devices, self._gpus)
            if devices is None:
                self._lacks_gpus(config)
                continue
            gang = Gang(
                config,
                models=welcome.models,
                endpoint=self._ranks_endpoint,
                folder=Path(self._config.state_dir) / "ranks",
                specs=self._private,
                writer=self._tier.writer,
                send=self._send_rank,
                changed=self._gang_changed,
                devices=devices,
            )
            self._gangs[config.name] = gang
            if gang.trains:
                self._tier.store(config.name, config.world)
            gang.start()
        self._tier.keep_only(deployments=welcome.deployments, snapshots=welcome.snapshots)

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
            self._running.pop(report.order, None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            faults = self._tier.faults()
            beat = tm.Beat(agent=self._config.agent, epoch=self._epoch, faults=faults)
            await self._link.send(beat)

    # -- orders ------------------------------------------------------------------------------
    async def _run(self, order: tm.RunOrder) -> None:
        gang = self._gangs[order.wpg]
        path = str(self._tier.snapshot(order.publish)) if order.publish else ""
        if gang.trains and self._resident.get(order.wpg) != order.deployment:
            # It is created in the resident's place, of which nothing is certain from now on.
            self._resident.pop(order.wpg, None)
        operation = ranklink.Call(
            call=order.call, deployment=order.deployment, body=order.body, publish_path=path
        )
        try:
            answers = await gang.order(order.id, [operation] * gang.processes)
        except GangLost:
            self._running.pop(order.id, None)
            return
        finally:
            self._tier.published(order.publish)
            self._tidy()
        if gang.trains:
            self._took_effect(order, ok=all(answer.ok for answer in answers))
        await self._report(self._done(order.id, order.wpg, "run", answers, order.call, order.part))

    def _took_effect(self, order: tm.RunOrder, *, ok: bool) -> None:
        """Note how far the device's state is; a failed call is passed without an effect."""
        if ok:
            self._resident[order.wpg] = order.deployment
        elif self._resident.get(order.wpg) != order.deployment:
            return
        last = not ok or order.part + 1 == order.parts
        self._progress[order.wpg] = (order.seq + 1, 0) if last else (order.seq, order.part + 1)

    async def _switch(self, order: tm.SwitchOrder) -> None:
        gang = self._gangs[order.wpg]
        if not gang.trains:
            path = order.snapshot_path or str(self._tier.snapshot(order.incoming))
            operation = ranklink.Load(incoming=order.incoming, load_path=path, model=order.model)
            with contextlib.suppress(GangLost):
                answers = await gang.order(order.id, [operation])
                if answers[0].ok:
                    self._resident[order.wpg] = order.incoming
                else:
                    self._resident.pop(order.wpg, None)
                await self._report(self._done(order.id, order.wpg, "switch", answers))
            return
        self._tier.returns(order.incoming)
        passage, error = None, f"no image of {order.incoming}"
        try:
            passage = await self._tier.begin_switch(order)
        except PlexError as problem:
            error = str(problem)
        if passage is None or passage.held is None:
            answer = ranklink.Answer(order.id, False, error=error)
            await self._report(self._done(order.id, order.wpg, "switch", [answer]))
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
            self._resident[order.wpg] = order.incoming
            self._progress[order.wpg] = passage.held.progress
        else:
            self._resident.pop(order.wpg, None)
        await self._report(self._done(order.id, order.wpg, "switch", answers))

    async def _save(self, order: tm.SaveOrder) -> None:
        gang = self._gangs[order.wpg]
        self._tier.returns(order.deployment)
        passage, ok = await self._tier.begin_save(order), False
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
        await self._report(self._done(order.id, order.wpg, "save", answers))

    async def _persist(self, order: tm.PersistOrder) -> None:
        progress, ok, error, size = (0, 0), True, "", 0
        try:
            held = await self._tier.persist(order)
            progress, size = held.progress, held.bytes
        except (PlexError, KeyError, OSError) as problem:
            ok, error = False, str(problem)
        await self._report(
            tm.Done(
                number=self._next_number(),
                wpg=order.wpg,
                order=order.id,
                what="persist",
                ok=ok,
                deployment=order.deployment,
                progress=progress,
                error=error,
                moved_bytes=size,
            )
        )

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
            number=self._next_number(),
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

    # -- ranks -------------------------------------------------------------------------------
    async def _send_rank(self, identity: bytes, data: bytes) -> None:
        await self._ranks.send_multipart([identity, data])

    async def _hear_ranks(self) -> None:
        while True:
            identity, data = await self._inbox.receive()
            name = identity.decode()
            if (gang := self._gangs.get(name.rsplit("/", 2)[0])) is not None:
                gang.heard(name, ranklink.decode_report(data))

    def _gang_changed(self, gang: Gang, reason: str) -> None:
        name = gang.config.name
        say(log, "gang", wpg=name, state=gang.state, pids=gang.pids, reason=reason)
        if gang.state != "up":
            self._resident.pop(name, None)
        if gang.state == "down":
            finished = {
                report.order
                for report in self._unacknowledged.values()
                if isinstance(report, tm.Done)
            }
            for order, (wpg, _, _) in list(self._running.items()):
                if wpg == name and order not in finished:
                    del self._running[order]
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
    uvloop.run(serve(AgentConfig.read(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
