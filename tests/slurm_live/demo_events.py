"""What happens to the demo's hold while its jobs run: it is renewed, and one of its nodes is lost.

A thread does it; what it does is said as it happens and kept for the story at the end.
"""

import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from plexrl_slurm.cli.demo_runs import Submission
from plexrl_slurm.cli.demo_screen import read_lines
from plexrl_slurm.clock import now_us
from tests.slurm_live import processes
from tests.slurm_live.cluster import ClusterError, wait_for
from tests.slurm_live.demo_site import RENEW_BEFORE_S, DemoPartition
from tests.slurm_live.processes import Process

#: Steps of every job before the hold is renewed, and before the node is lost.
RENEW_AT, LOSE_AT = 2, 3
#: Engines that are real take their time to start, on two cores that others use too.
ENGINES_S = 400.0


class Stopped(Exception):
    """The jobs have ended otherwise; nobody waits for the events."""


@dataclass(slots=True)
class Facts:
    """What was seen, for the story and its check."""

    #: ``(when, sentence)``.
    said: list[tuple[int, str]] = field(default_factory=list)
    lost_node: str = ""
    lost_batch: bool = False
    renewed: str = ""
    refused_agent: str = ""
    #: From the loss until all jobs had WPGs again.
    recovered_us: int = 0


