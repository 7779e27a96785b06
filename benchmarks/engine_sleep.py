"""What does it cost a rollout WPG to switch to a model of another architecture?

One rank with two vLLM engines of a 100M-parameter model that count as two architectures: one is
awake, the other sleeps. Yardsticks in the same run: a reload without a switch, and the start of an
engine, which is what a switch cost before engines slept.

    python -m benchmarks.engine_sleep MODEL_FOLDER [--switches 5] [--kv-cache-mib 512]
"""

import argparse
import asyncio
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.vllm import VllmEngine
from plexrl_slurm.model_folder import read_model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds and bytes of one run."""

    start: float
    switches: list[float]
    reloads: list[float]
    #: Anonymous memory of the first engine's process.
    awake_bytes: int
    asleep_bytes: int
    #: Weights and KV cache by the engine's own books.
    device_bytes: int


def model_of(folder: Path) -> ModelSpec:
    """A catalogue entry for the folder."""
    found = read_model_folder(folder)
    return ModelSpec(
        name="a",
        path=str(folder),
        dtype=found.dtype,
        max_context_length=min(512, found.max_position_embeddings),
        vocab_size=found.vocab_size,
        parameters=found.parameters,
        architecture="a",
    )


async def timed(work: Awaitable[object]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file stands behind."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


async def measure(a: ModelSpec, other: Path, *, switches: int, kv_cache_bytes: int) -> Figures:
    """``other``: weights of the same shapes as those in the folder of ``a``."""
    b = replace(a, name="b", architecture="b")
    engine = VllmEngine(
        RankSpec(
            wpg="rollout-0",
            engine="vllm",
            rank=0,
            world=1,
            gpus=1,
            master_port=0,
            agent="",
            models={"a": a, "b": b},
            options={"kv_cache_bytes": kv_cache_bytes},
        )
    )
    await engine.start()
    (process,) = multiprocessing.active_children()
    files = [Path(a.path), other]
    reloads = [
        await timed(engine.load_snapshot(files[number % 2], model="a"))
        for number in range(1, 2 * switches + 1)
    ]
    device, awake = (await engine.memory()).used, anonymous_bytes(process.pid or 0)
    start = await timed(engine.load_snapshot(Path(b.path), model="b"))
    asleep = anonymous_bytes(process.pid or 0)
    found = []
    for _ in range(switches):
        found += [await timed(engine.load_snapshot(other, model=model)) for model in ("a", "b")]
    await engine.close()
    return Figures(
        start=start,
        switches=found,
        reloads=reloads,
        awake_bytes=awake,
        asleep_bytes=asleep,
        device_bytes=device,
    )


def report(figures: Figures) -> None:
    """The table."""
    reload, switch = statistics.median(figures.reloads), statistics.median(figures.switches)
    mib = 1 << 20
    print("| what | measured | to a reload |")
    print("|---|---|---|")
    print(f"| reload, same architecture | {reload:.2f} s (best {min(figures.reloads):.2f}) | 1.0 |")
    print(
        f"| switch to an engine that sleeps | {switch:.2f} s (best {min(figures.switches):.2f}) "
        f"| {switch / reload:.1f} |"
    )
    print(f"| start of an engine | {figures.start:.2f} s | {figures.start / reload:.0f} |")
    freed = figures.awake_bytes - figures.asleep_bytes
    print(
        f"| its process asleep | {figures.asleep_bytes / mib:.0f} MiB, {freed / mib:.0f} less than "
        f"awake | weights and KV cache: {figures.device_bytes / mib:.0f} MiB |"
    )


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--switches", type=int, default=5)
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        other = Path(scratch) / "other.safetensors"
        shutil.copy(given.folder / "model.safetensors", other)
        figures = asyncio.run(
            measure(
                model_of(given.folder),
                other,
                switches=given.switches,
                kv_cache_bytes=given.kv_cache_mib << 20,
            )
        )
    report(figures)


if __name__ == "__main__":
    main()
