"""The database for asyncio callers: one thread, one connection, group commits.

Functions that arrive while a transaction is under way share the next one; their futures
resolve after its commit, so what was answered is kept.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import DatabaseUnavailable
from plexrl_slurm.db.engine import (
    PATIENCE_US,
    database_errors,
    is_lost,
    make_session,
    shown,
    transaction,
    transient,
    unavailable_reason,
)

P = ParamSpec("P")
T = TypeVar("T")

#: So many functions share a transaction at most.
BATCH = 64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_CUT = (
    "the connection broke during a commit, so it is not known whether the last rows were kept; "
    "restart the daemon, which reads what is there"
)


@dataclass(slots=True, kw_only=True)
class _Task:
    """A function that waits for its transaction."""

    run: Callable[[Session], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class Store:
    """Runs functions of a ``Session`` in transactions, for coroutines.

    A function may be run again after a rollback, so it touches nothing but the database.
    Rows it returns are detached copies: they never change and load nothing.
    """

    def __init__(self, engine: Engine, *, patience_us: int = PATIENCE_US) -> None:
        self._engine, self._patience_us = engine, patience_us
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="plexrl-db", daemon=True)
        self._thread.start()

    async def run(
        self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call ``function(session, ...)`` in a transaction; returns once it is committed."""
        if self._closed:
            raise DatabaseUnavailable(shown(self._engine.url), "this store was closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call(session: Session) -> T:
            return function(session, *args, **kwargs)

        self._tasks.put(_Task(run=call, loop=loop, future=future))
        return await future

    async def read(
        self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function that only reads and may take long, beside the writers."""

        def call() -> T:
            with transaction(self._engine, read_only=True) as session:
                return function(session, *args, **kwargs)

        return await asyncio.to_thread(call)

    async def close(self) -> None:
        """Finish what is queued, then end the thread. Closing again is harmless."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        last = False
        while not last:
            batch, last = self._gather()
            self._carry_out(batch)
            _resolve(batch)
        self._disconnect()

    def _gather(self) -> tuple[list[_Task], bool]:
        """Wait for one task, then take what else is there."""
        batch: list[_Task] = []
        task = self._tasks.get()
        while task is not None:
            batch.append(task)
            if len(batch) == BATCH or self._tasks.empty():
                return batch, False
            task = self._tasks.get()
        return batch, True

    def _carry_out(self, batch: list[_Task]) -> None:
        try:
            self._transact(batch)
        except DatabaseUnavailable as error:
            for task in batch:
                task.error = error
        except Exception as error:
            # One of them failed and took the others' transaction with it. That is rare, so
            # they run again one by one instead of paying for a savepoint each, always.
            for task in batch:
                if len(batch) > 1:
                    self._carry_out([task])
                else:
                    task.error = error

    def _transact(self, batch: list[_Task]) -> None:
        """One transaction, tried again for as long as somebody else is in the way."""
        deadline_us = now_us() + self._patience_us
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._attempt(batch)
            except DBAPIError as error:
                if is_lost(error):
                    self._disconnect()
                if not (transient(error) or is_lost(error)):
                    with database_errors(self._engine):
                        raise
                if now_us() + pause_s * 1e6 > deadline_us:
                    reason = unavailable_reason(error, patience_us=self._patience_us)
                    raise DatabaseUnavailable(
                        shown(self._engine.url), reason or str(error.orig)
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _attempt(self, batch: list[_Task]) -> None:
        if self._connection is None:
            self._connection = self._engine.connect()
        under_way = self._connection.begin()
        try:
            with make_session(self._connection) as session:
                for task in batch:
                    task.result = task.run(session)
                    session.flush()
                    session.expunge_all()
        except BaseException:
            under_way.rollback()
            raise
        try:
            under_way.commit()
        except DBAPIError as error:
            if is_lost(error):
                self._disconnect()
                raise DatabaseUnavailable(shown(self._engine.url), _CUT) from error
            under_way.rollback()
            raise

    def _disconnect(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()


def _resolve(batch: list[_Task]) -> None:
    """Hand results over, one wake-up per event loop."""
    for loop in {task.loop for task in batch}:
        if not loop.is_closed():
            loop.call_soon_threadsafe(_tell, [task for task in batch if task.loop is loop])


def _tell(tasks: list[_Task]) -> None:
    for task in tasks:
        if task.future.done():  # its caller was cancelled; the rows are kept all the same
            continue
        if task.error is not None:
            task.future.set_exception(task.error)
        else:
            task.future.set_result(task.result)
