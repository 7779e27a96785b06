"""Both runs of a soak: one with kills and little memory, one with neither."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.cli.demo_memory import Moves, moves
from tests.model_folders import make_hollow_folder
from tests.scenarios.partition import REPOSITORY, Job, Partition, running
from tests.soak.controllers import Controller, Seen
from tests.soak.kills import Killer

#: Images that fit into host memory, of one for each job.
IN_MEMORY: Final = 2
#: Beside them, for slab headers.
_SLACK: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What depends on the engines."""

    engines: tuple[str, str]
    #: Of the tiny model, or of one that only says that it has so many.
    parameters: int
    #: Kills come so often, in the mean.
    mean_s: float
    #: Longest time to be up again.
    patience_s: float
    #: Mean pause of a controller between two rounds.
    pause_s: float
    #: Snapshots of sampling weights that fit into host memory beside the images.
    snapshots: int
    train: dict[str, Any]
    rollout: dict[str, Any]

    @property
    def image_bytes(self) -> int:
        """Of a training image of the float32 model."""
        return 20 * self.parameters


#: Of a job's Slurm job, which only sleeps.
_LONGEST_S: Final = 24 * 3600
#: Between two lines that tell how far it is.
_LOOK_S: Final = 10.0
Say = Callable[[str], None]

_HOLLOW: Final = 200_000
KINDS: Final[dict[str, Kind]] = {
    "fake": Kind(
        engines=("fake_train", "fake_sample"),
        parameters=_HOLLOW,
        mean_s=4.0,
        patience_s=60.0,
        pause_s=0.5,
        snapshots=0,  # a fake's are a few bytes
        train={"image_bytes": 20 * _HOLLOW, "delay_us": {"forward_backward": 20_000}},
        rollout={"delay_us": {"sample": 20_000}},
    ),
    "deepspeed": Kind(
        engines=("deepspeed", "vllm"),
        parameters=312_448,
        mean_s=10.0,
        patience_s=300.0,
        pause_s=2.0,
        snapshots=4,
        train={},
        rollout={"kv_cache_bytes": 64 << 20},
    ),
}


@dataclass(slots=True)
class Outcome:
    """Of the disturbed run."""

    seen: list[Seen]
    kills: list[dict[str, Any]]
    #: Images between memory and the disk.
    moves: Moves
    #: Most bytes that images took in memory at any time.
    most_bytes: int
    host_bytes: int
    #: What is wrong with the books.
    flaws: list[str]


def left_running(folder: Path, *, patience_s: float = 20.0) -> list[str]:
    """Processes that were started below ``folder`` and have not ended by now."""
    deadline = time.monotonic() + patience_s
    while found := sorted(_working_in(folder)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return found


def _working_in(folder: Path) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if words:  # a zombie has none
                    yield f"process {process.name} ({words[:80]}) outlived its partition"


def model_folder(folder: Path, kind: Kind) -> Path:
    """The model that everybody trains."""
    if kind.engines[0] == "deepspeed":
        return REPOSITORY / "models" / "tiny"
    made = make_hollow_folder(folder / "tiny", parameters=kind.parameters)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return made


def disturbed(
    folder: Path,
    kind: Kind,
    *,
    jobs: int,
    seed: int,
    seconds: float,
    stall_s: float,
    say: Say,
) -> Outcome:
    """Rounds and kills for so long; then each job ends its round and publishes."""
    end = time.monotonic() + seconds
    image = kind.image_bytes
    host_bytes = IN_MEMORY * image + kind.snapshots * 4 * kind.parameters + _SLACK
    settings = {
        "host_bytes": host_bytes,
        "nvme_dir": str(folder / "nvme"),
        "nvme_bytes": (jobs + 2) * image,
        "image_every": 4,
    }
    with _partition(folder, kind, settings) as partition:
        controllers = _start(
            partition, jobs, seed, lambda _: time.monotonic() < end, pause_s=kind.pause_s
        )
        with _Watch(partition) as watch:
            killer = Killer(partition, seed=seed, mean_s=kind.mean_s, patience_s=kind.patience_s)
            _tell(controllers, killer, say)
            killer.strike_until(lambda: time.monotonic() > end or not _any_alive(controllers))
            seen = _finish(controllers, stall_s)
        return Outcome(
            seen=seen,
            kills=killer.kills,
            moves=moves(partition.folder / "state"),
            most_bytes=watch.most,
            host_bytes=host_bytes,
            flaws=[str(flaw) for flaw in partition.flaws()],
        )


def undisturbed(
    folder: Path,
    kind: Kind,
    *,
    rounds: Sequence[int],
    seed: int,
    stall_s: float,
    say: Say,
) -> list[Seen]:
    """The same rounds, nobody killed, and room for everybody in memory."""
    with _partition(folder, kind, {"host_bytes": "2GiB"}) as partition:
        controllers = []
        for number, count in enumerate(rounds):
            controllers += _start(partition, 1, seed, count.__gt__, first=number)
        _tell(controllers, None, say)
        return _finish(controllers, stall_s)


@contextlib.contextmanager
def _partition(folder: Path, kind: Kind, settings: dict[str, Any]) -> Iterator[Partition]:
    folder.mkdir(parents=True)
    with running(
        folder,
        seconds=kind.patience_s,
        model=model_folder(folder, kind),
        # Jobs take turns often: the more moves, the more there is to disturb.
        engines=kind.engines,
        train=kind.train,
        rollout=kind.rollout,
        settings={"hold_seconds": 0.2, **settings},
    ) as partition:
        yield partition


def _start(
    partition: Partition,
    jobs: int,
    seed: int,
    goes_on: Callable[[int], bool],
    *,
    first: int = 0,
    pause_s: float = 0.0,
) -> list[Controller]:
    controllers = []
    for number in range(first, first + jobs):
        job = Job(partition, seed=seed + number, models=["tiny"], seconds=_LONGEST_S)
        controllers.append(Controller(job, number, seed=seed, pause_s=pause_s))
    for each in controllers:
        each.start(goes_on)
    return controllers


def _any_alive(controllers: Sequence[Controller]) -> bool:
    return any(each.thread.is_alive() for each in controllers)


def _finish(controllers: Sequence[Controller], stall_s: float) -> list[Seen]:
    """When all have ended, or one has not finished a round for ``stall_s``."""
    while _any_alive(controllers):
        time.sleep(0.1)
        for each in controllers:
            stood_s = time.monotonic() - each.seen.moved_at
            if each.thread.is_alive() and stood_s > stall_s:
                each.seen.failure = f"it has stood still for {stood_s:.0f} s"
                return [one.seen for one in controllers]
    return [each.seen for each in controllers]


class _Watch:
    """Reads how many bytes the images in memory take."""

    def __init__(self, partition: Partition) -> None:
        self._partition, self._over = partition, threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.02):
            sizes = []
            for path in self._partition.images():
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
            self.most = max(self.most, sum(sizes))

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _tell(controllers: Sequence[Controller], killer: Killer | None, say: Say) -> None:
    threading.Thread(target=_report, args=(controllers, killer, say), daemon=True).start()


def _report(controllers: Sequence[Controller], killer: Killer | None, say: Say) -> None:
    began = time.monotonic()
    while _any_alive(controllers):
        rounds = " ".join(str(len(each.seen.rounds)) for each in controllers)
        kills = ""
        if killer is not None:
            parts = ", ".join(f"{name} {count}" for name, count in killer.count().items())
            kills = f"kills {len(killer.kills)} ({parts}); "
        say(f"{time.monotonic() - began:5.0f} s: {kills}rounds {rounds}")
        time.sleep(_LOOK_S)
