"""Do our movers keep their promises on a GPU? At most 8 minutes on one H200.

    python -m benchmarks.gpu_check [--small] [--json FILE] [--layers N] [--rounds N] [--limit S]

From the repository's root, with torch and transformers and nothing else of ours installed. Two
jobs train one model of 1.1 billion random parameters (bf16 weights, fp32 master weights, AdamW)
by turns, through the mover that a rank uses; a switch may come in the middle of a step. Each has
a slab of mapped shared memory, and there is a spare one, as on a node. The yardstick is pinned
``cudaMemcpy`` of as many bytes between the same two memories, in turn with each switch. Where
DeepSpeed, msgspec, crc32c and safetensors can be imported too, the training engine itself does the
same with a smaller model (:mod:`benchmarks.gpu_engine`).

Each line is printed, and written to ``--json``, as soon as it is known: a run that is cut off
leaves what it had. What would begin after the limit is left out and says so. Needs 75 GB of host
memory, or takes fewer layers. ``--small``: a tiny model, also without a GPU; figures that say
nothing then are not judged.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# cuBLAS is deterministic only with this, and reads it when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from benchmarks.gpu_trainer import (
    Device,
    HostImage,
    NoRoom,
    Switcher,
    Trainer,
    available_memory,
    image_bytes,
)
from plexrl_slurm.engines.movers import copy_bytes

STARTED: Final = time.monotonic()
LIMIT_S: Final = 480
#: What the training engine imports beyond torch and transformers.
ENGINE_NEEDS: Final = ("deepspeed", "msgspec", "crc32c", "safetensors", "numpy")
#: Who runs what between two switches: f(orward and backward), o(ptimizer step).
TURNS: Final = [
    ("a", "ff"),
    ("b", "fo"),
    ("a", "o"),
    ("b", "f"),
    ("a", "fo"),
    ("b", "fo"),
    ("a", "f"),
    ("b", "fo"),
    ("a", "fo"),
]


def progress(text: str) -> None:
    """A line on standard error."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the answer."""

    what: str
    measured: str
    wanted: str = ""
    #: ``pass``, ``FAIL``, ``not judged`` or nothing.
    verdict: str = ""
    #: As numbers, for whoever reads the JSON.
    values: dict[str, float] | None = None


class Answer:
    """All lines so far: printed, and in a file, as they come."""

    def __init__(self, device: str, *, small: bool, limit_s: float, file: Path | None) -> None:
        self._facts = {"device": device, "torch": torch.__version__, "small": small}
        self.limit_s, self._file = limit_s, file
        self.rows: list[Row] = []

    @property
    def ok(self) -> bool:
        return all(row.verdict != "FAIL" for row in self.rows)

    @property
    def left_s(self) -> float:
        return STARTED + self.limit_s - time.monotonic()

    def add(self, rows: Iterable[Row], *, complete: bool = False) -> None:
        for row in rows:
            self.rows.append(row)
            line = f"{row.what:72}  {row.measured:36}  {row.wanted:24}  {row.verdict}"
            print(line.rstrip(), flush=True)
        if self._file is None:
            return
        rest = {"ok": self.ok, "complete": complete, "rows": [asdict(row) for row in self.rows]}
        part = self._file.with_name(f".{self._file.name}.part")
        part.write_text(json.dumps(self._facts | rest, indent=2))
        part.replace(self._file)

    def part(self, what: str, work: Callable[[], Iterable[Row]], *, needs_s: float = 0.0) -> None:
        """One part of the check: what goes wrong in it is a line of its own, and the next begins.

        It is left out if less than ``needs_s`` are left.
        """
        progress(what)
        if self.left_s < needs_s:
            self.add([Row(what=what, measured="left out: no time", verdict="not judged")])
            return
        try:
            rows = list(work())
        except Exception as problem:
            traceback.print_exc()
            first = str(problem).partition("\n")[0]
            reason = f"{type(problem).__name__}: {first}"[:200]
            rows = [Row(what=what, measured=reason, wanted="no error", verdict="FAIL")]
        self.add(rows)


