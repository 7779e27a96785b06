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
from plexrl_slurm.api.munge import Munge
from plexrl_slurm.api.server import Tls, serve
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import Denied, PlexError, StorageFull
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.accounting import Accounting
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.damaged_images import DamagedImages
from plexrl_slurm.daemons.durable_scrubber import DurableScrubber
from plexrl_slurm.daemons.garbage import keep_what_is_there
from plexrl_slurm.daemons.hold_book import keep_rules
from plexrl_slurm.daemons.hold_hygiene import refuse_others
from plexrl_slurm.daemons.holds import HoldKeeper
from plexrl_slurm.daemons.image_stories import LINES, MOVES
from plexrl_slurm.daemons.intake import Intake
from plexrl_slurm.daemons.learning import HabitBook, LearningCore
from plexrl_slurm.daemons.moves import Mover
from plexrl_slurm.daemons.node_addresses import NodeAddresses
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.recovery import Recovery
from plexrl_slurm.daemons.relief import Relief
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.daemons.spool import Spool
from plexrl_slurm.daemons.start_up import ends_with_a_sentence
from plexrl_slurm.daemons.state import State
from plexrl_slurm.daemons.usage import Usage
from plexrl_slurm.daemons.watch import SlurmWatch
from plexrl_slurm.daemons.writer import Writer
from plexrl_slurm.db import schema
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.holds import newest_epoch
from plexrl_slurm.db.image_moves import ImageMove, add_move, read_moves
from plexrl_slurm.db.store import Store
from plexrl_slurm.logs import say
from plexrl_slurm.memory.files import storage_errors
from plexrl_slurm.memory.refusals import READ, USED, refusals, refused
from plexrl_slurm.settings import Settings
from plexrl_slurm.slurm.choose import make_cluster_port
from plexrl_slurm.slurm.local import LocalSlurm
from plexrl_slurm.slurm.port import SlurmPort
from plexrl_slurm.transport.links import AgentServer
from plexrl_slurm.whereabouts import owner_marker, refuse_foreign_state

log = logging.getLogger(__name__)

#: Between two looks at the local backend's job folders.
LOCAL_POLL_US = 500_000
#: How long a given-back hold may take to end before its script is cancelled.
RELEASE_S = 20.0
#: How long a daemon that is stopped may try to reach its database; the next one finds the rest.
DRAIN_S = 10.0


def make_port(config: Settings) -> SlurmPort:
    """The adapter that the configuration names."""
    if config.slurm is None:
        return LocalSlurm(config.state_dir / "local")
    return make_cluster_port(config.slurm.adapter, config.slurm.conf, config.slurm.timeout_us / 1e6)


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
    try:
        _claim(config)
    except Denied:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _add_move(session: Any, partition: str, move: ImageMove) -> None:
    add_move(session, partition, move, keep=LINES)


def _claim(config: Settings) -> None:
    """Another partition's folder has its keys: its agents and jobs would take us for it."""
    refuse_foreign_state(config.state_dir, config.partition)
    marker = owner_marker(config.state_dir)
    if not marker.exists() or not marker.read_text().strip():
        marker.write_text(f"{config.partition}\n")


