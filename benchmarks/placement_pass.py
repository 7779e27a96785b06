"""How long does the daemon take to place a job, and to walk along its queue?

``python -m benchmarks.placement_pass [--jobs N] [--small]``; no Slurm, no GPU, one core. The
placer, the habit book, the queue pass, its journal and its database (SQLite) are the daemon's;
Slurm is a fake. ``--small``: WPGs of 2 GPUs, 1,023 of them. CPU time of the daemon's thread, and
wall time of passes, which write to the database.
"""

import argparse
import asyncio
import gc
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time_ns
from typing import Any

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.core.profiles import Habits
from plexrl_slurm.daemons.garbage import keep_what_is_there
from plexrl_slurm.daemons.intake import Intake
from plexrl_slurm.daemons.layout import HeldWpg, Place, Seat, WpgSlot
from plexrl_slurm.daemons.learning import HabitBook, LearningCore
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.settings import WpgSettings
from tests.daemons.controllers_bench import Bench, bench_in
from tests.daemons.holds_bench import TINY, settings_in

GPUS, NODE = 2048, 8
S = 1_000_000
#: ``(GPUs, share of the training GPUs)`` of training WPGs, and GPUs of a rollout WPG.
TRACES = ((8, 0.4), (16, 0.35), (32, 0.25)), 8
SMALL = ((2, 1.0),), 2
MODELS = ("tiny", "small", "large")


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(
            measure(Path(folder), given.jobs, given.waiting, SMALL if given.small else TRACES)
        )


class Timed:
    """The placer; every decision of the pass is timed."""

    def __init__(self, placer: Placer) -> None:
        self.ms: list[float] = []
        self._admit = placer.admit
        placer.admit = self.admit  # type: ignore[method-assign]

    def admit(self, job: LiveJob, models: Any, **how: Any) -> Any:
        """As the placer does."""
        begin = thread_time_ns()
        try:
            return self._admit(job, models, **how)
        finally:
            self.ms.append((thread_time_ns() - begin) / 1e6)


async def measure(folder: Path, jobs: int, waiting: int, shapes: Any) -> None:
    """Jobs come until so many have a place or none is left, then some end and others take it."""
    rng = random.Random(1)
    async with bench_in(folder) as bench:
        book = furnish(bench, folder, shapes)
        intake = Intake(bench.parts, bench.service)
        turns = intake._turns
        timed = Timed(bench.parts.placer)
        placer: Placer = bench.parts.placer
        keep_what_is_there()  # as the daemon does before it serves
        await fill(bench, rng, book, jobs, waiting)
        wpgs = len(placer.wpgs)
        print(f"{wpgs:,} WPGs on {GPUS:,} GPUs, {len(bench.state.jobs):,} jobs with a place")
        timed.ms.clear()
        passes: dict[str, list[tuple[float, float]]] = {"nobody enters": [], "jobs enter": []}
        for number in range(30):
            if number % 3 == 2:
                for name in rng.sample(sorted(bench.state.jobs), 8):
                    await bench.store.run(end, name)
                    bench.state.jobs.pop(name)
            before = len(bench.state.jobs)
            cpu, wall = thread_time_ns(), perf_counter()
            await turns._walk(number)
            took = ((thread_time_ns() - cpu) / 1e6, (perf_counter() - wall) * 1e3)
            kind = "nobody enters" if len(bench.state.jobs) == before else "jobs enter"
            passes[kind].append(took)
        tell("decision", timed.ms)
        for kind, found in passes.items():
            if found:
                tell(f"pass, {kind}: CPU", [cpu for cpu, _ in found])
                tell(f"pass, {kind}: wall", [wall for _, wall in found])
        begin = thread_time_ns()
        gc.collect()
        print(f"a look for garbage in all of it: {(thread_time_ns() - begin) / 1e6:.1f} ms")
        size = sum(path.stat().st_size for path in (folder / "journal").iterdir())
        print(f"journal: {size / 2**20:.1f} MiB")
        bench.parts.core.close()


def tell(what: str, ms: list[float]) -> None:
    """One line."""
    print(f"{what:<32} {len(ms):>5} times, median {median(ms):8.2f} ms, longest {max(ms):8.2f} ms")