def judged(holds: bool, *, here: bool = True) -> str:
    """``here``: whether this machine can tell."""
    if not here:
        return "not judged"
    return "pass" if holds else "FAIL"


def spread(values: Sequence[float], unit: str, digits: int = 1) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f}-{high:.{digits}f})"


class Yardstick:
    """Plain copies between pinned memory of torch's own and the device."""

    def __init__(self, device: Device, size: int) -> None:
        self._device, self.bytes = device, size
        self._near = [self._space(on_device=True) for _ in range(2)]
        self._far = [self._space(on_device=False) for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)] if device.cuda else []

    def close(self) -> None:
        """Give its memory on the device back."""
        self._near.clear()

    def _space(self, *, on_device: bool) -> Tensor:
        where = self._device.torch if on_device else torch.device("cpu")
        pinned = self._device.cuda and not on_device
        return torch.empty(self.bytes, dtype=torch.uint8, device=where, pin_memory=pinned).fill_(1)

    def _copy(self, to: Tensor, source: Tensor, stream: int) -> None:
        if not self._device.cuda:
            copy_bytes(to, source)
            return
        with torch.cuda.stream(self._streams[stream]):
            to.copy_(source, non_blocking=True)

    def out(self) -> None:
        self._copy(self._far[0], self._near[0], 0)

    def into(self) -> None:
        self._copy(self._near[1], self._far[1], 1)

    def both(self) -> None:
        self.out()
        self.into()