class Events:
    """One run of all events, in a thread of its own."""

    def __init__(
        self,
        partition: DemoPartition,
        jobs: Sequence[Submission],
        say: Callable[[str], None],
        *,
        lose_batch: bool,
    ) -> None:
        self.facts = Facts()
        self._partition, self._cluster = partition, partition.cluster
        self._jobs, self._say, self._lose_batch = jobs, say, lose_batch
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._future: Future[None] | None = None

    def start(self) -> None:
        self._future = self._pool.submit(self._run)

    def look(self) -> None:
        """Raise what the thread has raised."""
        if self._future is not None and self._future.done():
            self._future.result()

    def finish(self) -> Facts:
        """Wait for the last event."""
        if self._future is not None:
            self._future.result()
        self._pool.shutdown()
        return self.facts

    def stop(self) -> None:
        """Leave it wherever it is; a frozen process is let go."""
        self._stop.set()
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        try:
            self._renew()
            self._lose()
        except Stopped:
            pass

    # -- renewal -----------------------------------------------------------------------------
    def _renew(self) -> None:
        self._wait_steps(RENEW_AT)
        ((name, hold),) = self._partition.holds().items()
        minutes = (now_us() - int(hold["since_us"])) // 60_000_000 + 2
        limit = f"TimeLimit={minutes}"
        self._cluster.run("root", ["scontrol", "update", f"JobId={hold['slurm_id']}", limit])
        self._tell(
            f"hold {name} (Slurm job {hold['slurm_id']}) shall end after {minutes} minutes, which "
            f"is within {RENEW_BEFORE_S} s: the service renews it"
        )

        def renewed() -> bool:
            holds = self._partition.holds()
            return name not in holds or (holds[name]["limit_end_us"] or 0) > now_us() + 600_000_000

        self._wait(renewed, "the renewal of the hold", ENGINES_S)
        holds = self._partition.holds()
        if name in holds:
            self.facts.renewed = "extended"
            left = (int(holds[name]["limit_end_us"]) - now_us()) // 60_000_000
            self._tell(f"hold {name} was extended: Slurm ends it in {left} minutes now")
        else:
            self.facts.renewed = "replaced"
            self._tell(f"hold {', '.join(holds)} has replaced hold {name}, which was given back")

    # -- loss --------------------------------------------------------------------------------
    def _lose(self) -> None:
        self._wait_steps(LOSE_AT)
        wpg, batch_node = self._victim()
        node, hold = str(wpg["node"]), str(wpg["hold"])
        (agent,) = [
            each
            for each in self._partition.nodes()["agents"]
            if each["name"].startswith(f"{hold}.") and each["name"].endswith(f".{node}")
        ]
        self.facts.lost_node, self.facts.lost_batch = node, batch_node == node
        lost_us = now_us()
        frozen = self._cut_off(node, int(agent["pid"]))
        where = "the batch script of its hold too" if batch_node == node else "not the batch script"
        self._tell(
            f"node {node} is lost: slurmd, steps, ranks and shared memory ({where}); "
            f"its agent, pid {frozen.pid}, only hangs"
        )
        try:
            self._wait(
                lambda: self._cluster.node_state(node).startswith("down"),
                f"Slurm noticing that {node} is down",
                120,
            )
            self._tell(f"Slurm says that node {node} is {self._cluster.node_state(node)}")
            self._wait(lambda: self._recovered(node), "homes for all jobs", ENGINES_S)
            self.facts.recovered_us = now_us() - lost_us
            self._tell(
                f"all jobs have WPGs again, on {self._nodes()}, "
                f"{self.facts.recovered_us / 1e6:.0f} s after the loss"
            )
        finally:
            frozen.send(signal.SIGCONT)
        self._wait(lambda: not frozen.alive(), f"the end of the agent that was lost on {node}", 60)
        if f"agent={agent['name']} pid={frozen.pid}" not in self._refusals():
            raise ClusterError(f"the agent {agent['name']} ended, but nobody refused it")
        self.facts.refused_agent = str(agent["name"])
        self._tell(
            f"the lost agent came back, was refused for its epoch, and has ended (pid {frozen.pid})"
        )
        if self._lose_batch:
            self._wait(
                lambda: hold not in self._partition.holds(),
                f"another hold than {hold}, whose batch script is gone",
                ENGINES_S,
            )
            self._tell(f"hold {hold} was replaced by hold {', '.join(self._partition.holds())}")
        self._cluster.bring_back(node)
        self._tell(f"node {node} is repaired, empty: Slurm says {self._cluster.node_state(node)}")

    def _cut_off(self, node: str, agent: int) -> Process:
        """The node's power is cut for all but its agent, which the network does not reach."""
        everything = self._cluster.on_node(node)
        (frozen,) = [each for each in everything if each.pid == agent]
        processes.freeze(everything)
        self._cluster.kill_slurmd(node)
        processes.kill(everything - {frozen})
        for path in self._cluster.local_folders(node):
            shutil.rmtree(path, ignore_errors=True)
        return frozen

    def _victim(self) -> tuple[dict[str, Any], str]:
        """A training WPG in use, on the node of the batch script or not; and that node."""
        (hold,) = self._partition.holds()
        ((batch_node,),) = self._partition.query(
            f"select batch_node from holds where id = '{hold}'"
        )
        with self._partition.client() as client:
            homes = [name for job in client.jobs() for name in job["wpgs"]]
        found = [
            wpg
            for wpg in self._partition.wpgs().values()
            if wpg["pool"] == "train" and (wpg["node"] == batch_node) is self._lose_batch
        ]
        return max(found, key=lambda wpg: homes.count(wpg["id"])), str(batch_node)

    def _recovered(self, node: str) -> bool:
        wpgs = self._partition.wpgs()
        good = {name for name, wpg in wpgs.items() if wpg["state"] not in ("starting", "down")}
        with self._partition.client() as client:
            homes = {name for job in client.jobs() for name in job["wpgs"]}
        return homes <= good and node not in {wpg["node"] for wpg in wpgs.values()}

    def _nodes(self) -> str:
        return ", ".join(sorted({str(wpg["node"]) for wpg in self._partition.wpgs().values()}))

    def _refusals(self) -> str:
        return "\n".join(line for line in self._partition.log().splitlines() if "refused" in line)

    # -- waiting -----------------------------------------------------------------------------
    def _wait_steps(self, steps: int) -> None:
        def reached() -> bool:
            return all(len(read_lines(job.lines)) >= steps for job in self._jobs)

        self._wait(reached, f"step {steps} of every job", ENGINES_S)

    def _wait(self, check: Callable[[], Any], what: str, seconds: float) -> None:
        def look() -> bool:
            if self._stop.wait(0.2):
                raise Stopped
            return bool(check())

        wait_for(look, what, seconds=seconds)

    def _tell(self, sentence: str) -> None:
        self.facts.said.append((now_us(), sentence))
        self._say(sentence)
