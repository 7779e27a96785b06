"""One WPG's processes, as its agent sees them: start, watch, restart, order, collect."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from plexrl_slurm.clock import now_us
from plexrl_slurm.daemons import agent_private, left_behind
from plexrl_slurm.engines import ranklink
from plexrl_slurm.engines.base import TRAIN_ENGINES
from plexrl_slurm.logs import say
from plexrl_slurm.memory.files import WRITER
from plexrl_slurm.transport.messages import WpgConfig

log = logging.getLogger(__name__)

#: Longest pause between two starts of a gang that does not come up.
MAX_BACKOFF_S = 30.0
#: Longest wait for a gang to come up, and for its answer to an order, unless the WPG's options
#: ``start_timeout_s`` and ``answer_timeout_s`` say otherwise.
PATIENCE_S = 3600.0
#: A rank's log is begun anew, when its gang starts, once it is larger.
LOG_BYTES = 16 << 20


@dataclass(slots=True)
class _Open:
    """An order that not every rank has answered yet."""

    future: "asyncio.Future[list[ranklink.Answer]]"
    answers: dict[int, ranklink.Answer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of one incarnation find each other."""

    address: str
    port: int
    #: Of an incarnation on several nodes: keeps the ranks of every other one out.
    name: str = ""


class GangLost(Exception):
    """The gang went down before it answered."""


