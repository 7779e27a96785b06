"""What would checksums cost in a switch, and what do they cost beside it?

    python -m benchmarks.state_sums [--json] [--mib 256] [--rounds 9]

One slab in shared memory. In turns, with one thread: a memcpy of its bytes, as a switch does it in
each direction; CRC-32C of the same bytes where they lie; and what the agent does while nothing
moves, reading the slab block by block. If a switch had to sum up what it moves, it would take as
long as a memcpy and a checksum.
"""

import argparse
import ctypes
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crc32c import crc32c

from plexrl_slurm.memory import sums
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor


def make_slab(folder: Path, size: int) -> Slab:
    """Complete, with something in it."""
    slab = Slab(folder / "slot-0.rank-0")
    header = slab.write(
        SlabHeader(
            deployment="a",
            progress=(1, 0),
            rank=0,
            world=1,
            architecture="none",
            tensors=(SlabTensor("state", "bytes", (size,), size),),
        )
    )
    (view,) = slab.views(header.tensors)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)), 7, size)
    slab.commit()
    return slab


def measure(folder: Path, size: int, rounds: int) -> dict[str, Any]:
    """Medians, in GB/s."""
    slab = make_slab(folder, size)
    whole = slab.whole()
    other = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    source = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    target = ctypes.addressof(ctypes.c_char.from_buffer(other))

    def in_place() -> None:
        for at in range(0, size, sums.BLOCK):
            crc32c(whole[at : at + sums.BLOCK])

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(target, source, size),
        "crc32c": in_place,
        "agent": lambda: sums.compute(slab.path, [], wanted=lambda: True),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(each) for name, each in took.items()}
    both = seconds["memcpy"] + seconds["crc32c"]
    return {
        "bytes": size,
        **{f"{name}_gb_s": round(size / each / 1e9, 2) for name, each in seconds.items()},
        "switch_with_sums_percent_of_memcpy": round(100 * seconds["memcpy"] / both, 1),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mib", type=int, default=256, help="size of the slab")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        found = measure(Path(name), asked.mib << 20, asked.rounds)
    if asked.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name:40}{value:>14,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
