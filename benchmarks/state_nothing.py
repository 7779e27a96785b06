"""What does the state manager cost a function when nothing needs to move?

    python -m benchmarks.state_nothing [--json] [--calls N] [--images N]

One agent with its host tier, an NVMe tier and images of other deployments in it, and one rank
with a fake engine. The same trivial function of the resident deployment, in turn: straight to an
engine in this process; to the rank, without an agent's books; and as the daemon orders it. What
the last takes beyond the one before is the state manager's. Then a partition with one job: no
function of it may move a byte or touch an image.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.function_overhead import Http, begin, call_body
from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.daemons.agent_config import AgentConfig
from plexrl_slurm.daemons.agentd import Agent
from plexrl_slurm.engines import ranklink
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.fake import FakeTrainEngine
from plexrl_slurm.transport import messages as tm
from tests.model_folders import make_model_folder
from tests.scenarios.partition import Job, running

WPG = "train-0"
MODEL = ModelSpec(
    name="tiny",
    path="",
    dtype="float32",
    max_context_length=256,
    vocab_size=64,
    parameters=1000,
    architecture="tiny",
)


def body() -> wire.ForwardBackward:
    """One short datum."""
    tokens = wire.Array.of(np.arange(4, 7, dtype=np.int64))
    weights = wire.Array.of(np.ones(3, dtype=np.float32))
    datum = wire.Datum(tokens=tokens, inputs={"target_tokens": tokens, "weights": weights})
    return wire.ForwardBackward(data=[datum], loss_fn="cross_entropy", forward_only=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds: by the clock, and of this thread alone, which others do not disturb."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Cost":
        return cls(time.perf_counter() * 1e6, time.thread_time() * 1e6)

    @classmethod
    def since(cls, start: "Cost") -> "Cost":
        now = cls.now()
        return cls(now.wall - start.wall, now.cpu - start.cpu)


class Node:
    """An agent in this process, and its rank beside it."""

    def __init__(self, folder: Path) -> None:
        self.agent = Agent(
            AgentConfig(
                agent="h.0.n",
                hold="h",
                node="n",
                endpoint="tcp://127.0.0.1:9",
                state_dir=str(folder / "state"),
                host_dir=str(folder / "host"),
                host_bytes=1 << 30,
                nvme_dir=str(folder / "nvme"),
                nvme_bytes=1 << 30,
            )
        )
        self.done: list[tm.Done] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._number = 0

    async def start(self) -> None:
        agent = self.agent
        await agent._tier.own()
        self._tasks.append(asyncio.create_task(agent._hear_ranks()))

        async def report(report: Any) -> None:
            if isinstance(report, tm.Done):
                agent._running.pop(report.order, None)
                self.done.append(report)

        agent._report = report  # type: ignore[method-assign]  # no daemon listens
        config = tm.WpgConfig(name=WPG, engine="fake_train", world=1, gpus=1, options={}, cores=[])
        agent._welcome(
            tm.Welcome(
                epoch=1,
                wpgs=[config],
                models={"tiny": asdict(MODEL)},
                deployments=[],
                snapshots=[],
            )
        )
        for _ in range(600):
            if agent._gangs[WPG].state == "up":
                return
            await asyncio.sleep(0.05)
        raise SystemExit("the rank did not come up")

    async def run(self, deployment: str, what: wire.Body) -> Cost:
        """From the order to its report."""
        self._number += 1
        order = tm.RunOrder(
            epoch=1,
            id=f"o{self._number}",
            wpg=WPG,
            incarnation=1,
            call=f"c{self._number}",
            part=0,
            deployment=deployment,
            seq=self._number,
            parts=1,
            body=wire.encode(what),
        )
        self.agent._running[order.id] = (WPG, order.call, 0)
        start = Cost.now()
        await self.agent._run(order)
        return Cost.since(start)

    async def save(self, deployment: str) -> None:
        self._number += 1
        order = tm.SaveOrder(
            epoch=1,
            id=f"o{self._number}",
            wpg=WPG,
            incarnation=1,
            deployment=deployment,
            progress=(self._number, 0),
        )
        await self.agent._save(order)

    async def ask_rank(self, what: wire.Body) -> Cost:
        """The same hop, without anything that an agent keeps."""
        self._number += 1
        call = ranklink.Call(call="c", deployment="d", body=wire.encode(what))
        start = Cost.now()
        await self.agent._gangs[WPG].order(f"o{self._number}", [call])
        return Cost.since(start)

    async def stop(self) -> None:
        await self.agent._gangs[WPG].stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def one_node(folder: Path, calls: int, images: int) -> dict[str, Any]:
    """Microseconds of each way, in turn."""
    engine = FakeTrainEngine(
        RankSpec(
            wpg=WPG,
            engine="fake_train",
            rank=0,
            world=1,
            gpus=1,
            master_port=0,
            agent="",
            models={"tiny": MODEL},
            options={},
        )
    )
    engine.create("d", wire.Create(base_model="tiny"))
    node = Node(folder)
    await node.start()
    try:
        for number in range(images):
            await node.run(f"other-{number}", wire.Create(base_model="tiny"))
            await node.save(f"other-{number}")
        await node.run("d", wire.Create(base_model="tiny"))
        node.done.clear()
        before = slabs(folder)
        took: dict[str, list[Cost]] = {"engine": [], "rank": [], "agent": []}
        for number in range(-20, calls):
            start = Cost.now()
            engine.forward_backward(wire.decode_body(wire.encode(body())))  # type: ignore[arg-type]
            straight = Cost.since(start)
            order = [("rank", node.ask_rank(body())), ("agent", node.run("d", body()))]
            found = {"engine": straight}
            for name, work in order if number % 2 else reversed(order):
                found[name] = await work
            if number >= 0:
                for name, cost in found.items():
                    took[name].append(cost)
        moved = sum(done.moved_bytes for done in node.done)
        untouched = slabs(folder) == before
    finally:
        await node.stop()
    pairs = list(zip(took["agent"], took["rank"], strict=True))
    return {
        "calls": calls,
        "images": images,
        "moved_bytes": moved,
        "images_untouched": untouched,
        "state_manager_us": spread([agent.wall - rank.wall for agent, rank in pairs]),
        "state_manager_cpu_us": spread([agent.cpu - rank.cpu for agent, rank in pairs]),
        **{f"{name}_us": spread([cost.wall for cost in costs]) for name, costs in took.items()},
    }


def slabs(folder: Path) -> dict[str, int]:
    """All slabs, and when they were written last."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("slot-*")}


