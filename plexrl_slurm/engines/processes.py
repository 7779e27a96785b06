"""Processes that belong to an engine: who they are, and when one ends."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress


class Watch:
    """Says once, in the event loop, that one of some processes has ended."""

    def __init__(self, names: Mapping[int, str], ended: Callable[[str], None]) -> None:
        """``names``: what each is, by its pid; ``ended`` gets a sentence."""
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._open: dict[int, str] = {}
        for pid, name in names.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(ended, f"{name} (pid {pid}) has ended")
                continue
            self._open[descriptor] = f"{name} (pid {pid})"
            self._loop.add_reader(descriptor, self._tell, descriptor)

    def _tell(self, descriptor: int) -> None:
        name = self._open[descriptor]
        self.close()
        self._ended(f"{name} has ended")

    def close(self) -> None:
        """Say nothing any more."""
        for descriptor in self._open:
            self._loop.remove_reader(descriptor)
            with suppress(OSError):
                os.close(descriptor)
        self._open.clear()
