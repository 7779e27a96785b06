"""Traces: JSON Lines, one job a line. Times in seconds unless ``_us``; format v1.

``lognormal``: ``median * exp(sigma * N(0, 1))``. ``rollout_s`` excludes tool stalls;
``fwdbwd_s`` is one of ``count`` micro-steps. ``drift``: rollouts grow, straight, by this share
in the first 150 steps and stay so.
"""

import codecs
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from plexrl_slurm.core.errors import BadScript

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
# Beyond these a number is a mistake, and neither time nor memory holds what it asks for.
Parameters = Annotated[int, Meta(ge=1, le=10**15)]
Bytes = Annotated[float, Meta(gt=0, le=1e6)]
Steps = Annotated[int, Meta(ge=1, le=10**6)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Spread = Annotated[float, Meta(ge=0, le=10)]
Weight = Annotated[float, Meta(gt=0, le=1e6)]
Instant = Annotated[int, Meta(ge=0, le=10**17)]

#: Longest that a job may take, on average: 31 years.
LONGEST_S: Final = 1e9
#: Bytes of a line: no job needs as many, and a file without an end has no line's end either.
_LONGEST_LINE: Final = 1 << 20

DRIFT_STEPS = 150


class Model(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained."""

    name: str
    params: Parameters
    active: Parameters
    train_bytes_per_param: Bytes
    rollout_bytes_per_param: Bytes

    @property
    def image_bytes(self) -> int:
        """Of the training deployment."""
        return int(self.params * self.train_bytes_per_param)


class Train(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """GPUs of the training WPG."""

    gpus: Count
    tp: Count
    pp: Count
    dp: Count
    min_gpus: Count


class Rollout(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """GPUs of the rollout WPG."""

    gpus: Count
    engines: Count
    gpus_per_engine: Count
    requests: Count


class Lasting(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A duration in seconds."""

    dist: Literal["lognormal", "const"]
    median: Seconds
    sigma: Spread = 0.0

    @property
    def mean(self) -> float:
        """Its mean, in seconds."""
        return self.median * math.exp(self.sigma**2 / 2)


class MicroSteps(Lasting, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of ``count`` alike."""

    count: Steps


class Tail(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The end of a rollout, when few sequences are left."""

    frac: Annotated[float, Meta(ge=0, le=1)]
    engines_needed: Annotated[float, Meta(gt=0, le=1)]
    longest_over_median: Positive


class Tool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pauses of a rollout, in which every sequence waits for a tool."""

    stalls: Annotated[int, Meta(ge=0, le=10**6)]
    stall_s: Seconds


class Phases(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one step is made of."""

    rollout_s: Lasting
    tail: Tail
    tool: Tool
    reward_s: Lasting
    logprob_s: Lasting
    fwdbwd_s: MicroSteps
    optim_s: Lasting
    publish_s: Lasting
    pull_s: Lasting
    client_gap_s: Seconds
    #: To bring the base model in.
    create_s: Seconds = 1.0
    #: From the job's start to its first call, and from its last answer to its end.
    client_start_s: Seconds = 0.0
    client_end_s: Seconds = 0.0


class Drift(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How rollouts grow."""

    kind: Literal["linear"]
    per_150_steps: Annotated[float, Meta(gt=-1, le=1e6)]


class Slo(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was promised."""

    max_slowdown: Annotated[float, Meta(ge=1, le=1e6)]


class TraceJob(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line."""

    v: Literal[1]
    id: Annotated[str, Meta(min_length=1)]
    submit_us: Instant
    user: str
    account: str
    qos: str
    #: In the queue, and its weight on its WPGs.
    priority: Weight
    algo: str
    mode: Literal["sync", "async1"]
    kind: Literal["reasoning", "agentic"]
    steps: Steps
    #: It stops after this step; ``None``: it takes all.
    fail_step: Annotated[int, Meta(ge=1)] | None
    seed: Annotated[int, Meta(ge=0)]
    walltime_s: Positive
    model: Model
    train: Train
    rollout: Rollout
    phases: Phases
    drift: Drift
    slo: Slo

    @property
    def length(self) -> int:
        """Steps that it takes."""
        return self.steps if self.fail_step is None else min(self.steps, self.fail_step)

    @property
    def seconds(self) -> float:
        """That it takes alone, on average, if nothing overlaps."""
        phases, micro = self.phases, self.phases.fwdbwd_s
        train_s = phases.logprob_s.mean + micro.count * micro.mean + phases.optim_s.mean
        gaps_s = (micro.count + 2) * phases.client_gap_s
        away_s = phases.rollout_s.mean * max(1.0, 1 + self.drift.per_150_steps)
        away_s += phases.tool.stalls * phases.tool.stall_s + phases.reward_s.mean
        moved_s = phases.publish_s.mean + phases.pull_s.mean
        steps_s = self.length * (train_s + gaps_s + away_s + moved_s)
        return steps_s + phases.create_s + phases.client_start_s + phases.client_end_s

    @property
    def overlaps(self) -> bool:
        """Whether it samples for the next step while it trains."""
        return self.mode == "async1"


def read_trace(path: Path) -> list[TraceJob]:
    """The jobs by submission, then id. Raises ``BadScript`` with file and line."""
    jobs: list[TraceJob] = []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            job = msgspec.json.decode(line, type=TraceJob)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadScript(str(path), number, _sentence(error)) from error
        if why := _contradiction(job):
            raise BadScript(str(path), number, why)
        if job.id in seen:
            was = f"job {job.id} is on line {seen[job.id]} already: ids are unique"
            raise BadScript(str(path), number, was)
        seen[job.id] = number
        jobs.append(job)
    if not jobs:
        raise BadScript(str(path), None, "has no job: a trace is one JSON object a line")
    return sorted(jobs, key=lambda job: (job.submit_us, job.id))


def write_trace(path: Path, jobs: list[TraceJob]) -> None:
    """Write what :func:`read_trace` reads."""
    try:
        path.write_bytes(b"".join(msgspec.json.encode(job) + b"\n" for job in jobs))
    except OSError as error:
        raise BadScript(str(path), None, f"cannot be written ({error.strerror})") from error


def compressed(jobs: list[TraceJob], factor: float) -> list[TraceJob]:
    """The same jobs, arriving ``factor`` times as fast."""
    return [msgspec.structs.replace(job, submit_us=int(job.submit_us / factor)) for job in jobs]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each that is not empty, with its number."""
    try:
        with path.open("rb") as file:
            for number in count(1):
                line = file.readline(_LONGEST_LINE + 1)
                if not line:
                    return
                if number == 1:
                    line = _unmarked(path, line)
                if len(line) > _LONGEST_LINE:
                    was = "is longer than 1 MiB: a trace is one JSON object a line"
                    raise BadScript(str(path), number, was)
                if line.strip():
                    yield number, line
    except OSError as error:
        raise BadScript(str(path), None, f"cannot be read ({error.strerror})") from error


def _unmarked(path: Path, line: bytes) -> bytes:
    """The first line, without the mark that some editors put before it."""
    if line.startswith(b"\x1f\x8b"):
        raise BadScript(str(path), None, "is packed by gzip: give it unpacked")
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadScript(str(path), None, "is UTF-16: a trace is UTF-8")
    return line.removeprefix(codecs.BOM_UTF8)


def _contradiction(job: TraceJob) -> str | None:
    """What in a line cannot be, though each of its values could."""
    for key, text in (("id", job.id), ("user", job.user), ("model.name", job.model.name)):
        if not text.isprintable():
            return f"{key}: {text!r} has a control character: give printable ones"
    train = job.train
    if train.min_gpus > train.gpus:
        return f"train.min_gpus: {train.min_gpus} is more than train.gpus, {train.gpus}"
    if job.seconds > LONGEST_S:
        return (
            f"steps: {job.length} of these phases take {job.seconds:.2g} s, and a job may take "
            f"{LONGEST_S:.2g} s: give fewer steps or shorter phases"
        )
    return None


def _sentence(error: Any) -> str:
    """``train.gpus: Expected `int` >= 1`` from msgspec's words."""
    text, _, where = str(error).partition(" - at `$")
    key = where.strip("`.")
    return (f"{key}: {text}" if key else text) + _allowed(key, text)


def _allowed(key: str, text: str) -> str:
    """What would be right, where msgspec says only what is wrong."""
    kind = msgspec.inspect.type_info(TraceJob)
    for name in filter(None, key.split(".")):
        fields = kind.fields if isinstance(kind, msgspec.inspect.StructType) else ()
        kind = next((each.type for each in fields if each.encode_name == name), kind)
    if text.startswith("JSON is malformed") or "truncated" in text:
        return ": a line is one JSON object, and NaN and Infinity are no numbers in it"
    if "Invalid enum" in text and isinstance(kind, msgspec.inspect.LiteralType):
        return f": give {' or '.join(map(str, kind.values))}"
    if "unknown field" in text and isinstance(kind, msgspec.inspect.StructType):
        return f": its keys are {', '.join(each.encode_name for each in kind.fields)}"
    return ""
