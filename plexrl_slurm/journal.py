"""What the scheduler was told and what it decided: enough to decide it all again.

A journal is JSON Lines. The first line says how the core was made, and by which rules the queue
is; every other is an array, and decided again is what these say:

- ``handle``, ``plan``: what the core was told, and its instructions;
- ``place``: a job, and its homes or what is in its way, on the ground that ``ground`` lines tell;
- ``pass``: when the queue was looked along, what came of each job that was tried, and what was said
  of all of them in their order, of the jobs and the use that ``queue`` lines tell;
- ``refuse``: a job that was over a limit when it came, and which.

A core made the same and told the same must decide the same: it has no clock, no randomness and no
I/O.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Final, get_args

import msgspec

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.dues import Dues
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.core.ground import Answer, Ground, News, Wish
from plexrl_slurm.core.ids import CauseId, JobId
from plexrl_slurm.core.limits import HeldKind, Subject
from plexrl_slurm.core.messages import AnyEvent, AnyInstruction
from plexrl_slurm.core.policy import Policy, find_policy
from plexrl_slurm.core.queue_pass import (
    LATER,
    PLACED,
    Queued,
    QueueNews,
    QueuePass,
    Refused,
    Said,
    decide_again,
)
from plexrl_slurm.core.queue_rules import QueueRules
from plexrl_slurm.core.scheduler import SchedulerCore

FORMAT: Final = 3
#: A journal that has grown so large is not continued: replay agrees as far as it goes.
MOST_BYTES: Final = 256 << 20
#: Journals of earlier daemons that stay.
KEPT: Final = 4

_EVENTS: Final[dict[str, Any]] = {kind.__name__: kind for kind in get_args(AnyEvent)}


class JournalledCore(SchedulerCore):
    """A core that writes down what it hears and says. A journal that cannot be written ends,
    and stops nobody."""

    def __init__(
        self,
        policy: Policy,
        *,
        path: Path,
        prior: SwitchCosts,
        queue: QueueRules | None = None,
        **options: Any,
    ) -> None:
        """``options``: of :class:`SchedulerCore`, beside the policy and the costs."""
        super().__init__(policy, costs=prior, **options)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(path.parent.glob("*.jsonl"))[: -KEPT or None]:
            old.unlink(missing_ok=True)
        self._file: BinaryIO | None = None
        self._left = MOST_BYTES
        #: Why it ended; "" while it is written.
        self.ended = ""
        try:
            self._file = path.open("wb")
        except OSError as error:
            self._end(f"cannot be opened ({error.strerror})")
        self._write(["core", FORMAT, policy.name, options, queue or QueueRules()])

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        out = super().handle(event)
        self._write(["handle", type(event).__name__, event, _named(out)])
        return out

    def plan(self, at_us: int, cause: CauseId) -> list[AnyInstruction]:
        out = super().plan(at_us, cause)
        self._write(["plan", at_us, cause, _named(out)])
        return out

    def placed(self, news: News, wish: Wish, found: Answer) -> None:
        """A job got its homes, or found none; ``news``: what has changed since the last one.
        The core itself is not asked."""
        if news:
            self._write(["ground", news])
        self._write(["place", wish, found])

    def passed(
        self, news: QueueNews, at_us: int, told: Sequence[Said], said: Sequence[Said]
    ) -> None:
        """The queue was looked along; ``news``: what has changed since this was told."""
        self._write(["queue", news])
        self._write(["pass", at_us, told, _in_runs(said)])

    def refused(self, refused: Refused) -> None:
        """A job was over a limit when it came."""
        self._write(["refuse", refused.subject, refused.submitted, refused.kind])

    def close(self) -> None:
        """Nothing more is written."""
        self._end("closed")

    def _write(self, line: Any) -> None:
        if self._file is None:
            return
        data = msgspec.json.encode(line) + b"\n"
        self._left -= len(data)
        if self._left < 0:
            self._end(f"has reached {MOST_BYTES >> 20} MiB")
            return
        try:
            self._file.write(data)
            if line[0] != "handle":
                self._file.flush()
        except OSError as error:
            self._end(f"cannot be written ({error.strerror})")

    def _end(self, why: str) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file, self.ended = None, self.ended or why


def replay(path: Path) -> Iterator[int]:
    """Decide again what a journal says was decided; yields the lines that agreed so far.

    Raises ``BadScript`` with file and line for a journal that cannot be read, and ``BadInput``
    with both decisions where they differ. A last line that was not written whole is left out.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadScript(str(path), None, f"cannot be read ({error.strerror})") from error
    again = _made(path, lines[0])
    # What follows the last line feed was not written whole, or is nothing.
    for number, line in enumerate(lines[1:-1], 2):
        try:
            said, decided = again.decide(msgspec.json.decode(line))
        except BadInput as problem:
            raise BadInput(f"{path}:{number}: {problem}") from problem
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadScript(str(path), number, f"is no line of a journal: {error}") from error
        now = msgspec.json.decode(msgspec.json.encode(decided))
        if now != said:
            raise BadInput(
                f"{path}:{number}: decided then {_text(said)}, and now {_text(now)}: this is "
                "another version of the scheduler, or the journal was changed"
            )
        yield number


