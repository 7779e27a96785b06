"""Controllers on a bench: a Slurm that a test scripts, and a database of its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plexrl_slurm.api.service import JobSubmission, Principal
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.daemons.controllers import Controllers
from plexrl_slurm.daemons.job_views import live_job
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.daemons.watch import SlurmWatch
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from plexrl_slurm.queue_settings import QueueSettings
from plexrl_slurm.sharing_settings import SharingSettings
from plexrl_slurm.slurm.port import JobStatus, SlurmState

ADA = Principal(uid=1000, user="ada")
EVE = Principal(uid=1001, user="eve")
#: Longer than the clock's steps, so that one instant is after another.
TICK_S = 0.002


class Slurm:
    """Says what the test wrote, and notes what it was told."""

    def __init__(self) -> None:
        self.jobs: dict[SlurmId, JobStatus] = {}
        #: What only ``states`` knows.
        self.forgotten: dict[SlurmId, JobStatus] = {}
        self.told: list[tuple[str, str]] = []
        self.asked: list[list[str]] = []
        self.error: Exception | None = None

    def put(self, number: str, state: str, **facts: Any) -> None:
        held = facts.get("reason", "").startswith("JobHeld")
        values: dict[str, Any] = {"uid": ADA.uid, "user": "ada", "word": state, "held": held}
        known = state in SlurmState.__members__
        status = JobStatus(
            state=SlurmState(state) if known else SlurmState.FAILED, **(values | facts)
        )
        self.jobs[SlurmId(number)] = status

    def poll(self) -> Mapping[SlurmId, JobStatus]:
        return dict(self.jobs)

    def queued(self, job: SlurmId) -> Mapping[SlurmId, JobStatus]:
        return {name: it for name, it in self.jobs.items() if job in (name, it.array_id)}

    def states(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, JobStatus]:
        wanted = list(jobs)
        self.asked.append([str(job) for job in wanted])
        known = {**self.forgotten, **self.jobs}
        return {job: known[job] for job in wanted if job in known}

    def _do(self, verb: str, job: SlurmId) -> None:
        if self.error is not None:
            raise self.error
        self.told.append((verb, str(job)))

    def release(self, job: SlurmId) -> None:
        self._do("release", job)

    def hold(self, job: SlurmId) -> None:
        self._do("hold", job)

    def cancel(self, job: SlurmId) -> None:
        self._do("cancel", job)


class Bench:
    """Controllers with a database of their own; ``look`` is one turn."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.slurm = Slurm()
        self.fresh()

    def fresh(self) -> None:
        """Another daemon, with what the database knows."""
        self.state = State()
        parts: Any = SimpleNamespace(
            settings=SimpleNamespace(
                partition="rlvr",
                slurm=SimpleNamespace(),
                state_dir=self.folder,
                models={"tiny": SimpleNamespace(train_bytes=4, weights_bytes=1)},
                queue=QueueSettings(),
                sharing=SharingSettings(),
                tls_ca=None,
                wpgs=(),
            ),
            epoch="daemon-1",
            store=self.store,
            state=self.state,
            port=self.slurm,
            watch=SlurmWatch(self.slurm, period_us=1),  # type: ignore[arg-type]
            wake_intake=asyncio.Event(),
            shell=SimpleNamespace(tick=lambda flush: None, entries={}),
            writer=SimpleNamespace(add=lambda *_, **__: None, drain=_nothing),
            url="http://x",
            **dict.fromkeys(("spool", "books", "placer", "habits")),
        )
        self.parts = parts
        self.service = PartitionService(parts)
        self.controllers = Controllers(parts, self.service)

    async def look(self) -> None:
        await asyncio.sleep(TICK_S)
        await self.parts.watch.look()
        await self.controllers.watch()

    async def submit(self, number: str | None = None, **options: str) -> JobId:
        answer = await self.service.submit_job(
            ADA,
            JobSubmission(
                partition="rlvr",
                name="count",
                account="lab",
                models=("tiny",),
                priority=1,
                seed=0,
                script="job.sh",
                options=options,
            ),
        )
        job = JobId(answer["job_id"])
        if number is not None:
            await self.store.run(queue.bind, job, slurm_id=SlurmId(number), now_us=1)
        return job

    async def admit(self, job: JobId) -> LiveJob:
        """As intake does."""
        row = await self.store.run(
            queue.claim, partition="rlvr", owner="daemon-1", lease_us=10**12, now_us=1
        )
        assert row is not None and row.id == job
        live = self.know(row)
        await self.controllers.release(live)
        return live

    def know(self, row: JobRow) -> LiveJob:
        live = self.state.jobs[JobId(row.id)] = live_job(row)
        assert row.token_sha256 is not None
        self.state.tokens[row.token_sha256] = live.id
        return live

    async def again(self, job: JobId) -> LiveJob:
        """The daemon dies; the next one finds the job."""
        self.fresh()
        return self.know(await self.row(job))

    async def running(self, number: str = "7") -> LiveJob:
        self.slurm.put(number, "RUNNING", start_us=1)
        live = await self.admit(await self.submit(number))
        await self.look()
        assert live.running
        return live

    async def row(self, job: JobId) -> JobRow:
        return await self.store.run(queue.get, job)

    async def rows(self) -> list[JobRow]:
        return await self.store.run(queue.list_jobs, partition="rlvr")

    async def story(self, job: JobId) -> list[str]:
        return [line.kind for line in await self.store.run(queue.story, job)]


async def _nothing() -> None:
    pass


@contextlib.asynccontextmanager
async def bench_in(folder: Path) -> AsyncIterator[Bench]:
    engine = open_database(f"sqlite:///{folder}/x.db")
    upgrade(engine)
    try:
        async with Store(engine) as store:
            yield Bench(store, folder)
    finally:
        engine.dispose()