def one_partition(folder: Path, calls: int) -> dict[str, Any]:
    """A job that is alone on its WPG: what its functions leave in the host tier."""
    model = make_model_folder(folder / "model", max_position_embeddings=512)
    with running(folder, model=model) as partition:
        job = Job(partition, seed=1, models=["tiny"])
        http = Http(job)
        model_id = begin(http)
        for seq in range(1, calls + 1):
            data = call_body(model_id, seq, forward_only=False)
            answer = json.loads(http.post("forward_backward", data, "application/x-protobuf"))
            http.wait(answer["request_id"])
        written = len(partition.images())
        http.close()
    return {"calls": calls, "images_written": written}


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles, and what 95 % stay below."""
    low, middle, high = statistics.quantiles(values, n=4)
    p95 = sorted(values)[int(0.95 * (len(values) - 1))]
    named = {"median": middle, "q1": low, "q3": high, "p95": p95}
    return {name: round(value, 1) for name, value in named.items()}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--images", type=int, default=8, help="of other deployments")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("node", "partition"):
            (folder / part).mkdir()
        node = uvloop.run(one_node(folder / "node", asked.calls, asked.images))
        alone = one_partition(folder / "partition", 50)
    if asked.json:
        print(json.dumps({"node": node, "partition": alone}))
        return 0
    print(f"{'us per function':34}{'median':>8}{'q1':>8}{'q3':>8}{'p95':>8}")
    for key, text in (
        ("engine_us", "straight to the engine"),
        ("rank_us", "to a rank"),
        ("agent_us", "as the daemon orders it"),
        ("state_manager_us", "added by the state manager"),
        ("state_manager_cpu_us", "that in CPU time"),
    ):
        row = node[key]
        print(f"{text:34}{row['median']:>8}{row['q1']:>8}{row['q3']:>8}{row['p95']:>8}")
    print(
        f"{node['calls']} functions beside {node['images']} images: {node['moved_bytes']} bytes "
        f"moved, images {'untouched' if node['images_untouched'] else 'CHANGED'}; a job alone, "
        f"{alone['calls']} functions: {alone['images_written']} images written"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
