"""``plexrl-partitiond``: the daemon of one partition.

Holds no state that the database and the agents cannot rebuild. TERM ends it at once, and so does
kill -9; agents, ranks and controllers go on, and the next daemon finds everything again.
"""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from plexrl_slurm import logs, settings
from plexrl_slurm.api.app import make_app
from plexrl_slurm.api.server import serve
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import BadConfig, Denied, PlexError
from plexrl_slurm.core.ids import CauseId, SlurmId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg, WpgHeld, WpgReleased
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.accounting import Accounting
from plexrl_slurm.daemons.agents import AgentHub, configs_of
from plexrl_slurm.daemons.holds import Holds
from plexrl_slurm.daemons.intake import Intake
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.recovery import Recovery
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.daemons.spool import Spool
from plexrl_slurm.daemons.state import State
from plexrl_slurm.daemons.writer import Writer
from plexrl_slurm.db import schema
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.store import Store
from plexrl_slurm.logs import say
from plexrl_slurm.settings import Settings
from plexrl_slurm.slurm.local import LocalSlurm
from plexrl_slurm.slurm.port import SlurmPort
from plexrl_slurm.transport.links import AgentServer

log = logging.getLogger(__name__)

#: How long a given-back hold may take to end before its script is cancelled.
RELEASE_S = 20.0
#: How long a daemon that is stopped may try to reach its database; the next one finds the rest.
DRAIN_S = 10.0


def make_port(config: Settings) -> SlurmPort:
    """The adapter that the configuration names."""
    if config.backend != "local":
        raise BadConfig(
            str(config.path),
            (f'[hold] backend = "{config.backend}" is not there yet: use "local"',),
        )
    return LocalSlurm(config.state_dir / "local")