def alone(trainer: Trainer) -> dict[str, tuple[list[float], str]]:
    """Losses and final state of each job without the other."""
    found = {}
    for job in ("a", "b"):
        trainer.reset()
        losses: list[float] = []
        for who, operations in TURNS:
            losses += trainer.run(job, operations) if who == job else []
        found[job] = losses, trainer.digest()
        progress(f"job {job} alone: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return found


def by_turns(trainer: Trainer, switcher: Switcher) -> dict[str, tuple[list[float], str]]:
    """The same while they take turns."""
    losses: dict[str, list[float]] = {"a": [], "b": []}
    for job in losses:
        trainer.reset()
        switcher.save(job)
    resident = "b"
    for who, operations in TURNS:
        if who != resident:
            _, seconds = switcher.timed_switch(resident, who)
            switcher.seconds.append(seconds)
            resident = who
        losses[who] += trainer.run(who, operations)
    found = {resident: (losses[resident], trainer.digest())}
    other = "b" if resident == "a" else "a"
    switcher.switch(resident, other)
    found[other] = losses[other], trainer.digest()
    progress(f"by turns: {len(switcher.seconds)} switches")
    return found


def bandwidths(yard: Yardstick, device: Device, rounds: int) -> list[Row]:
    """Of the machine, and how much two directions are worth of one."""
    rates: dict[str, list[float]] = {"d2h": [], "h2d": [], "both": []}
    for number in range(-1, rounds):
        for name, action in (("d2h", yard.out), ("h2d", yard.into), ("both", yard.both)):
            seconds = device.timed(action)
            if number >= 0:
                size = yard.bytes * (2 if name == "both" else 1)
                rates[name].append(size / seconds / 1e9)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    gain = 2 * medians["both"] / (medians["d2h"] + medians["h2d"])
    rows = [
        Row(
            what=f"pinned memory, {name}" if device.cuda else f"memcpy in place of {name}",
            measured=spread(values, "GB/s"),
            values={"gb_per_s": medians[name]},
        )
        for name, values in rates.items()
    ]
    both = Row(what="pinned memory: both directions against one", measured=f"{gain:.2f} times")
    return [*rows, both]


def switches(
    switcher: Switcher, yard: Yardstick, device: Device, rounds: int, left_s: Callable[[], float]
) -> tuple[list[Row], str]:
    """Switches in pairs with the yardstick, and each direction alone; who is resident then.

    At least three pairs, and no more once less than a minute is left.
    """
    shares, gains, rates, resident = [], [], [], "b"
    for number in range(-1, rounds):
        if number > 3 and left_s() < 60:
            break
        other = "a" if resident == "b" else "b"
        plain = device.timed(yard.both) / (2 * yard.bytes)
        moved, seconds = switcher.timed_switch(resident, other)
        ours, resident = seconds / moved, other
        bytes_out = 0

        def save(job: str = resident) -> None:
            nonlocal bytes_out
            bytes_out = switcher.save(job)

        out = device.timed(save) / bytes_out
        into = device.timed(partial(switcher.load, resident)) / bytes_out
        if number >= 0:
            shares.append(100 * plain / ours)
            gains.append((out + into) / 2 / ours)
            rates.append(1 / ours / 1e9)
    rows = [
        Row(
            what=f"switch of {moved / 2e9:.2f} GB out and in at once",
            measured=spread(rates, "GB/s"),
            values={"gb_per_s": statistics.median(rates), "bytes": float(moved)},
        ),
        Row(
            what=f"that against pinned cudaMemcpy of the same bytes, {len(shares)} pairs",
            measured=spread(shares, "%"),
            wanted="at least 85 %",
            verdict=judged(statistics.median(shares) >= 85, here=device.cuda),
            values={"percent": statistics.median(shares)},
        ),
        Row(
            what="both directions at once against one direction",
            measured=spread(gains, "times", 2),
            wanted="at least 1.6 times",
            verdict=judged(statistics.median(gains) >= 1.6, here=device.cuda),
            values={"times": statistics.median(gains)},
        ),
    ]
    return rows, resident


def identity(
    wanted: dict[str, tuple[list[float], str]], found: dict[str, tuple[list[float], str]]
) -> list[Row]:
    """Row by row, job by job."""
    return [
        Row(
            what=f"job {job}: {what} as alone",
            measured="bit-identical" if same else "differ",
            wanted="bit-identical",
            verdict=judged(same),
        )
        for job in sorted(wanted)
        for what, same in (
            ("losses", wanted[job][0] == found[job][0]),
            ("final weights and moments", wanted[job][1] == found[job][1]),
        )
    ]


def residual(
    trainer: Trainer, switcher: Switcher, device: Device, resident: str, before: int
) -> list[Row]:
    """Give the state's memory back, look, and take it again."""
    size = switcher.save(resident)
    digest = trainer.digest()
    full = device.taken()
    trainer.give_back()
    left = device.taken() - before
    trainer.take_again()
    switcher.load(resident)
    same = trainer.digest() == digest
    return [
        Row(
            what="device memory left after the state is given back",
            measured=f"{left / 1e6:.1f} MB of {(full - before) / 1e6:.1f} MB",
            wanted="at most 1 % of the state",
            verdict=judged(left <= size / 100, here=device.cuda),
            values={"bytes": float(left)},
        ),
        Row(
            what="state taken again from its image",
            measured="bit-identical" if same else "differs",
            wanted="bit-identical",
            verdict=judged(same),
        ),
    ]


def anonymous_memory() -> int:
    """Bytes of this process that are no file's; 0 where the kernel does not tell."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def engine_rows(device: Device, asked: argparse.Namespace) -> list[Row]:
    """The training engine of a rank, where its packages are."""
    missing = [name for name in ENGINE_NEEDS if find_spec(name) is None]
    if missing:
        return [
            Row(
                what="the training engine itself (DeepSpeed)",
                measured=f"skipped: {', '.join(missing)} not here; flat tensors instead",
            )
        ]
    from benchmarks import gpu_engine

    found = gpu_engine.check(device, small=asked.small, rounds=asked.rounds)
    return [
        Row(
            what=f"DeepSpeed: {each.what}",
            measured=each.measured,
            wanted=each.wanted,
            verdict="" if each.holds is None else judged(each.holds, here=each.here),
            values=each.values,
        )
        for each in found
    ]


def check(answer: Answer, asked: argparse.Namespace, device: Device) -> None:
    """Everything, in turn."""
    flat_tensors(answer, asked, device)
    gc.collect()
    answer.part("the training engine itself", lambda: engine_rows(device, asked), needs_s=120)
    answer.add([Row(what="vLLM", measured="skipped: this check is for machines without it")])


def flat_tensors(answer: Answer, asked: argparse.Namespace, device: Device) -> None:
    """The mover, with a model of our own."""
    # What cannot be made deterministic would show: everything is compared.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # The libraries' own memory is nobody's state.
    Trainer(device, small=True, layers=1).run("a", "fo")
    gc.collect()
    before = device.taken()
    layers, slabs = room_for(asked)
    trainer = Trainer(device, small=asked.small, layers=layers)
    progress(f"a model of {trainer.size / 1e9:.3f} billion parameters, {layers} layers")
    switcher = Switcher(trainer, device, slabs)
    answer.add(
        [
            Row(
                what="slabs registered with the driver",
                measured=f"{'yes' if switcher.pinned else 'no'}, {switcher.pin_s:.1f} s for three",
                wanted="yes",
                verdict=judged(switcher.pinned, here=device.cuda),
            )
        ]
    )
    answer.part(
        "learning alone and by turns",
        lambda: identity(alone(trainer), by_turns(trainer, switcher)),
    )
    yard = Yardstick(device, min(len(switcher.spare.memory), 4 << 30))
    answer.part("bandwidths", lambda: bandwidths(yard, device, asked.rounds))
    resident = "b"

    def moves() -> list[Row]:
        nonlocal resident
        for job in ("a", "b"):  # whatever came before
            trainer.reset()
            trainer.run(job, "f")
            switcher.save(job)
        host_before = anonymous_memory()
        rows, resident = switches(switcher, yard, device, asked.rounds, lambda: answer.left_s)
        host = max(0, anonymous_memory() - host_before)
        images = 2 * len(switcher.spare.memory)
        rows.append(
            Row(
                what="host memory of the process beyond slabs, after all switches",
                measured=f"{host / 1e6:.1f} MB, {100 * host / images:.2f} % of two images",
                wanted="at most 5 %",
                verdict=judged(host <= images / 20, here=device.cuda),
                values={"bytes": float(host)},
            )
        )
        return rows

    answer.part("switches", moves, needs_s=60)
    yard.close()
    answer.part(
        "what is left on the device",
        lambda: residual(trainer, switcher, device, resident, before),
        needs_s=30,
    )
    switcher.close()


def room_for(asked: argparse.Namespace) -> tuple[int, list[HostImage]]:
    """Layers, and three slabs for an image of so many."""
    layers = asked.layers or (2 if asked.small else 16)
    while True:
        size = image_bytes(parameters_of(layers, small=asked.small))
        progress(
            f"{layers} layers want three slabs of {size / 1e9:.1f} GB; "
            f"{available_memory() / 1e9:.1f} GB are free now, which may grow"
        )
        slabs: list[HostImage] = []
        try:
            for name in ("a", "b", "spare"):
                slabs.append(HostImage(name, size))
        except NoRoom as problem:
            slabs.clear()
            if asked.layers or layers == 1:
                raise SystemExit(f"no host memory for {layers} layers: {problem}") from problem
            progress(f"no room: {problem}")
            layers //= 2
            continue
        return layers, slabs


def parameters_of(layers: int, *, small: bool) -> int:
    """Of the trainer's model, whose embeddings are two."""
    if small:
        return 36_992 * layers + 2 * 256 * 64 + 64
    return 60_821_504 * layers + 2 * 32768 * 2048 + 2048


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--json", type=Path, help="write the answer to this file too")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it")
    asked = parser.parse_args()
    device = Device(small=asked.small)
    progress(f"{device.name}, torch {torch.__version__}")
    answer = Answer(device.name, small=asked.small, limit_s=asked.limit, file=asked.json)
    check(answer, asked, device)
    seconds = time.monotonic() - STARTED
    last = Row(
        what="all of this",
        measured=f"{seconds:.0f} s",
        wanted=f"at most {asked.limit:.0f} s",
        verdict=judged(seconds <= asked.limit),
    )
    answer.add([last], complete=True)
    return 0 if answer.ok else 1


if __name__ == "__main__":
    sys.exit(main())
