"""How fast do published weights get into a resident vLLM, from the same node and from another?

    python benchmarks/state_weight_sync.py [--json] [--rounds N] [--size 100m|tiny]
        [--no-vllm] [--no-network]

Same node: a snapshot is in the memory of the node that published it; the agent's part finds it,
and the engine loads it through the worker extension and resets its prefix cache. Against vLLM's
own ``reload_weights`` of the same file and nothing else. Two snapshots take turns, so that every
load is one.

Another node: agent to agent over loopback TCP (proved, asked for, checked chunk by chunk, under
its name at last; the giving end has summed its file up when it was published), against a plain
``sendall``/``recv_into`` of the same bytes between two buffers that are there already. The giving
ends are processes of their own. Once into memory that an earlier snapshot had, as in a loop, once
into fresh memory.

Which of a pair comes first changes from round to round.
"""

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.daemons.snapshot_links import SnapshotLinks
from plexrl_slurm.daemons.snapshot_store import SnapshotStore
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.rank import die_with_parent
from plexrl_slurm.transport import messages as tm

KEY = b"benchmark" * 4
#: Two snapshots, by turns.
NAMES = ("a.v1", "a.v2")
ENDPOINT = "tcp://127.0.0.1:9"
Step = Callable[[], Awaitable[float]]


async def no_room(size: int) -> None:
    """Memory is not counted here."""


def links_in(folder: Path, agent: str) -> SnapshotLinks:
    """The snapshots of one agent."""
    store = SnapshotStore(folder, shared=folder / "shared", writer=agent)
    store.make()
    store.own()
    return SnapshotLinks(store, agent=agent, key=KEY, room=no_room, here=lambda *_: None)


def give(folder: Path, pipe: Connection) -> None:
    """The giving agent's process."""
    die_with_parent(os.getppid())

    async def run() -> None:
        links = links_in(folder, "gives")
        await links.start(ENDPOINT)
        for name in NAMES:  # as after a publish: summed up in the background
            links.published(name)
        pipe.send(links.source())
        await asyncio.Event().wait()

    asyncio.run(run())


def give_plainly(size: int, pipe: Connection) -> None:
    """Nothing but a socket; every connection gets all bytes."""
    die_with_parent(os.getppid())
    space = memoryview(mmap.mmap(-1, size))
    space[:] = os.urandom(1 << 20) * (size >> 20) + bytes(size & ((1 << 20) - 1))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname())
        while True:
            link, _ = listening.accept()
            with link:
                link.recv(1)
                link.sendall(space)