def lock(config: Settings) -> int:
    """One daemon a partition: a lock that ends with the process. Writes the pid file."""
    config.state_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(config.state_dir / "partitiond.pid", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, 20).decode().strip()
        raise Denied(
            f"partition {config.partition!r} has a daemon already (pid {pid}): "
            f"stop it with `plexrl partition down --no-release` first"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


class Daemon:
    """Puts the parts together and runs them."""

    def __init__(self, config: Settings) -> None:
        self._config = config
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End the daemon; the hold stays."""
        self._stop.set()

    async def run(self) -> None:
        """Until stopped, or until a part fails."""
        config, epoch = self._config, now_us()
        engine = open_database(config.database_url)
        schema.upgrade(engine)
        store = Store(engine)
        writer = Writer(store)
        spool = Spool(config.state_dir / "spool")
        for private in ("checkpoints", "holds", "ranks"):
            (config.state_dir / private).mkdir(exist_ok=True)
            (config.state_dir / private).chmod(0o700)
        state = State()
        wpgs = {
            WpgId(name): Wpg(id=WpgId(name), pool=Pool(name.rpartition("-")[0]), gpus=wpg.gpus)
            for name, wpg in configs_of(config).items()
        }
        server = AgentServer(config.state_dir)
        endpoint = server.start("127.0.0.1")
        port = make_port(config)
        hold_keeper = Holds(config, store, port, endpoint=endpoint)
        hold, booked = await hold_keeper.ensure(wpgs, epoch=epoch)
        books = Accounting(writer, spool, holds=dict.fromkeys(wpgs, hold.id))
        core = SchedulerCore(
            find_policy(config.policy),
            costs=SwitchCosts(),
            hold_us=config.hold_us,
            image_every=config.image_every,
        )
        shell = Shell(core, spool=spool, books=books, max_part_tokens=config.max_part_tokens)
        parts = Parts(
            settings=config,
            epoch=epoch,
            store=store,
            writer=writer,
            spool=spool,
            books=books,
            shell=shell,
            placer=Placer(wpgs, state, config),
            port=port,
            state=state,
            hold=hold.id,
            hold_since_us=hold.started_us,
        )
        service = PartitionService(parts)
        books.on_end = service.call_ended
        recovery = Recovery(parts, service)
        await recovery.read()
        for wpg in wpgs.values():
            shell.feed(WpgHeld(at_us=booked[wpg.id], cause=CauseId("held"), wpg=wpg))
        hub = AgentHub(
            server,
            shell,
            epoch=epoch,
            settings=config,
            hold=hold.id,
            configs=configs_of(config),
            recover=recovery.hello,
            after_commit=writer.after_commit,
        )
        parts.hub = shell.orders = hub
        serving = await serve(
            make_app(service),
            host=config.listen_host,
            port=_port(config),
            socket_path=config.socket,
        )
        parts.url = f"http://{config.listen_host}:{serving.port}"
        (config.state_dir / "api.port").write_text(f"{serving.port}\n")
        say(log, "serving", partition=config.partition, url=parts.url, hold=hold.id)
        intake = Intake(parts, service)
        running: list[Coroutine[Any, Any, Any]] = [
            writer.run(),
            hub.listen(),
            intake.run(),
            intake.collect(),
            _wait(shell.broken),
            hold_keeper.watch(hold.id, hold.slurm_id),
        ]
        tasks = [asyncio.create_task(work) for work in running]
        ends = [asyncio.create_task(event.wait()) for event in (self._stop, parts.release)]
        done, _ = await asyncio.wait({*tasks, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if parts.release.is_set():
            tasks[-1].cancel()  # the hold is to end now
            await self._release(parts, hold_keeper, hold.slurm_id, hub)
        await serving.stop()
        shell.tick(flush=True)
        if not tasks[0].done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await writer.drain()
        for task in [*tasks, *ends]:
            task.cancel()
        await store.close()
        server.close()
        engine.dispose()
        for task in done - set(ends):
            task.result()

    async def _release(
        self, parts: Parts, hold_keeper: Holds, slurm_id: str, hub: AgentHub
    ) -> None:
        """End all jobs, give the hold back, close its books."""
        service = PartitionService(parts)
        for job in list(parts.state.jobs.values()):
            await service.cancel_in_slurm(job.slurm_id)
            await service.end_job(
                job.id,
                state=JobState.CANCELLED,
                reason="the partition was taken down",
                exit_code=None,
            )
        hub.stop_agents()
        if not await asyncio.to_thread(hold_keeper.wait_for_end, slurm_id, RELEASE_S):
            await service.cancel_in_slurm(SlurmId(slurm_id))
        at_us = now_us()
        for wpg in list(parts.placer.wpgs):
            parts.shell.feed(WpgReleased(at_us=at_us, cause=CauseId("released"), wpg=wpg))
        await parts.writer.drain()
        await hold_keeper.ended(parts.hold, at_us=at_us)
        say(log, "hold_released", hold=parts.hold)


async def _wait(future: "asyncio.Future[None]") -> None:
    await future


def _port(config: Settings) -> int:
    """The configured port; with 0, the one that an earlier daemon got, so that clients find us."""
    remembered = config.state_dir / "api.port"
    if config.listen_port == 0 and remembered.exists():
        return int(remembered.read_text())
    return config.listen_port


async def serve_partition(config: Settings) -> None:
    """Run a daemon until a signal ends it."""
    daemon = Daemon(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    await daemon.run()


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="plexrl-partitiond", description=__doc__)
    parser.add_argument("config", type=Path, help="the partition's TOML file")
    parser.add_argument("--log-level", default="INFO")
    asked = parser.parse_args()
    logs.set_up(asked.log_level)
    try:
        config = settings.read(asked.config)
        descriptor = lock(config)
        try:
            # The loop must not wait 5 ms for the database's thread to let go of the interpreter.
            sys.setswitchinterval(0.0005)
            uvloop.run(serve_partition(config))
        finally:
            os.close(descriptor)
    except PlexError as problem:
        sys.stderr.write(f"plexrl-partitiond: error: {problem}\n")
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
