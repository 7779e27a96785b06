"""How much of reading an image from NVMe does the scheduler's hint hide?

    python benchmarks/state_prefetch.py [--json] [--rounds N] [--mib 256] [--folder DIR]

The agent's tiers as they are, one rank, images in shared memory and on the disk. Every round
switches to an image that is only on NVMe three times: with no hint; after a hint and a gap of
twice what the read took; and to one that is in memory anyway. What is timed is the agent's part
of the switch, until the ranks could copy. Hidden = (none - hinted) / (none - in memory), for
each round; the order of the first two changes from round to round.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor, used_bytes
from plexrl_slurm.transport import messages as tm

WPG = "train-0"
NAMES = ("a", "b", "c", "d")


def write(path: Path, name: str, size: int) -> None:
    """What the rank does in a save."""
    slab = Slab(path)
    header = slab.write(
        SlabHeader(
            deployment=name, progress=(1, 0), rank=0, world=1, architecture="none",
            tensors=(SlabTensor("state", "bytes", (size,), size),),
        )
    )  # fmt: skip
    (view,) = slab.views(header.tensors)
    piece = os.urandom(1 << 20)
    for at in range(0, size, 1 << 20):
        view[at : at + (1 << 20)] = piece[: min(1 << 20, size - at)]
    slab.commit()


async def make(memory: Path, disk: Path, size: int) -> HostTier:
    """Four images: memory for two of them and a slab to write into, a copy of each on disk."""
    room = size + (1 << 20)
    tier = HostTier(
        memory / "host" / "n" / "h", snapshots=memory / "snapshots", writer="w",
        nvme=NvmeTier(disk / "nvme" / "n" / "h", limit=9 * room, shared=True),
        host_bytes=3 * room,
    )  # fmt: skip
    await tier.own()
    tier.store(WPG, 1)
    for name in NAMES:
        order = tm.SaveOrder(
            epoch=1, id="1", wpg=WPG, incarnation=1, deployment=name, progress=(1, 0)
        )
        passage = await tier.begin_save(order)
        write(passage.saves[0], name, size)
        tier.end(passage, name, (1, 0), ok=True)
        await tier.idle(quiet=lambda: True)
    return tier


async def switch(tier: HostTier, name: str) -> float:
    """Seconds until the image of ``name`` could be copied to the device."""
    order = tm.SwitchOrder(epoch=1, id="1", wpg=WPG, incarnation=1, incoming=name)
    start = time.perf_counter()
    passage = await tier.begin_switch(order)
    seconds = time.perf_counter() - start
    if passage is None:
        raise SystemExit(f"the image of {name} is lost")
    tier.end(passage, "", (0, 0), ok=True)
    return seconds


def below(tier: HostTier) -> str:
    """An image that is not in memory."""
    held = {each.deployment for each in tier.store(WPG).held()}
    return next(name for name in NAMES if name not in held)


async def hint(tier: HostTier, name: str) -> None:
    """What the agent does when it hears of it."""
    order = tm.ExpectOrder(epoch=1, wpg=WPG, deployment=name)
    await tier.expect(order, quiet=lambda: True)


async def measure(tier: HostTier, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round."""
    found: dict[str, list[float]] = {"none": [], "hinted": [], "memory": []}
    gap = await switch(tier, below(tier))
    await tier.idle(quiet=lambda: True)
    for number in range(-1, rounds):
        seconds: dict[str, float] = {}
        for kind in ("none", "hinted") if number % 2 else ("hinted", "none"):
            name = below(tier)
            if kind == "hinted":
                preparing = asyncio.create_task(hint(tier, name))
                await asyncio.sleep(2 * gap)
            seconds[kind] = await switch(tier, name)
            if kind == "hinted":
                await preparing
                seconds["memory"] = await switch(tier, name)
                await hint(tier, "")
            await tier.idle(quiet=lambda: True)
        gap = max(gap, seconds["none"])
        if number >= 0:
            for kind, value in seconds.items():
                found[kind].append(value)
    return found


def report(found: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Median, worst and best of each."""
    triples = zip(found["none"], found["hinted"], found["memory"], strict=True)
    hidden = [100 * (none - hinted) / (none - memory) for none, hinted, memory in triples]
    answer: dict[str, Any] = {"bytes": size, "rounds": len(hidden)}
    for kind, values in found.items():
        answer[f"{kind}_ms"] = _spread([1000 * value for value in values], 2)
    answer["hidden_percent"] = _spread(hidden, 1)
    return answer


def _spread(values: list[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=256, help="size of an image")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as disk,
        tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
    ):

        async def whole() -> dict[str, Any]:
            tier = await make(Path(memory), Path(disk), arguments.mib << 20)
            size = used_bytes(tier.store(WPG).paths(next(iter(tier.store(WPG).held())).slot)[0])
            answer = report(await measure(tier, arguments.rounds), size)
            shutil.rmtree(memory, ignore_errors=True)
            return answer

        answer = asyncio.run(whole())
        Path(memory).mkdir(exist_ok=True)
    if arguments.json:
        print(json.dumps(answer))
        return
    print(f"image of {answer['bytes'] / 1e9:.2f} GB, {answer['rounds']} rounds, ms")
    print(f"{'':12}{'median':>9}{'min':>9}{'max':>9}")
    for kind in ("none", "hinted", "memory"):
        row = answer[f"{kind}_ms"]
        print(f"{kind:12}{row['median']:>9}{row['min']:>9}{row['max']:>9}")
    share = answer["hidden_percent"]
    print(f"hidden: {share['median']} % of the read ({share['min']} to {share['max']})")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