def furnish(bench: Bench, folder: Path, shapes: Any) -> HabitBook:
    """The partition, its placer and its book."""
    trains, rollout = shapes
    room = {"device_bytes": 640 * 10**9}
    tables = [
        WpgSettings(pool="train", engine="fake_train", gpus=gpus, options=room)
        for gpus, _ in trains
    ]
    tables.append(WpgSettings(pool="rollout", engine="fake_sample", gpus=rollout, options=room))
    models = {name: model(name, 2**number) for number, name in enumerate(MODELS)}
    settings = replace(
        settings_in(folder), wpgs=tuple(tables), host_bytes=1500 * 10**9, models=models
    )
    parts: Any = bench.parts
    placer = parts.placer = Placer(bench.state, settings)
    parts.settings.models = models
    gpus, number = int(GPUS * 2 / 3), 0
    for table, share in zip(tables, [share for _, share in trains] + [0.5], strict=True):
        for index in range(int(gpus * share) // table.gpus):
            held = seated(table, index, number)
            placer.wpgs[held.id] = held
            number += 1
    core = parts.core = LearningCore(
        find_policy("atc_h"), path=folder / "journal" / "1.jsonl", prior=SwitchCosts()
    )
    placer.journal = core.placed
    book = HabitBook(
        partition="rlvr", guess=settings.sharing.guess, writer=parts.writer, state=bench.state
    )
    book.inform(placer, core.learner)
    return book


def model(name: str, times: int) -> ModelSpec:
    """One whose training state takes 120 GB, so many times."""
    return replace(TINY, name=name, parameters=times * 120 * 10**9 // 16)


def seated(table: WpgSettings, index: int, number: int) -> HeldWpg:
    """A WPG on nodes of its own."""
    pool = Pool(table.pool)
    nodes = max(1, table.gpus // NODE)
    seats = tuple(
        Seat(
            place=Place(hold="h", component=0, node=f"n{number}-{each}"),
            devices=tuple(range(min(NODE, table.gpus))),
        )
        for each in range(nodes)
    )
    wpg = Wpg(id=WpgId(f"{table.pool}-{number}"), pool=pool, gpus=table.gpus)
    return HeldWpg(wpg=wpg, slot=WpgSlot(name=wpg.id, table=table, index=index), seats=seats)


async def fill(bench: Bench, rng: random.Random, book: HabitBook, jobs: int, waiting: int) -> None:
    """Jobs settle one by one; those that find nothing wait, and ``waiting`` more with them."""
    placer: Placer = bench.parts.placer
    names = await bench.store.run(submit, jobs + waiting, rng)
    for name in names:
        book._habits[name] = habits(rng)
    for name in names[:jobs]:
        row = await bench.row(name)
        live = _live(row)
        if not placer.admit(live, row.models):
            bench.state.jobs[live.id] = live
            await bench.store.run(begin, live.id)


def _live(row: Any) -> LiveJob:
    return LiveJob(
        id=JobId(row.id), uid=1, user=row.user, name=row.name, seed=0, priority=1,
        slurm_id=SlurmId(row.slurm_id), running=True, started=True, started_us=1,
        time_limit_us=S * 86_400,
    )  # fmt: skip


def submit(session: Any, count: int, rng: random.Random) -> list[JobId]:
    """Rows that wait."""
    names = []
    for number in range(count):
        job = queue.submit(
            session, partition="rlvr", name="bench", uid=1, user=f"u{number % 20}",
            account=f"a{number % 5}", script="s", models=[rng.choice(MODELS)], priority=1, seed=0,
            options={"max_slowdown": rng.choice(("1.05", "1.10", "1.20"))}, token_sha256=None,
            now_us=number,
        )  # fmt: skip
        queue.bind(session, job, slurm_id=SlurmId(str(10_000 + number)), now_us=number)
        names.append(job)
    return names


def begin(session: Any, job: JobId) -> None:
    """It has its place."""
    queue.claim(session, partition="rlvr", owner="daemon-1", lease_us=10**17, now_us=1, job=job)


def end(session: Any, job: JobId) -> None:
    """It has ended."""
    session.connection().exec_driver_sql(
        f"UPDATE jobs SET state = 'completed' WHERE id = {int(job)}"
    )


def habits(rng: random.Random) -> Habits:
    """Like jobs of the traces, a third as busy."""
    step_us = rng.randint(200, 1500) * S
    overlaps = rng.random() < 0.57

    def profile(phase_us: int) -> Profile:
        phase_us = min(phase_us, step_us)
        return Profile(
            step_us=step_us, phase_us=phase_us, function_us=phase_us // 6, switch_us=S // 2,
            overlaps=overlaps, spread_us=step_us // 10,
            slack_us=max(0, step_us - phase_us) if overlaps else 0,
        )  # fmt: skip

    return Habits(train=profile(rng.randint(5, 60) * S), rollout=profile(rng.randint(1, 5) * S))


if __name__ == "__main__":
    main()
