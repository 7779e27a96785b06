"""The store: transactions for coroutines, grouped, retried, and honest about failure."""

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import DatabaseUnavailable, NotFound
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from tests.db.builders import add_job


def test_what_was_answered_is_committed(engine: Engine) -> None:
    async def scenario() -> None:
        async with Store(engine) as store:
            job = await store.run(add_job, priority=5)
            with transaction(engine) as other:
                assert queue.get(other, job).priority == 5
            assert (await store.read(queue.get, job)).priority == 5

    asyncio.run(scenario())


def test_a_failure_fails_only_its_own_caller(engine: Engine) -> None:
    def broken(session: Session) -> None:
        add_job(session, name="never")
        session.execute(text("INSERT INTO job_events (job_id, at_us, kind, text) "
                             "VALUES (999, 0, 'x', 'x')"))  # fmt: skip

    async def scenario() -> None:
        async with Store(engine) as store:
            tasks: list[Awaitable[object]] = [store.run(add_job, name=f"job-{n}") for n in range(5)]
            tasks[2:2] = [store.run(broken), store.run(queue.get, JobId(-1))]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            kinds = [type(answer) for answer in answers]
            assert kinds == [int, int, IntegrityError, NotFound, int, int, int]
            names = [row.name for row in await store.run(queue.list_jobs)]
            assert names == [f"job-{n}" for n in range(5)]

    asyncio.run(scenario())


def test_rows_are_detached_copies(engine: Engine) -> None:
    async def scenario() -> None:
        async with Store(engine) as store:
            job = await store.run(add_job)
            before: JobRow = await store.run(queue.get, job)
            await store.run(queue.set_reason, job, reason="new")
            after = await store.run(queue.get, job)
            assert (before.reason, after.reason) == ("waits for its turn", "new")

    asyncio.run(scenario())


def test_many_waiters_share_few_commits(engine: Engine) -> None:
    gate = threading.Event()
    transactions: list[int] = []

    def hold_up(session: Session) -> None:
        gate.wait(10)

    def identify(session: Session) -> None:
        transactions.append(id(session.get_transaction()))

    async def scenario() -> None:
        async with Store(engine) as store:
            first = asyncio.create_task(store.run(hold_up))
            await asyncio.sleep(0.05)
            others = [asyncio.create_task(store.run(identify)) for _ in range(40)]
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(first, *others)

    asyncio.run(scenario())
    assert len(transactions) == 40 and len(set(transactions)) == 1


def test_a_busy_database_is_tried_again(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/plexrl.db", patience_us=20_000)
    upgrade(engine)
    holder = sqlite3.connect(tmp_path / "plexrl.db", check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")

    async def scenario() -> None:
        async with Store(engine) as store:
            asked = asyncio.create_task(store.run(add_job))
            await asyncio.sleep(0.15)
            assert not asked.done()
            holder.rollback()
            assert await asked == 1

    asyncio.run(scenario())
    holder.close()
    engine.dispose()


def test_a_database_that_stays_locked_is_reported_to_every_waiter(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/plexrl.db", patience_us=20_000)
    upgrade(engine)
    holder = sqlite3.connect(tmp_path / "plexrl.db")
    holder.execute("BEGIN IMMEDIATE")

    async def scenario() -> None:
        async with Store(engine, patience_us=100_000) as store:
            asked = [store.run(add_job) for _ in range(3)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(answer) for answer in answers] == [DatabaseUnavailable] * 3
            assert "locked" in str(answers[0])
            holder.rollback()
            assert await store.run(add_job) == 1

    asyncio.run(scenario())
    holder.close()
    engine.dispose()


def test_a_cut_connection_is_replaced(engine: Engine) -> None:
    if engine.dialect.name != "postgresql":
        return  # a file has no connection that somebody could cut

    async def scenario() -> None:
        async with Store(engine) as store:
            await store.run(add_job)
            with engine.connect() as admin:
                admin.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE "
                        "datname = current_database() AND pid <> pg_backend_pid()"
                    )
                )
            assert await store.run(add_job) == 2

    asyncio.run(scenario())


def test_closing_finishes_what_is_queued(engine: Engine) -> None:
    async def scenario() -> None:
        store = Store(engine)
        waiting = [asyncio.create_task(store.run(add_job)) for _ in range(10)]
        await asyncio.sleep(0)
        await store.close()
        await store.close()
        assert len(await asyncio.gather(*waiting)) == 10
        with pytest.raises(DatabaseUnavailable, match="closed"):
            await store.run(add_job)

    asyncio.run(scenario())


def test_a_caller_that_left_does_not_disturb_the_others(engine: Engine) -> None:
    async def scenario() -> None:
        async with Store(engine) as store:
            gone, stays = (asyncio.create_task(store.run(add_job)) for _ in range(2))
            await asyncio.sleep(0)
            gone.cancel()
            assert await stays
            assert len(await store.run(queue.list_jobs)) == 2

    asyncio.run(scenario())