class Gang:
    """The rank processes of one WPG."""

    def __init__(
        self,
        config: WpgConfig,
        *,
        models: Mapping[str, Mapping[str, Any]],
        endpoint: str,
        folder: Path,
        specs: Path,
        writer: str,
        send: Callable[[bytes, bytes], Awaitable[None]],
        changed: Callable[["Gang", str], None],
        devices: str = "",
    ) -> None:
        """``folder`` is for logs, ``specs`` for what ranks read at their start: this agent's only,
        for another node's gang may have the same name, or have had it and live on; ``writer``
        keeps apart what both write; ``devices``: CUDA_VISIBLE_DEVICES of its ranks; "": as the
        agent's."""
        self.config = config
        #: ``starting``, ``up`` or ``down``.
        self.state = "down"
        self.incarnation = 0
        self.pids: list[int] = []
        #: It is being woken; how often in a row it went down before it was awake.
        self.waking, self.lost_wakes = False, 0
        self._models, self._endpoint, self._folder = models, endpoint, folder
        self._specs, self._writer, self._devices = specs, writer, devices
        self._send, self._changed = send, changed
        self._processes: list[asyncio.subprocess.Process] = []
        #: Shared memory that must not outlive them.
        self._shared: set[str] = set()
        self._up: set[int] = set()
        self._open: dict[str, _Open] = {}
        self._reason = ""
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def trains(self) -> bool:
        """Whether it is a training gang."""
        return self.config.engine in TRAIN_ENGINES

    @property
    def processes(self) -> int:
        """Rank processes here; vLLM starts its tensor-parallel workers itself."""
        return len(self.config.ranks) if self.trains else 1

    @property
    def newest(self) -> int:
        """The last incarnation that was wanted."""
        return self.incarnation

    def start(self) -> None:
        """Keep the gang running from now on."""
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End it for good."""
        self._end.set()
        await self._kill()
        if self._task is not None:
            await self._task

    async def order(self, order_id: str, operations: list[ranklink.Operation]) -> Any:
        """Send one operation to each rank; their answers in rank order. Raises ``GangLost``."""
        if self.state != "up":
            raise GangLost(self.config.name)
        waiting = _Open(asyncio.get_running_loop().create_future())
        self._open[order_id] = waiting
        for rank, operation in enumerate(operations, self._first):
            data = ranklink.encode(ranklink.Order(order_id, operation))
            await self._send(self._identity(rank), data)
        patience_s = self._seconds("answer_timeout_s")
        try:
            async with asyncio.timeout(patience_s):
                return await waiting.future
        except TimeoutError:
            # It hangs (stopped, or waiting for a peer): only a new gang can go on.
            self._reason = f"no answer to an order within {patience_s:g} s"
            self._signal_all()
            raise GangLost(self._reason) from None

    async def abort(self, order_id: str, *, pause: bool = False) -> None:
        """Tell a sampling rank that nobody waits for ``order_id``, or to ``pause`` it."""
        if self.state == "up":
            what = ranklink.Pause(order_id) if pause else ranklink.Abort(order_id)
            order = ranklink.Order(f"abort {order_id}", what)
            await self._send(self._identity(0), ranklink.encode(order))

    def heard(self, identity: str, report: ranklink.Report) -> None:
        """A rank said something."""
        name, rank_text, incarnation = identity.rsplit("/", 2)
        if name != self.config.name or int(incarnation) != self.incarnation:
            return
        rank = int(rank_text)
        match report:
            case ranklink.Up():
                self._up.add(rank)
                if len(self._up) == self.processes:
                    self.state = "up"
                    self._note_shared()
                    self._changed(self, "")
            case ranklink.Fatal(reason=reason):
                self._reason = f"rank {rank}: {reason}"
            case ranklink.Answer():
                if (waiting := self._open.get(report.id)) is None:
                    return
                waiting.answers[rank] = report
                if len(waiting.answers) == self.processes:
                    del self._open[report.id]
                    if not waiting.future.done():
                        waiting.future.set_result(
                            [waiting.answers[rank] for rank in sorted(waiting.answers)]
                        )

    async def _keep_running(self) -> None:
        failures = 0
        while not self._ending():
            self.incarnation += 1
            began = now_us()
            came_up = await self._live()
            if self._ending():
                return
            failures = 0 if came_up else failures + 1
            pause = pause_after(max(failures, self.lost_wakes))
            say(
                log,
                "gang_down",
                wpg=self.config.name,
                reason=self._reason,
                lived_us=now_us() - began,
                pause_s=pause,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), pause)

    async def _live(self) -> bool:
        """One incarnation, from its start until none of its ranks is left; whether it came up."""
        self.state, self._up, self._reason = "starting", set(), ""
        came_up = False
        try:
            await self._spawn()
        except OSError as problem:
            self._reason = f"cannot start: {problem}"
            await self._kill()
        else:
            if not self._ending():  # it was not ended while it started
                self._changed(self, "")
                exits = [asyncio.create_task(process.wait()) for process in self._processes]
                await self._wait_for_an_end(exits)
                self._note_exit()
            came_up = self.state == "up"
            await self._kill()
        self.state, self.pids = "down", []
        self.lost_wakes += self.waking
        for waiting in self._open.values():
            if not waiting.future.done():
                waiting.future.set_exception(GangLost(self._reason))
        self._open.clear()
        if not self._ending():
            self._changed(self, self._reason)
        return came_up

    async def _wait_for_an_end(self, exits: "list[asyncio.Task[int]]") -> None:
        """Until a rank ends, or the gang has not come up in time."""
        patience_s = self._seconds("start_timeout_s")
        first = asyncio.FIRST_COMPLETED
        ended, _ = await asyncio.wait(exits, timeout=patience_s, return_when=first)
        if not ended and self.state != "up":
            self._reason = f"did not come up within {patience_s:g} s"
        elif not ended:
            await asyncio.wait(exits, return_when=first)

    def _seconds(self, option: str) -> float:
        return float(self.config.options.get(option, PATIENCE_S))

    def _ending(self) -> bool:
        """Read anew after an await: somebody may have asked for the end meanwhile."""
        return self._end.is_set()

    def _note_exit(self) -> None:
        for rank, process in enumerate(self._processes, self._first):
            if process.returncode is None:
                continue
            code = process.returncode
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._reason = self._reason or f"rank {rank} (pid {process.pid}) ended with {how}"

    async def _spawn(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        meeting = self._meeting()
        self._processes = []
        environment = os.environ | {
            "OMP_NUM_THREADS": str(max(1, len(self.config.cores) // self.processes)),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # A rank of an earlier start may live on and write.
            WRITER: meeting.name or f"{self._writer}.{self.incarnation}",
            **agent_private.scratch(self._specs),
        }
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        for rank in range(self._first, self._first + self.processes):
            spec = {
                "wpg": self.config.name,
                "engine": self.config.engine,
                "rank": rank,
                "world": self.config.world,
                "gpus": self.config.gpus,
                "first": self._first,
                "master_address": meeting.address,
                "master_port": meeting.port,
                "meeting": meeting.name,
                "agent": self._endpoint,
                "parent": os.getpid(),
                "models": self._models,
                "options": self.config.options,
                "cores": self._cores(rank),
                "asleep": bool(self.config.group),
                "identity": self._identity(rank).decode(),
            }
            path = self._specs / f"{self.config.name}.rank-{rank}.json"
            path.write_text(json.dumps(spec), encoding="utf-8")
            with open_log(self._folder / f"{self.config.name}.rank-{rank}.log") as output:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "plexrl_slurm.engines.rank",
                    str(path),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
            self._processes.append(process)
        self.pids = [process.pid for process in self._processes]

    def _cores(self, rank: int) -> list[int]:
        """A fair share of the WPG's cores for each rank."""
        cores = self.config.cores
        if len(cores) < self.processes:
            return list(cores)
        share, number = len(cores) // self.processes, rank - self._first
        return list(cores[number * share : (number + 1) * share])

    @property
    def _first(self) -> int:
        return self.config.ranks.start

    def _meeting(self) -> Meeting:
        """Where the ranks of an incarnation find each other."""
        return Meeting(address="127.0.0.1", port=free_port())

    def _signal_all(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _kill(self) -> None:
        self._note_shared()
        self._signal_all()
        for process in self._processes:
            await process.wait()
        left_behind.remove(self._shared)
        self._shared.clear()
        self._notes.unlink(missing_ok=True)

    def _note_shared(self) -> None:
        self._shared |= left_behind.mapped_by(process.pid for process in self._processes)
        if self._shared:
            left_behind.note(self._notes, self._shared)

    @property
    def _notes(self) -> Path:
        return self._specs / f"{self.config.name}.shared"

    def _identity(self, rank: int) -> bytes:
        return f"{self.config.name}/{rank}/{self.incarnation}".encode()


def open_log(path: Path) -> BinaryIO:
    """Append to a log; a long one gets out of the way first, and replaces the one before."""
    if path.exists() and path.stat().st_size > LOG_BYTES:
        path.rename(path.with_name(f"{path.name}.old"))
    return path.open("ab")


def free_port(address: str = "127.0.0.1") -> int:
    """One that nobody listens at; "": at none of this machine's addresses."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def pause_after(failures: int) -> float:
    """Seconds before the next start, after so many in a row that failed."""
    return min(MAX_BACKOFF_S, 0.0 if failures == 0 else 0.5 * 2**failures)
