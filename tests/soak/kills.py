"""Ends processes of a partition with ``kill -9``, by a schedule that its seed decides."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl_slurm.core.errors import PlexError
from tests.scenarios.partition import Partition, kill, wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """What to kill, and when."""

    #: After the partition was whole again.
    after_s: float
    #: A WPG, ``agent`` or ``daemon``.
    target: str
    #: Do not wait until it is whole before the next one.
    hasty: bool


#: How often each is killed, of a hundred blows.
SHARES = {"train-0": 45, "rollout-0": 25, "agent": 22, "daemon": 8}


def schedule(seed: int, mean_s: float) -> Callable[[], Blow]:
    """The next blow, each time it is called."""
    rng = random.Random(seed)

    def following() -> Blow:
        target = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
        hasty = target != "daemon" and rng.random() < 0.2
        return Blow(after_s=rng.uniform(0.2, 2 * mean_s), target=target, hasty=hasty)

    return following


class Killer:
    """Strikes until its time is over."""

    def __init__(
        self, partition: Partition, *, seed: int, mean_s: float, patience_s: float
    ) -> None:
        """``patience_s``: how long the partition may take to be whole again."""
        self._partition, self._patience_s = partition, patience_s
        self._next = schedule(seed, mean_s)
        self._whole = True
        #: What was killed, as the report has it.
        self.kills: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def count(self) -> dict[str, int]:
        """Kills of each kind."""
        targets = [each["target"] for each in self.kills]
        return {target: targets.count(target) for target in SHARES}

    def strike_until(self, over: Callable[[], bool]) -> None:
        """Raises ``AssertionError`` if the partition does not come back."""
        while not over():
            blow = self._next()
            if self._whole:
                self._wait()
            deadline = time.monotonic() + blow.after_s
            while time.monotonic() < deadline and not over():
                time.sleep(0.05)
            if not over():
                self._strike(blow)
        self._wait()

    def _wait(self) -> None:
        name = f"the partition to be whole again after {self.kills[-1:]}"
        wait_until(self._is_whole, seconds=self._patience_s, name=name)

    def _is_whole(self) -> bool:
        try:
            wpgs = self._partition.nodes()["wpgs"]
        except PlexError:  # a busy daemon may be late
            return False
        return bool(wpgs) and all(
            wpg["state"] not in ("down", "starting") and wpg["pids"] for wpg in wpgs
        )

    def _strike(self, blow: Blow) -> None:
        pid = self._pid(blow.target)
        if pid is None or not _alive(pid):
            return  # it has ended, and nobody has noticed yet
        at_s = round(time.monotonic() - self._began, 2)
        if blow.target == "daemon":
            self._partition.kill_daemon()
        else:
            try:
                kill(pid)
            except (FileNotFoundError, ProcessLookupError):
                return
        self.kills.append({"at_s": at_s, "target": blow.target, "pid": pid})
        self._whole = not blow.hasty
        if blow.target == "daemon":
            self._partition.start(seconds=self._patience_s)

    def _pid(self, target: str) -> int | None:
        if target == "daemon":
            assert self._partition.daemon is not None
            return self._partition.daemon.pid
        try:
            nodes = self._partition.nodes()
        except PlexError:
            return None
        if target == "agent":
            return int(nodes["agents"][0]["pid"]) if nodes["agents"] else None
        pids = [wpg["pids"] for wpg in nodes["wpgs"] if wpg["id"] == target]
        return int(pids[0][0]) if pids and pids[0] else None


def _alive(pid: int) -> bool:
    """Whether it is there and no zombie, which has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
