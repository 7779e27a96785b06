"""Holds on a bench: every part of the daemon but its sockets; Slurm and the agents are scripted."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from plexrl_slurm import wire
from plexrl_slurm.api.service import Principal
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId, JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.daemons.accounting import Accounting
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.holds import HoldKeeper
from plexrl_slurm.daemons.job_views import live_job
from plexrl_slurm.daemons.moves import Mover
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.recovery import Recovery
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.daemons.spool import Spool
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.daemons.watch import SlurmWatch
from plexrl_slurm.daemons.writer import Writer
from plexrl_slurm.db import holds as rows
from plexrl_slurm.db import ledger, queue
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.models import HoldRow
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from plexrl_slurm.settings import Settings, WpgSettings
from plexrl_slurm.slurm.port import BatchJob, JobStatus, NodeStatus, SlurmState
from plexrl_slurm.slurm_settings import ComponentSettings, HoldSettings
from plexrl_slurm.transport import messages as tm

T = TypeVar("T")

TRAIN, ROLLOUT = WpgId("train-0"), WpgId("rollout-0")
TINY = ModelSpec(
    name="tiny",
    path="/models/tiny",
    dtype="float32",
    max_context_length=64,
    vocab_size=16,
    parameters=100,
    architecture="a",
)
#: Longer than the clock's steps, so that one instant is after another.
TICK_S = 0.002


class Slurm:
    """Says what the test wrote, and notes what it was told."""

    def __init__(self) -> None:
        self.jobs: dict[SlurmId, JobStatus] = {}
        self.told: list[tuple[str, str]] = []
        #: Raised by every question and every order.
        self.error: Exception | None = None
        #: Nodes that cannot be used.
        self.down: set[str] = set()
        self._number = 100

    def put(self, number: str, state: str, **facts: Any) -> None:
        self.jobs[SlurmId(number)] = JobStatus(state=SlurmState(state), word=state, **facts)

    def run(self, number: str, *nodes: str, **facts: Any) -> None:
        """The hold has these nodes."""
        values = {"start_us": now_us(), "batch_node": nodes[0], "nodes": nodes}
        self.put(number, "RUNNING", **(values | facts))

    def poll(self) -> Mapping[SlurmId, JobStatus]:
        self._fail()
        return dict(self.jobs)

    def states(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        self._fail()
        return {job: self.jobs[job] for job in jobs if job in self.jobs}

    def submit(self, job: BatchJob, *, hold: bool) -> SlurmId:
        self._fail()
        self._number += 1
        number = SlurmId(str(self._number))
        self.told.append(("submit", number))
        self.put(number, "PENDING", reason="Priority")
        return number

    def nodes(self) -> Mapping[str, NodeStatus]:
        self._fail()
        names = {node for job in self.jobs.values() for node in job.nodes} | self.down
        return {
            name: NodeStatus(
                state="DOWN" if name in self.down else "IDLE", usable=name not in self.down
            )
            for name in names
        }

    def cancel(self, job: SlurmId) -> None:
        self._do("cancel", job)

    def start_now(self, job: SlurmId) -> None:
        self._do("start", job)

    def set_time_limit(self, job: SlurmId, *, limit_us: int) -> None:
        self._do("limit", job)

    def _do(self, verb: str, job: SlurmId) -> None:
        self._fail()
        self.told.append((verb, str(job)))

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


class Server:
    """The daemon's end of the link: what it posted, by address."""

    def __init__(self) -> None:
        self.posted: list[tuple[bytes, tm.Command]] = []

    async def send(self, address: bytes, command: tm.Command) -> None:
        self.posted.append((address, command))

    def post(self, address: bytes, command: tm.Command) -> None:
        self.posted.append((address, command))

    def to(self, address: bytes, kind: type[T]) -> list[T]:
        return [each for where, each in self.posted if where == address and isinstance(each, kind)]


def settings_in(folder: Path, **hold: Any) -> Settings:
    """One train and one rollout WPG on one node of each hold."""
    component = ComponentSettings(pool="train", partition="gpu", gpus_per_node=2)
    other = ComponentSettings(pool="rollout", partition="gpu", gpus_per_node=1)
    values: dict[str, Any] = {"backend": "slurm", "components": (component, other)}
    return Settings(
        partition="rlvr",
        state_dir=folder,
        database_url=f"sqlite:///{folder}/x.db",
        host_dir=folder / "host",
        host_bytes=1 << 30,
        hold=HoldSettings(**(values | hold)),
        wpgs=(
            WpgSettings(pool="train", engine="fake_train"),
            WpgSettings(pool="rollout", engine="fake_sample"),
        ),
        models={"tiny": TINY},
    )