def started(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process, and what it says first."""
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(*arguments, far), daemon=True
    )
    process.start()
    return near.recv(), near


class Nodes:
    """Two snapshots with the giving agent, and the fetching one."""

    def __init__(self, folder: Path, weights: Path) -> None:
        self.folder = folder
        gives = SnapshotStore(folder / "gives", shared=None, writer="gives")
        gives.make()
        self.size = weights.stat().st_size
        for name in NAMES:
            shutil.copyfile(weights, gives.path(name))
        with gives.path(NAMES[1]).open("r+b") as file:  # other weights, equal names and shapes
            file.seek(-(self.size // 4), os.SEEK_END)
            tail = file.read()
            file.seek(-(self.size // 4), os.SEEK_END)
            file.write(tail[::-1][: len(tail) // 2 * 2])
        self.source, self._pipe = started(give, folder / "gives")
        self.fetches = links_in(folder / "fetches", "fetches")
        self.store = self.fetches._store
        self.hidden = tm.SnapshotSource(
            agent="gives", host=self.source.host, port=self.source.port, folder="", token=""
        )
        self._plain, _ = started(give_plainly, self.size)
        self._space = memoryview(mmap.mmap(-1, self.size))
        self._space[:] = bytes(self.size)

    def order(self, name: str, *, seen: bool) -> tm.SwitchOrder:
        """What the daemon says; ``seen``: it is the same node."""
        return tm.SwitchOrder(
            epoch=1,
            id="1",
            wpg="rollout-0",
            incarnation=1,
            incoming=name,
            sources=[self.source if seen else self.hidden],
            snapshot_bytes=self.size,
        )

    async def over_network(self, *, fresh: bool) -> float:
        """Seconds; ``fresh``: into memory that nobody had before."""
        if fresh:
            self.store.spare.unlink(missing_ok=True)
        began = time.perf_counter()
        await self.fetches.ready(self.order(NAMES[0], seen=False))
        took = time.perf_counter() - began
        self.store.drop(NAMES[0])
        return took

    async def plainly(self) -> float:
        """Seconds of the same bytes through a plain socket."""

        def receive() -> float:
            with socket.create_connection(self._plain) as link:
                began = time.perf_counter()
                link.sendall(b"x")
                at = 0
                while at < self.size:
                    at += link.recv_into(self._space[at:])
                return time.perf_counter() - began

        return await asyncio.to_thread(receive)


class Sampler:
    """A resident vLLM."""

    def __init__(self, nodes: Nodes, model: ModelSpec) -> None:
        from plexrl_slurm.engines.vllm import VllmEngine

        self._nodes, self._model = nodes, model
        self.engine = VllmEngine(
            RankSpec(
                wpg="rollout-0",
                engine="vllm",
                rank=0,
                world=1,
                gpus=1,
                master_port=0,
                agent="",
                models={model.name: model},
                options={"kv_cache_bytes": 64 << 20},
            )
        )
        self._turn = 0
        gives = nodes.folder / "gives" / "snapshots"
        #: vLLM's own way wants a folder.
        self._folders = [nodes.folder / name for name in NAMES]
        for name, folder in zip(NAMES, self._folders, strict=True):
            shutil.copytree(model.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
            (folder / "model.safetensors").hardlink_to(gives / f"{name}.safetensors")

    def _next(self) -> int:
        self._turn += 1
        return self._turn % len(NAMES)

    async def sync(self) -> float:
        """From the order to the switch, to the weights in the engine."""
        name = NAMES[self._next()]
        began = time.perf_counter()
        path = await self._nodes.fetches.ready(self._nodes.order(name, seen=True))
        await self.engine.load_snapshot(Path(path), model=self._model.name)
        return time.perf_counter() - began

    async def reload(self) -> float:
        """vLLM's own, and nothing else."""
        (slot,) = self.engine._slots.values()
        folder = str(self._folders[self._next()])
        began = time.perf_counter()
        await slot.engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        took = time.perf_counter() - began
        slot.key = None  # it is not what the engine believes
        return took


async def pairs(ours: Step, theirs: Step, rounds: int) -> dict[str, list[float]]:
    """Seconds of both in every round; one round before, to warm everything up."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(-1, rounds):
        both = [("ours", ours), ("theirs", theirs)]
        for name, step in both if number % 2 else reversed(both):
            took = await step()
            if number >= 0:
                seconds[name].append(took)
    return seconds


def report(size: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds, GB/s, and the share of the yardstick's speed in each pair."""
    shares = [100 * b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return {
        "bytes": size,
        "rounds": len(shares),
        "ours_ms": _spread([each * 1e3 for each in seconds["ours"]]),
        "yardstick_ms": _spread([each * 1e3 for each in seconds["theirs"]]),
        "ours_gb_s": round(size / statistics.median(seconds["ours"]) / 1e9, 2),
        "yardstick_gb_s": round(size / statistics.median(seconds["theirs"]) / 1e9, 2),
        "percent": _spread(shares),
        "percent_of_medians": round(
            100 * statistics.median(seconds["theirs"]) / statistics.median(seconds["ours"]), 1
        ),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
    }


def make_weights(folder: Path, size: str) -> tuple[ModelSpec, Path]:
    """A random model, and its file of weights."""
    from benchmarks.state_switch import make_model

    model = make_model(folder, size)
    (weights,) = Path(model.path).glob("*.safetensors")
    return model, weights


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    model, weights = await asyncio.to_thread(make_weights, folder, arguments.size)
    nodes = Nodes(folder, weights)
    found = {}
    rounds = arguments.rounds
    kinds = (("another node", False), ("another node, fresh memory", True))
    for name, fresh in () if arguments.no_network else kinds:

        async def fetch(fresh: bool = fresh) -> float:
            return await nodes.over_network(fresh=fresh)

        found[name] = report(nodes.size, await pairs(fetch, nodes.plainly, rounds))
    if not arguments.no_vllm:
        sampler = Sampler(nodes, model)
        await sampler.engine.start()
        try:
            both = await pairs(sampler.sync, sampler.reload, rounds)
            found["same node"] = report(nodes.size, both)
        finally:
            await sampler.engine.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", choices=("100m", "tiny"), default="100m")
    parser.add_argument("--no-vllm", action="store_true", help="only between nodes")
    parser.add_argument("--no-network", action="store_true", help="only on one node")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="plexrl-sync-") as folder:
        answer = asyncio.run(measure(Path(folder), arguments))
    if arguments.json:
        print(json.dumps(answer))
        return
    print(f"{'':28}{'ms':>8}{'yardstick':>10}{'GB/s':>7}{'%':>7}{'min':>7}{'max':>7}")
    for name, row in answer.items():
        share = row["percent"]
        print(
            f"{name:28}{row['ours_ms']['median']:>8}{row['yardstick_ms']['median']:>10}"
            f"{row['ours_gb_s']:>7}{share['median']:>7}{share['min']:>7}{share['max']:>7}"
        )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM leaves threads behind
