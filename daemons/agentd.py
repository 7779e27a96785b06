"""``plexrl-agentd``: the one agent of a held node.

Starts, watches and restarts the ranks of the node's WPGs; owns the host tier; outlives any end
of the daemon and tells the next one what it has. Started, and respawned, by the hold's batch
script; exits 0 only when it is told that the hold is given back.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from plexrl_slurm import logs
from plexrl_slurm.clock import now_us
from plexrl_slurm.daemons.gang import Gang, GangLost
from plexrl_slurm.engines import ranklink
from plexrl_slurm.logs import say
from plexrl_slurm.memory.images import ImageStore
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.links import AgentLink

log = logging.getLogger(__name__)

BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the hold's script tells an agent (JSON)."""

    agent: str
    hold: str
    node: str
    endpoint: str
    state_dir: str
    #: Folder on a tmpfs for images and snapshots of this partition.
    host_dir: str


class Agent:
    """State of the process."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._epoch = now_us()
        self._daemon_epoch = 0
        self._gangs: dict[str, Gang] = {}
        self._stores: dict[str, ImageStore] = {}
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
        #: Dropped while something was under way that may yet write them.
        self._dropped: set[str] = set()
        #: Snapshots that are being written.
        self._publishing: set[str] = set()
        self._host = Path(config.host_dir)
        self._snapshots = self._host / "snapshots"
        self._snapshots.mkdir(parents=True, exist_ok=True, mode=0o700)
        for torn in self._snapshots.glob(".*.part"):
            torn.unlink(missing_ok=True)
        self._private = Path(tempfile.mkdtemp(prefix="plexrl-agent-"))
        self._context = zmq.asyncio.Context()
        self._ranks = self._context.socket(zmq.ROUTER)
        self._ranks.setsockopt(zmq.LINGER, 0)
        self._ranks.setsockopt(zmq.SNDHWM, 0)
        self._ranks.setsockopt(zmq.RCVHWM, 0)
        self._ranks_endpoint = f"ipc://{self._private}/ranks"
        self._ranks.bind(self._ranks_endpoint)
        self._link = AgentLink(Path(config.state_dir), agent=config.agent, endpoint=config.endpoint)

    async def run(self) -> None:
        """Serve until told that the hold is given back."""
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
        self._ranks.close()
        shutil.rmtree(self._private, ignore_errors=True)
        if self._clear_host:
            shutil.rmtree(self._host, ignore_errors=True)
        for task in done - {stop}:
            task.result()
        if self._problem is not None:
            # An exit code other than 0 has the hold's script start another agent.
            raise self._problem

    def stop(self) -> None:
        """Leave ``run``."""
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
                            self._publishing.add(command.publish)
                        self._spawn(self._run(command))
                case tm.AbortOrder():
                    for order, (wpg, call, _) in list(self._running.items()):
                        if (wpg, call) == (command.wpg, command.call):
                            await self._gangs[wpg].abort(order)
                case tm.DropOrder():
                    self._drop(command)
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
            self._drop_again()

    async def _say_hello(self) -> None:
        await self._still.wait()
        finished = [
            report
            for report in self._unacknowledged.values()
            if isinstance(report, tm.Done) and report.what == "run"
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
                images=[
                    tm.ImageHeld(
                        wpg=name,
                        deployment=held.deployment,
                        progress=held.progress,
                        bytes=held.bytes,
                    )
                    for name, store in self._all_stores().items()
                    for held in store.held()
                ],
                snapshots=[path.stem for path in self._snapshots.glob("*.safetensors")],
                finished=finished,
            )
        )

    def _all_stores(self) -> dict[str, ImageStore]:
        """Stores of running WPGs, and what an earlier agent left for WPGs not started yet."""
        for folder in sorted(self._host.glob("images/*/world-*")):
            name = folder.parent.name
            if name not in self._stores:
                world = int(folder.name.removeprefix("world-"))
                self._stores[name] = ImageStore(folder, world=world)
        return self._stores

    def _welcome(self, welcome: tm.Welcome) -> None:
        self._all_stores()
        for config in welcome.wpgs:
            if config.name in self._gangs:
                continue
            gang = Gang(
                config,
                models=welcome.models,
                endpoint=self._ranks_endpoint,
                folder=Path(self._config.state_dir) / "ranks",
                send=self._send_rank,
                changed=self._gang_changed,
            )
            self._gangs[config.name] = gang
            if gang.trains:
                folder = self._host / "images" / config.name / f"world-{config.world}"
                self._stores[config.name] = ImageStore(folder, world=config.world)
            gang.start()
        for store in self._stores.values():
            store.keep_only(welcome.deployments)
        wanted = set(welcome.snapshots)
        for path in self._snapshots.glob("*.safetensors"):
            if path.stem not in wanted:
                path.unlink(missing_ok=True)

    def _drop(self, order: tm.DropOrder) -> None:
        self._dropped.update(order.deployments, order.snapshots)
        for deployment in order.deployments:
            for store in self._stores.values():
                store.drop(deployment)
        for snapshot in order.snapshots:
            self._delete_snapshot(snapshot)
        self._drop_again()

    def _delete_snapshot(self, snapshot: str) -> None:
        path = self._snapshots / f"{snapshot}.safetensors"
        path.unlink(missing_ok=True)
        path.with_name(f".{path.name}.part").unlink(missing_ok=True)

    def _drop_again(self) -> None:
        """What was under way when it was dropped may have been written since."""
        for store in self._stores.values():
            for held in [held for held in store.held() if held.deployment in self._dropped]:
                store.drop(held.deployment)
        if self._moving == 0 and not self._publishing:
            self._dropped.clear()

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
            await self._link.send(tm.Beat(agent=self._config.agent, epoch=self._epoch))

    # -- orders ------------------------------------------------------------------------------
    async def _run(self, order: tm.RunOrder) -> None:
        gang = self._gangs[order.wpg]
        path = str(self._snapshots / f"{order.publish}.safetensors") if order.publish else ""
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
            self._published(order.publish)
        if gang.trains:
            self._took_effect(order, ok=all(answer.ok for answer in answers))
        await self._report(self._done(order.id, order.wpg, "run", answers, order.call, order.part))

    def _published(self, snapshot: str) -> None:
        if snapshot in self._dropped:
            self._delete_snapshot(snapshot)
        self._publishing.discard(snapshot)
        self._drop_again()

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
            path = order.snapshot_path or str(self._snapshots / f"{order.incoming}.safetensors")
            operation = ranklink.Load(incoming=order.incoming, load_path=path, model=order.model)
            with contextlib.suppress(GangLost):
                answers = await gang.order(order.id, [operation])
                if answers[0].ok:
                    self._resident[order.wpg] = order.incoming
                else:
                    self._resident.pop(order.wpg, None)
                await self._report(self._done(order.id, order.wpg, "switch", answers))
            return
        store = self._stores[order.wpg]
        held = store.find(order.incoming)
        if held is None:
            answer = ranklink.Answer(order.id, False, error=f"no image of {order.incoming}")
            await self._report(self._done(order.id, order.wpg, "switch", [answer]))
            return
        slot = store.begin() if order.outgoing else None
        saves = [str(path) for path in store.paths(slot)] if slot is not None else None
        operations: list[ranklink.Operation] = [
            ranklink.Load(
                incoming=order.incoming,
                load_path=str(path),
                outgoing=order.outgoing,
                save_path=saves[rank] if saves else "",
                progress=order.progress,
            )
            for rank, path in enumerate(store.paths(held.slot))
        ]
        try:
            answers = await gang.order(order.id, operations)
        except GangLost:
            if slot is not None:
                store.abandon(slot)
            return
        ok = all(answer.ok for answer in answers)
        if slot is not None:
            if ok:
                store.commit(slot, deployment=order.outgoing, progress=order.progress)
            else:
                store.abandon(slot)
        if ok:
            self._resident[order.wpg] = order.incoming
            self._progress[order.wpg] = held.progress
        else:
            self._resident.pop(order.wpg, None)
        await self._report(self._done(order.id, order.wpg, "switch", answers))

    async def _save(self, order: tm.SaveOrder) -> None:
        gang, store = self._gangs[order.wpg], self._stores[order.wpg]
        slot = store.begin()
        operations: list[ranklink.Operation] = [
            ranklink.Save(order.deployment, str(path), order.progress) for path in store.paths(slot)
        ]
        try:
            answers = await gang.order(order.id, operations)
        except GangLost:
            store.abandon(slot)
            return
        if all(answer.ok for answer in answers):
            store.commit(slot, deployment=order.deployment, progress=order.progress)
        else:
            store.abandon(slot)
        await self._report(self._done(order.id, order.wpg, "save", answers))

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
            identity, data = await self._ranks.recv_multipart()
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
        loop.add_signal_handler(number, agent.stop)
    await agent.run()


def main() -> None:
    """``plexrl-agentd CONFIG.json``."""
    logs.set_up()
    config = AgentConfig(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    uvloop.run(serve(config))


if __name__ == "__main__":
    main()
