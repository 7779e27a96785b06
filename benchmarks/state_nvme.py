"""How fast does an image go to a disk and back, against direct I/O of the same bytes?

    python benchmarks/state_nvme.py [--json] [--rounds N] [--mib 1344] [--folder DIR]

An image of one rank in shared memory. Every round writes it with its checksums (manifest, fsync
and rename included) and reads it back, checked; and moves as many bytes in the same blocks at the
same depth between a buffer and a file, and nothing else: with fio (libaio, direct, fsync) where it
is installed, else with threads of its own (O_DIRECT, fsync). Which of the two comes first changes
from round to round.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plexrl_slurm.memory import nvme
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor, used_bytes


def make_slab(path: Path, size: int) -> int:
    """A complete slab of random bytes; the bytes of its file."""
    slab = Slab(path)
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
    for at in range(0, size, 1 << 20):
        view[at : at + (1 << 20)] = os.urandom(min(1 << 20, size - at))
    slab.commit()
    return used_bytes(path)


def plain(path: Path, space: memoryview, *, writing: bool) -> None:
    """The same blocks by as many threads, without anything that makes an image of them."""
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    descriptor = os.open(path, flags, 0o600)
    try:
        if writing:
            os.posix_fallocate(descriptor, 0, len(space))

        def move(at: int) -> None:
            block = space[at : at + nvme.BLOCK]
            moved = (
                os.pwrite(descriptor, block, at) if writing else os.preadv(descriptor, [block], at)
            )
            if moved != len(block):
                raise SystemExit(f"{path}: {moved} of {len(block)} bytes were moved")

        with ThreadPoolExecutor(nvme.DEPTH) as pool:
            list(pool.map(move, range(0, len(space), nvme.BLOCK)))
        if writing:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fio(path: Path, size: int, *, writing: bool) -> float:
    """Seconds that fio needs for the same blocks; its start is not in them."""
    blocks = -(-size // nvme.BLOCK)
    command = [
        "fio", "--name=plain", f"--filename={path}", f"--rw={'write' if writing else 'read'}",
        f"--bs={nvme.BLOCK}", f"--size={blocks * nvme.BLOCK}", f"--iodepth={nvme.DEPTH}",
        "--ioengine=libaio", "--direct=1", "--output-format=json",
        *([f"--fsync={blocks}"] if writing else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    job = json.loads(done.stdout)["jobs"][0]["write" if writing else "read"]
    return size / float(job["bw_bytes"])


def timed(action: Callable[[], object]) -> float:
    """Seconds: what the action says, or what it took."""
    start = time.perf_counter()
    said = action()
    return said if isinstance(said, float) else time.perf_counter() - start


def measure(slabs: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of every round."""
    source, target = [slabs / "from"], [slabs / "to"]
    size = make_slab(source[0], arguments.mib << 20)
    space = memoryview(mmap.mmap(-1, size))
    space[:] = source[0].read_bytes()
    image, file = folder / "image", folder / "plain"
    rates: dict[str, list[float]] = {
        "write": [],
        "plain_write": [],
        "read": [],
        "plain_read": [],
    }

    def other(*, writing: bool) -> float | None:
        if arguments.yardstick == "fio":
            return fio(file, size, writing=writing)
        return plain(file, space, writing=writing)

    actions: dict[str, Callable[[], object]] = {
        "write": lambda: nvme.write_image(image, source, owner="o"),
        "plain_write": lambda: other(writing=True),
        "read": lambda: nvme.read_image(image, target, owner="o"),
        "plain_read": lambda: other(writing=False),
    }
    for number in range(-1, arguments.rounds):  # one round to warm everything up
        shutil.rmtree(image, ignore_errors=True)
        file.unlink(missing_ok=True)
        for kind in ("write", "read"):
            pair = [kind, f"plain_{kind}"]
            for name in pair if number % 2 else reversed(pair):
                seconds = timed(actions[name])
                if number >= 0:
                    rates[name].append(size / seconds / 1e9)
    rates["bytes"] = [float(size)]
    return rates


def report(rates: dict[str, list[float]], yardstick: str) -> dict[str, Any]:
    """Median, worst and best of each, and the share of plain in each pair."""
    answer: dict[str, Any] = {
        "bytes": int(rates.pop("bytes")[0]),
        "depth": nvme.DEPTH,
        "yardstick": yardstick,
    }
    for name, values in rates.items():
        answer[name] = _spread(values, 2)
    for name in ("write", "read"):
        pairs = zip(rates[name], rates[f"plain_{name}"], strict=True)
        answer[f"{name}_percent_of_plain"] = _spread(
            [100 * ours / theirs for ours, theirs in pairs], 1
        )
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
    parser.add_argument(
        "--mib", type=int, default=1344, help="size of the image; a 100M-parameter training image"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--slabs", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    found = "fio" if shutil.which("fio") else "own"
    parser.add_argument("--yardstick", choices=("fio", "own"), default=found)
    arguments = parser.parse_args()
    wanted, free = 5 * arguments.mib << 19, shutil.disk_usage(arguments.folder).free
    if free < wanted:  # the image, as many plain bytes, and some more
        raise SystemExit(f"{arguments.folder} has {free} bytes free, and {wanted} are needed")
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        tempfile.TemporaryDirectory(dir=arguments.slabs) as slabs,
    ):
        answer = report(measure(Path(slabs), Path(folder), arguments), arguments.yardstick)
    if arguments.json:
        print(json.dumps(answer))
        return
    print(f"image of {answer['bytes'] / 1e9:.2f} GB, depth {answer['depth']}, GB/s")
    print(f"plain: {'fio, libaio' if answer['yardstick'] == 'fio' else 'threads of its own'}")
    print(f"{'':12}{'median':>8}{'min':>8}{'max':>8}")
    for name in ("plain_write", "write", "plain_read", "read"):
        row = answer[name]
        print(f"{name:12}{row['median']:>8}{row['min']:>8}{row['max']:>8}")
    for name in ("write", "read"):
        share = answer[f"{name}_percent_of_plain"]
        print(f"{name}: {share['median']} % of plain ({share['min']} to {share['max']})")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
