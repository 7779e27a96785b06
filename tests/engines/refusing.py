"""A rank of a gang one rank of which a file system refuses what it wants, again and again.

``python -m tests.engines.refusing MODEL OUT RANK WORLD PORT``; the report has what each rank was
told, and whether all go on.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from plexrl_slurm import wire
from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.engines import checkpoints
from plexrl_slurm.engines.deepspeed import DeepSpeedEngine
from plexrl_slurm.memory import checkpoint, claims
from tests.engines.training import CREATE, adam, rank_spec, supervised, tiny_spec

#: What is refused (``module``, ``function``), and to which rank.
WRITES = [(claims, "claim", 0), (checkpoints, "write_tensors", 1), (checkpoint, "write_bytes", 0)]
READS = [(checkpoint, "read_manifest", 1), (checkpoint, "check_file", 1)]
PUBLISHES = [(checkpoints, "write_tensors", 0), (claims, "claim", 0)]


@contextmanager
def refused(place: object, name: str, number: int) -> Iterator[None]:
    def refuse(*_args: object, **_named: object) -> None:
        raise OSError(number, os.strerror(number), "")

    with patch.object(place, name, refuse):
        yield


def told(work: Callable[[], object]) -> str:
    try:
        work()
    except PlexError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "done"


def run(engine: DeepSpeedEngine, out: Path, rank: int) -> dict[str, object]:
    save = wire.SaveState(str(out / "c" / "one"), "tinker://one")
    load = wire.LoadState(str(out / "c" / "one"), "tinker://one", optimizer=True)
    publish = wire.Publish(snapshot="s", path=str(out / "c" / "s"), uri="tinker://s")
    host = out / "host" / "s.safetensors"
    tried = [
        *((each, lambda: engine.save_state(save)) for each in WRITES),
        *((each, lambda: engine.load_state(load)) for each in READS),
        *((each, lambda: engine.publish(publish, host)) for each in PUBLISHES),
    ]
    engine.create("a", CREATE)
    engine.forward_backward(supervised(1, 5, 9))
    engine.optim_step(adam())
    engine.save_state(save)
    before, words = engine.digest(), []
    for (place, name, who), work in tried:
        for number in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS, errno.EIO):
            if rank == who:
                with refused(place, name, number):
                    words.append(told(work))
            else:
                words.append(told(work))
    kept = engine.digest() == before
    return {
        "words": words,
        "kept": kept,
        "after": [told(lambda: engine.save_state(save)), told(lambda: engine.load_state(load))],
        "left": sorted(path.name for path in (out / "c").iterdir()),
    }


def main() -> None:
    model, out, rank, world, port = sys.argv[1:]
    spec = rank_spec(
        tiny_spec(Path(model), "float32"), rank=int(rank), world=int(world), port=int(port)
    )
    report = run(DeepSpeedEngine(spec), Path(out), int(rank))
    (Path(out) / f"report.{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
