"""How much host memory does the state manager take beyond the images themselves?

    python -m benchmarks.state_overhead [--json] [--deployments 4 8 20] [--mib 32]
                                        [--durable-every 1]

A partition with a fake engine and so many deployments on one training WPG, each with an image of
``--mib`` MiB in host memory. Each runs a function in turn, three times over, so that every image
has moved; then it is quiet. Counted are the tensors of the images, the pages that the host tier's
files take, and what agent and rank have of memory of their own beyond what they had before the
first image. Then half of the jobs end. ``--durable-every 0`` is a partition without durable images,
where each WPG keeps a spare slab.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.function_overhead import Http, begin, call_body
from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory.slab import SlabHeader, read_header
from tests.model_folders import make_hollow_folder
from tests.scenarios.partition import Job, Partition, running, wait_until

ROUNDS = 3


class Controller:
    """A job that trains without end."""

    def __init__(self, partition: Partition, seed: int) -> None:
        self.job = Job(partition, seed=seed, models=["tiny"])
        self._http = Http(self.job)
        self._model = begin(self._http)
        self._seq = 0

    def step(self) -> None:
        self._seq += 1
        body = call_body(self._model, self._seq, forward_only=False)
        answer = self._http.post("forward_backward", body, "application/x-protobuf")
        self._http.wait(json.loads(answer)["request_id"])

    def end(self) -> None:
        self._http.close()
        self.job.cancel()


def images(partition: Partition, controllers: Sequence[Controller]) -> list[SlabHeader]:
    """The newest complete image of every deployment that is somebody's."""
    alive = tuple(f"job{controller.job.slurm_id}-" for controller in controllers)
    found: dict[str, SlabHeader] = {}
    for path in partition.images():
        try:
            header = read_header(path)
        except BadImage:
            continue
        if not header.deployment.startswith(alive):
            continue
        older = found.get(header.deployment)
        if older is None or tuple(older.progress) < tuple(header.progress):
            found[header.deployment] = header
    return list(found.values())


def held(partition: Partition) -> int:
    """Bytes of pages that the files of the host tier have."""
    return sum(path.stat().st_blocks * 512 for path in partition.host.rglob("*") if path.is_file())


def own_memory(pids: Sequence[int]) -> int:
    """Bytes of these processes that are no file's."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
    return total


def measure(folder: Path, deployments: int, image: int, durable_every: int) -> dict[str, Any]:
    """One partition."""
    model = make_hollow_folder(folder / "model", parameters=image // 20)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    settings = {"host_bytes": (deployments + 3) * image + (64 << 20)}
    hold = {"durable_every": durable_every} if durable_every else {}
    train = {"image_bytes": image}
    with running(folder, model=model, train=train, settings=settings, hold=hold) as one:
        pids = [one.agent_pid(), one.rank_pid("train-0")]
        before = own_memory(pids)
        controllers = [Controller(one, seed) for seed in range(deployments)]
        for number in range(ROUNDS):
            for controller in controllers:
                controller.step()
            say(f"{deployments} deployments: round {number + 1} of {ROUNDS}")
        if durable_every:
            folders = folder / "state" / "durable"
            wait_until(
                lambda: len(list(folders.glob("*/[0-9]*"))) >= deployments - 1,
                name="a durable image of each that is not resident",
            )
        time.sleep(1.0)
        answer = {"deployments": deployments, "all": count(one, controllers, pids, before)}
        half = deployments // 2
        slabs = len(one.images())
        for controller in controllers[:half]:
            controller.end()
        # The resident may have no image yet.
        gone = half - 1 if durable_every else half
        wait_until(lambda: len(one.images()) <= slabs - gone, name="slabs of ended jobs to go")
        time.sleep(1.0)
        answer["half"] = count(one, controllers[half:], pids, before)
        for controller in controllers[half:]:
            controller.end()
    return answer


def count(
    partition: Partition, controllers: Sequence[Controller], pids: Sequence[int], before: int
) -> dict[str, Any]:
    """Bytes, and what is beyond the images in percent of them."""
    found = images(partition, controllers)
    needed = sum(header.bytes for header in found)
    files, own = held(partition), max(0, own_memory(pids) - before)
    return {
        "images": len(found),
        "slabs": len(partition.images()),
        "image_bytes": needed,
        "file_bytes": files,
        "process_bytes": own,
        "beyond_percent": round(100 * (files + own - needed) / needed, 2),
    }


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deployments", type=int, nargs="+", default=[4, 8, 20])
    parser.add_argument("--mib", type=int, default=32, help="size of an image")
    parser.add_argument(
        "--durable-every",
        type=int,
        default=1,
        help="optimizer steps between durable images; 0: none",
    )
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for deployments in asked.deployments:
            folder = Path(name) / str(deployments)
            folder.mkdir()
            rows.append(measure(folder, deployments, asked.mib << 20, asked.durable_every))
    if asked.json:
        print(json.dumps(rows))
        return 0
    print(f"{'':28}{'images':>8}{'slabs':>8}{'MB of images':>14}{'of processes':>14}{'beyond':>10}")
    for row in rows:
        for key, text in (("all", "deployments"), ("half", "of which half ended")):
            one = row[key]
            print(
                f"{row['deployments']:3} {text:24}{one['images']:8}{one['slabs']:8}"
                f"{one['image_bytes'] / 1e6:14.1f}{one['process_bytes'] / 1e6:14.1f}"
                f"{one['beyond_percent']:9.2f}%"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