class Daemon:
    """One incarnation of the daemon; the database and Slurm outlive it."""

    def __init__(self, settings: Settings, store: Store, slurm: Slurm) -> None:
        self.settings, self.store, self.slurm = settings, store, slurm
        self.server = Server()
        self.writer = Writer(store)
        spool = Spool(settings.state_dir / "spool")
        books = Accounting(self.writer, spool)
        core = SchedulerCore(
            find_policy("fifo"), costs=SwitchCosts(), durable_every=settings.hold.durable_every
        )
        self.shell = Shell(core, spool=spool, books=books, max_part_tokens=100)
        self.state = State()
        port: Any = slurm
        server: Any = self.server
        self.parts = Parts(
            settings=settings,
            epoch=now_us(),
            store=store,
            writer=self.writer,
            spool=spool,
            books=books,
            shell=self.shell,
            placer=Placer(self.state, settings),
            port=port,
            state=self.state,
            watch=SlurmWatch(port, period_us=1),
        )
        self.service = PartitionService(self.parts)
        books.on_end = self.service.call_ended
        self.recovery = Recovery(self.parts, self.service)
        self.hub = AgentHub(
            server,
            self.shell,
            epoch=self.parts.epoch,
            settings=settings,
            recover=self.recovery.hello,
            persisted=self.service.image_persisted,
            after_commit=self.writer.after_commit,
        )
        self.parts.hub = self.shell.orders = self.hub
        self.mover = Mover(self.parts, self.service, self.recovery)
        self.shell.on_drained = self.mover.wpg_drained
        self.keeper = self.parts.holds = HoldKeeper(
            self.parts, self.hub, self.mover, endpoint="tcp://127.0.0.1:1"
        )
        self._writing = asyncio.create_task(self.writer.run())

    async def start(self) -> None:
        await self.recovery.read()
        await self.keeper.adopt()

    async def look(self) -> None:
        """One turn of the keeper, with a new answer of Slurm's."""
        await asyncio.sleep(TICK_S)
        await self.parts.watch.look()
        await self.keeper.look()
        await asyncio.sleep(TICK_S)

    async def settle(self) -> None:
        """Everything is written down."""
        self.shell.tick(flush=True)
        await self.writer.drain()

    async def die(self, *, written: bool = True) -> None:
        if written:
            await self.writer.drain()
        self._writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writing

    # -- what tests ask for ------------------------------------------------------------------
    async def hold(self, *nodes: str) -> str:
        """Submit a hold and let it run with one node for each component; its id."""
        before = set(self.keeper.live)
        await self.look()
        (new,) = set(self.keeper.live) - before
        self.give_nodes(new, *nodes)
        await self.look()
        return new

    def give_nodes(self, hold: str, *nodes: str, **facts: Any) -> None:
        number = self.keeper.live[hold].slurm_id
        other = SlurmId(f"{number}1")
        train, rollout = nodes if len(nodes) == 2 else (nodes[0], nodes[0])
        self.slurm.run(number, train, components=(number, other), **facts)
        self.slurm.run(other, rollout, leader=number)

    def end(self, hold_slurm_id: str, state: str = "CANCELLED", **facts: Any) -> None:
        number = SlurmId(hold_slurm_id)
        old = self.slurm.jobs[number]
        for each in (number, SlurmId(f"{number}1")):
            if each in self.slurm.jobs:
                self.slurm.jobs[each] = dataclasses.replace(
                    old, state=SlurmState(state), word=state, nodes=(), **facts
                )

    async def hello(
        self, hold: str, node: str, *, component: int = 0, epoch: int = 1, **facts: Any
    ) -> bytes:
        """An agent says hello; its gangs are up unless ``wpgs`` says otherwise."""
        name = f"{hold}.{component}.{node}"
        address = name.encode()
        values: dict[str, Any] = {"wpgs": [], "images": [], "snapshots": [], "finished": []}
        report = tm.Hello(
            agent=name,
            hold=hold,
            node=node,
            component=component,
            epoch=epoch,
            pid=1,
            **(values | facts),
        )
        await self.hub._hello(address, report)
        return address

    def up(self, address: bytes, wpg: str, *, number: int = 1) -> None:
        changed = tm.WpgChanged(
            number=number, name=wpg, state="up", reason="", incarnation=1, pids=[1], at_us=now_us()
        )
        self.hub._heard(address, changed)

    async def all_up(self, hold: str, *nodes: str) -> None:
        """Both agents of a hold, with everything up."""
        train, rollout = nodes if len(nodes) == 2 else (nodes[0], nodes[0])
        for component, node in enumerate((train, rollout)):
            address = await self.hello(hold, node, component=component)
            for wpg, held in self.keeper.live[hold].wpgs.items():
                if held.place.component == component:
                    self.up(address, wpg)

    async def job(self, number: str = "7") -> LiveJob:
        """An admitted job with homes, as far as there are WPGs."""

        def record(session: Any) -> JobId:
            job = queue.submit(
                session,
                partition="rlvr",
                name="count",
                uid=1000,
                user="ada",
                account="lab",
                script="job.sh",
                models=["tiny"],
                priority=1,
                seed=0,
                options={},
                token_sha256=None,
                now_us=now_us(),
            )
            queue.bind(session, job, slurm_id=SlurmId(number), now_us=now_us())
            return job

        job_id = await self.store.run(record)
        row = await self.store.run(
            queue.claim, partition="rlvr", owner="d", lease_us=10**12, now_us=now_us()
        )
        assert row is not None and row.id == job_id
        live = live_job(row)
        assert self.parts.placer.admit(live, ["tiny"]) == ()
        self.state.jobs[live.id] = live
        homes = {str(pool): str(wpg) for pool, wpg in live.homes.items()}
        await self.store.run(queue.set_homes, live.id, homes)
        return live

    def who(self, job: LiveJob) -> Principal:
        return Principal(uid=job.uid, user=job.user, job=job.id)

    async def session(self, job: LiveJob) -> str:
        return await self.service.open_session(self.who(job), idempotency_key="k", metadata={})

    async def model(self, job: LiveJob, session: str, seq: int = 0) -> tuple[CallId, str]:
        return await self.service.create_model(
            self.who(job),
            session_id=session,
            model_seq_id=seq,
            base_model="tiny",
            rank=0,
            seed=1,
            user_metadata={},
        )

    def orders(self, address: bytes, kind: type[T]) -> list[T]:
        return self.server.to(address, kind)

    async def finish_runs(self, address: bytes) -> None:
        """Answer every run that was ordered and not answered."""
        for order in self.orders(address, tm.RunOrder):
            entry = self.shell.entries[CallId(order.call)]
            if entry.ended.is_set() or order.part in entry.parts:
                continue
            done = tm.Done(
                number=1000,
                wpg=order.wpg,
                order=order.id,
                what="run",
                ok=True,
                call=order.call,
                part=order.part,
                result=wire.encode(wire.Created(100)),
            )
            self.hub._heard(address, done)
        await asyncio.sleep(TICK_S)
        await self.writer.drain()

    async def row(self, hold: str) -> HoldRow:
        return await self.store.run(rows.get_hold, hold)

    async def flaws(self, hold: str) -> list[ledger.Flaw]:
        await self.settle()
        return await self.store.run(ledger.gaps, hold)

    def home(self, job: LiveJob, pool: Pool = Pool.TRAIN) -> WpgId | None:
        return job.homes.get(pool)


class World:
    """What outlives a daemon."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings, self.store, self.slurm = settings, store, Slurm()
        self.daemons: list[Daemon] = []

    async def daemon(self) -> Daemon:
        """Another daemon, after the last one has died."""
        daemon = Daemon(self.settings, self.store, self.slurm)
        self.daemons.append(daemon)
        await daemon.start()
        return daemon


@contextlib.asynccontextmanager
async def world_in(folder: Path, **hold: Any) -> AsyncIterator[World]:
    settings = settings_in(folder, **hold)
    engine = open_database(settings.database_url)
    upgrade(engine)
    try:
        async with Store(engine) as store:
            world = World(settings, store)
            try:
                yield world
            finally:
                for daemon in world.daemons:
                    await daemon.die(written=False)
    finally:
        engine.dispose()