class Daemon:
    """Puts the parts together and runs them."""

    def __init__(self, config: Settings) -> None:
        self._config = config
        self._stop = asyncio.Event()
        #: It has started.
        self.serves = False

    def stop(self) -> None:
        """End the daemon; the hold stays."""
        self._stop.set()

    async def run(self) -> None:
        """Until stopped, or until a part fails."""
        config = self._config
        engine = open_database(config.database_url)
        schema.upgrade(engine)
        store = Store(engine)
        # Agents obey the newest one, also after the clock was set back.
        epoch = max(now_us(), await store.run(newest_epoch, config.partition) + 1)
        writer = Writer(store)
        spool = Spool(config.state_dir / "spool")
        for private in ("checkpoints", "holds", "ranks", "durable", "snapshots"):
            (config.state_dir / private).mkdir(exist_ok=True)
            (config.state_dir / private).chmod(0o700)
        state = State()
        server = AgentServer(config.state_dir)
        endpoint = server.start(config.hold.agent_address)
        port = make_port(config)
        books = Accounting(writer, spool)
        core = LearningCore(
            find_policy(config.policy),
            path=config.state_dir / "journal" / f"{epoch}.jsonl",
            prior=SwitchCosts(),
            queue=config.queue.rules(joins_first=config.sharing.joins_first),
            leaving=config.sharing.leaving,
            holds=keep_rules(config.hold),
            hold_us=config.hold_us,
            image_every=config.image_every,
            durable_every=config.hold.durable_every if config.durable else None,
            spare_images=True,
            hints=config.nvme_dir is not None,
            tails=config.tails,
        )
        shell = Shell(core, spool=spool, books=books, max_part_tokens=config.max_part_tokens)
        poll_us = config.slurm.poll_us if config.slurm is not None else LOCAL_POLL_US
        watch = SlurmWatch(port, period_us=poll_us)
        parts = Parts(
            settings=config,
            epoch=epoch,
            store=store,
            writer=writer,
            spool=spool,
            books=books,
            shell=shell,
            placer=Placer(state, config),
            port=port,
            state=state,
            watch=watch,
        )
        parts.habits = HabitBook(
            partition=config.partition, guess=config.sharing.guess, writer=writer, state=state
        )
        parts.placer.journal = core.placed
        parts.habits.inform(parts.placer, core.learner)
        core.on_step = parts.habits.stepped
        core.expected_of = parts.habits.expected_of
        await parts.habits.read(store)
        service = PartitionService(parts)
        service.standings.journal = core
        books.on_end = service.call_ended
        recovery = Recovery(parts, service)
        await recovery.read()
        hub = AgentHub(
            server,
            shell,
            epoch=epoch,
            settings=config,
            recover=recovery.hello,
            persisted=service.image_persisted,
            after_commit=writer.after_commit,
            address_of=NodeAddresses(port, backend=config.backend),
        )
        hub.on_left = DamagedImages(parts).met
        hub.stories.restore(await store.run(read_moves, config.partition, keep=MOVES))
        hub.stories.on_move = lambda move: writer.add(_add_move, config.partition, move, lazy=True)
        parts.hub = shell.orders = hub
        mover = Mover(parts, service, recovery)
        relief = Relief(parts, mover)
        relief.journal = core
        shell.on_drained, parts.habits.on_news = relief.drained, relief.heard_news
        keeper = parts.holds = HoldKeeper(parts, hub, mover, endpoint=endpoint)
        keeper.book.journal = core
        if config.backend == "slurm":
            await watch.look()
            refuse_others(config, watch.jobs)
        await keeper.adopt()
        for _ in range(2):  # the second sees what the first one submitted
            await watch.look()
            await keeper.look()
        serving = await serve(
            make_app(service, munge=_munge(config)),
            host=config.listen_host,
            port=_port(config),
            socket_path=config.socket,
            tls=_tls(config),
        )
        parts.url = config.url or _url(config, serving.port)
        _remember_port(config, serving.port)
        self.serves = True
        say(log, "serving", partition=config.partition, url=parts.url, holds=sorted(keeper.live))
        keep_what_is_there()
        intake = Intake(parts, service)
        running: list[Coroutine[Any, Any, Any]] = [
            writer.run(),
            hub.listen(),
            intake.run(),
            intake.collect(),
            _wait(shell.broken),
            *([Usage(parts).run()] if config.slurm is not None else []),
            watch.run(),
            keeper.run(),
            relief.run(),
            DurableScrubber(parts, found=service.durable_faults.append).loop(),
        ]
        tasks = [asyncio.create_task(work) for work in running]
        ends = [asyncio.create_task(event.wait()) for event in (self._stop, parts.release)]
        done, _ = await asyncio.wait({*tasks, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if parts.release.is_set():
            await self._release(parts, keeper)
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

    async def _release(self, parts: Parts, keeper: HoldKeeper) -> None:
        """End all jobs, give the holds back, close their books."""
        service = PartitionService(parts)
        for job in list(parts.state.jobs.values()):
            try:
                await service.cancel_in_slurm(job.slurm_id)
                await service.end_job(
                    job.id,
                    state=JobState.CANCELLED,
                    reason="the partition was taken down",
                    exit_code=None,
                )
            except PlexError as problem:
                say(log, "job_not_ended", job=job.slurm_id, reason=problem)
        await keeper.release_all(RELEASE_S)


async def _wait(future: "asyncio.Future[None]") -> None:
    await future


def _munge(config: Settings) -> Munge | None:
    return Munge(config.slurm.munge_socket) if config.slurm is not None else None


def _tls(config: Settings) -> Tls | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(cert=config.tls_cert, key=config.tls_key)


def _url(config: Settings, port: int) -> str:
    scheme = "https" if config.tls_cert is not None else "http"
    host = f"[{config.listen_host}]" if ":" in config.listen_host else config.listen_host
    return f"{scheme}://{host}:{port}"


def _port(config: Settings) -> int:
    """The configured port; with 0, the one that an earlier daemon got, so that clients find us."""
    remembered = _remembered_port(config)
    return config.listen_port if config.listen_port or remembered is None else remembered


def _remembered_port(config: Settings) -> int | None:
    """``None`` if there is none, or the disk was full when it was written."""
    try:
        return int((config.state_dir / "api.port").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _remember_port(config: Settings, port: int) -> None:
    """A full disk must not cost a daemon its start, nor the next one the port."""
    if _remembered_port(config) == port:
        return
    try:
        with storage_errors(config.state_dir, 8):
            part = config.state_dir / ".api.port"
            part.write_text(f"{port}\n")
            part.rename(config.state_dir / "api.port")
    except StorageFull as problem:
        say(log, "port_not_remembered", reason=problem)


async def serve_partition(config: Settings) -> None:
    """Run a daemon until a signal ends it."""
    daemon = Daemon(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    try:
        await daemon.run()
    except OSError as problem:
        if daemon.serves or isinstance(problem, PlexError):
            raise
        raise refused(problem, config.state_dir, USED) from problem


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(prog="plexrl-partitiond", description=__doc__)
    parser.add_argument("config", type=Path, help="the partition's TOML file")
    parser.add_argument("--log-level", default="INFO")
    asked = parser.parse_args()
    logs.set_up(asked.log_level)
    with ends_with_a_sentence("plexrl-partitiond"):
        with refusals(asked.config, READ):
            config = settings.read(asked.config)
        with refusals(config.state_dir, USED):
            descriptor = lock(config)
        try:
            # The loop must not wait 5 ms for the database's thread to let go of the interpreter.
            sys.setswitchinterval(0.0005)
            uvloop.run(serve_partition(config))
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    main()
