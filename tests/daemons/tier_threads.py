"""Threads that go on when a test says so, and pools that have none."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from tests.memory.faults import Stopped


class Worker:
    """A function in a thread that goes from one disk step to the next."""

    def __init__(self, work: Callable[[], Any], threads: dict[int, "Worker"]) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self.future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(work, threads))
        self._thread.start()

    def _run(self, work: Callable[[], Any], threads: dict[int, "Worker"]) -> None:
        threads[threading.get_ident()] = self
        self._go.acquire()
        try:
            self.future.set_result(work())
        except BaseException as problem:
            self.future.set_exception(problem)
        del threads[threading.get_ident()]
        self._back.release()

    def pause(self) -> None:
        """In the thread: let others go first."""
        self._back.release()
        self._go.acquire()

    def advance(self) -> None:
        """Until its next disk step, or its end."""
        self._go.release()
        self._back.acquire()
        if self.future.done():
            self._thread.join()


class Inline:
    """An executor that has done it when it says so."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> None:
        with suppress(Stopped):
            work(*arguments)

    def shutdown(self, *, wait: bool) -> None:
        """Nothing to wait for."""


class AtOnce:
    """A pool that does what it is given when it is asked for, in the thread that asks."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to wait for."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Later":
        return Later(work, arguments)


class Later:
    """What a pool would do meanwhile."""

    def __init__(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._work, self._arguments = work, arguments

    def result(self) -> Any:
        return self._work(*self._arguments)
