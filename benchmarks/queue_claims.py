"""How many jobs per second do eight processes claim from one queue?

SQLite and PostgreSQL through ``plexrl_slurm.db.queue.claim``, beside procrastinate's fetch on
the same PostgreSQL server (fsync on). Every claim is a transaction of its own, on a connection
that its process keeps; the clock runs from the common start to the last claim.

Run ``python -m benchmarks.queue_claims`` in the repository's root. The procrastinate rows need
``pip install procrastinate`` (not a dependency of this project) and are left out without it;
the PostgreSQL rows need Debian's ``postgresql``.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import psycopg

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import make_session, open_database, transaction
from plexrl_slurm.db.schema import upgrade
from tests.db.postgres import find_programs, running_server


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    claims_per_s: float
    lowest: float
    highest: float


Work = Callable[[str, Barrier], tuple[int, float]]


def fill_ours(url: str, jobs: int) -> None:
    """A fresh schema and ``jobs`` claimable rows."""
    engine = open_database(url)
    upgrade(engine)
    with transaction(engine) as session:
        for _ in range(jobs):
            job = queue.submit(
                session, partition="rl", name="bench", uid=1, user="u", account="a", script="s",
                models=["tiny"], priority=0, seed=0, options={}, token_sha256=None, now_us=0,
            )  # fmt: skip
            queue.bind(session, job, slurm_id=SlurmId(str(job)), now_us=0)
    engine.dispose()


def claim_ours(url: str, start: Barrier) -> tuple[int, float]:
    """Claim until the queue is empty; ``(claims, instant of the last one)``."""
    engine = open_database(url, patience_us=60_000_000)
    claims, last, owner = 0, 0.0, f"process-{os.getpid()}"
    with engine.connect() as connection:
        start.wait()
        while True:
            with connection.begin(), make_session(connection) as session:
                row = queue.claim(
                    session, partition="rl", owner=owner, lease_us=10**8, now_us=time.time_ns()
                )
            if row is None:
                break
            claims, last = claims + 1, time.time()
    engine.dispose()
    return claims, last


def fill_procrastinate(url: str, jobs: int) -> None:
    """procrastinate's schema and ``jobs`` deferred jobs."""
    import procrastinate

    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=url))
    task = app.task(name="bench")(_nothing)
    with app.open():
        app.schema_manager.apply_schema()
        task.batch_defer(*({} for _ in range(jobs)))


def claim_procrastinate(url: str, start: Barrier) -> tuple[int, float]:
    """The same with procrastinate's own job manager."""
    import procrastinate

    async def work() -> tuple[int, float]:
        connector = procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=1)
        claims, last = 0, 0.0
        async with procrastinate.App(connector=connector).open_async() as app:
            worker = await app.job_manager.register_worker()
            await asyncio.to_thread(start.wait)
            while await app.job_manager.fetch_job(queues=None, worker_id=worker) is not None:
                claims, last = claims + 1, time.time()
        return claims, last

    return asyncio.run(work())


def _nothing() -> None:
    """What the deferred jobs would do."""


def body(
    work: Work, url: str, ready: Barrier, go: Barrier, answers: "Queue[tuple[int, float]]"
) -> None:
    """One of the processes; everything is imported and connected before the clock starts."""
    ready.wait()
    answers.put(work(url, go))


def measure(
    fill: Callable[[str, int], None], work: Work, url: str, args: argparse.Namespace
) -> float:
    """Claims per second of one run, after checking that none was lost or doubled."""
    fill(url, args.jobs)
    spawn = multiprocessing.get_context("spawn")
    ready, go = spawn.Barrier(args.processes), spawn.Barrier(args.processes + 1)
    answers: Queue[tuple[int, float]] = spawn.Queue()
    team = [
        spawn.Process(target=body, args=(work, url, ready, go, answers))
        for _ in range(args.processes)
    ]
    for process in team:
        process.start()
    go.wait()
    begin = time.time()
    found = [answers.get(timeout=600) for _ in team]
    for process in team:
        process.join()
    if (total := sum(claims for claims, _ in found)) != args.jobs:
        raise RuntimeError(f"{total} claims of {args.jobs} jobs")
    jobs: int = args.jobs
    return jobs / (max(last for _, last in found) - begin)


def run(args: argparse.Namespace) -> list[Row]:
    """Every contender in turn, ``args.repeats`` times round."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        programs = find_programs()
        prefix = stack.enter_context(running_server(programs, durable=True)) if programs else None
        for turn in range(args.repeats):
            contenders: list[tuple[str, Callable[[str, int], None], Work, str]] = [
                ("sqlite", fill_ours, claim_ours, f"sqlite:///{folder}/{turn}.db")
            ]
            if prefix is not None:
                ours = _database(prefix, f"ours_{turn}")
                contenders.append(("postgres", fill_ours, claim_ours, ours))
                if importlib.util.find_spec("procrastinate"):
                    theirs = _database(prefix, f"theirs_{turn}")
                    contenders.append(
                        ("procrastinate", fill_procrastinate, claim_procrastinate, theirs)
                    )
            for name, fill, work, url in contenders:
                found.setdefault(name, []).append(measure(fill, work, url, args))
    return [
        Row(
            what=name,
            claims_per_s=round(statistics.median(speeds), 1),
            lowest=round(min(speeds), 1),
            highest=round(max(speeds), 1),
        )
        for name, speeds in found.items()
    ]


def _database(prefix: str, name: str) -> str:
    with psycopg.connect(f"{prefix}/postgres", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    return f"{prefix}/{name}"


def main() -> None:
    """Measure, then print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=2000, help="claimable jobs per run")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = run(args)
    facts: dict[str, Any] = {
        "jobs": args.jobs,
        "processes": args.processes,
        "repeats": args.repeats,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    if args.json:
        json.dump({**facts, "rows": [asdict(row) for row in rows]}, sys.stdout, indent=2)
        print()
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'queue':<16}{'claims/s':>10}{'lowest':>10}{'highest':>10}")
    for row in rows:
        print(f"{row.what:<16}{row.claims_per_s:>10}{row.lowest:>10}{row.highest:>10}")


if __name__ == "__main__":
    main()