class _Again:
    """Everything that decides, told line by line."""

    def __init__(self, core: SchedulerCore, rules: QueueRules) -> None:
        self._core, self._rules = core, rules
        self._ground = Ground(rules.reservation)
        self._dues = Dues(rules.weights.half_life_us)
        self._jobs: dict[JobId, Queued] = {}
        #: Jobs for which a place was found since the last pass.
        self._found: set[JobId] = set()

    def decide(self, line: list[Any]) -> tuple[Any, Any]:
        """What was said, and what is said now. Raises ``BadInput`` for facts that contradict each
        other, and ``ValueError`` and its like for what is no line."""
        verb, *told, said = line
        if verb == "handle":
            name, fields = told
            event = msgspec.convert(fields, _EVENTS[name])
            return said, _named(self._core.handle(event))
        if verb == "plan":
            return said, _named(self._core.plan(told[0], CauseId(told[1])))
        if verb == "ground":
            self._ground.hear(msgspec.convert(said, News, str_keys=True))
            return None, None
        if verb == "place":
            wish = msgspec.convert(told[0], Wish, str_keys=True)
            found = self._ground.answer(wish)
            if isinstance(found, Placement):
                self._found.add(wish.who.job)
            return said, found
        if verb == "queue":
            self._hear(msgspec.convert(said, QueueNews))
            return None, None
        if verb == "pass":
            at_us, facts = msgspec.convert(told, tuple[int, list[Said]])
            return said, _in_runs(self._pass(at_us, facts))
        if verb == "refuse":
            subject, submitted = msgspec.convert(told, tuple[Subject, tuple[int, ...]])
            refused = Refused(subject=subject, submitted=submitted, kind=HeldKind(said))
            return said, refused.again(self._rules)
        raise ValueError(f"unknown verb {verb!r}")

    def _hear(self, news: QueueNews) -> None:
        self._jobs.update((each.job, each) for each in news.jobs)
        for job in news.gone:
            del self._jobs[job]
        self._dues.hear(news.dues)

    def _pass(self, at_us: int, facts: Sequence[Said]) -> list[Said]:
        jobs = tuple(self._jobs.values())
        made = QueuePass(self._rules, at_us=at_us, jobs=jobs, dues=self._dues)
        for job, what in facts:
            if what in (PLACED, LATER) and job not in self._found and self._jobs[job].models:
                raise BadInput(f"job {job} got a place, and no line says which")
        self._found.clear()
        return decide_again(made, facts)


def _made(path: Path, line: bytes) -> _Again:
    try:
        verb, version, policy, options, *more = msgspec.json.decode(line)
        if verb == "core" and version != FORMAT:
            known = (
                f"is of format {version}, and this version reads {FORMAT}: replay it with the "
                f"version of plexrl that wrote it"
            )
            raise BadScript(str(path), 1, known)
        (queue,) = more
        core = SchedulerCore(find_policy(policy), costs=SwitchCosts(), **options)
        return _Again(core, msgspec.convert(queue, QueueRules, str_keys=True))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BadScript):
            raise
        raise BadScript(str(path), 1, "does not begin like a journal of plexrl") from error


def _named(out: list[AnyInstruction]) -> list[Any]:
    return [[type(order).__name__, order] for order in out]


def _in_runs(said: Sequence[Said]) -> list[tuple[str, list[JobId]]]:
    """Jobs by what was said of them; most wait for the same."""
    return [(word, [job for job, _ in run]) for word, run in groupby(said, lambda each: each[1])]


def _text(said: Any) -> str:
    return msgspec.json.encode(said).decode()[:300]
