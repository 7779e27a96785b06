"""What the scheduler was told and what it decided: enough to decide it all again.

A journal is JSON Lines. The first line says how the core was made, and by which rules the queue
is; every other is an array, and decided again is what these say:

- ``handle``, ``plan``: what the core was told, and its instructions;
- ``place``: a job, and its homes or what is in its way, on the ground that ``ground`` lines tell;
- ``pass``: when the queue was looked along, what came of each job that was tried, and what was said
  of all of them in their order, of the jobs and the use that ``queue`` lines tell;
- ``refuse``: a job that was over a limit when it came, and which;
- ``relieve``, ``merge``: who leaves which WPG so that promises are kept, or so that it is empty, of
  the WPGs that were asked for, on the ground that ``ground`` lines tell and of those who may, which
  ``stays`` lines tell; ``still``: whether that was right when the WPG was drained;
- ``vacate``: which of some holds, with their WPGs, everybody could leave for the others;
- ``hold``: what was to be done with the holds, of what had changed of them; ``exclude``: the nodes
  that the next one was not to have, after faults of which these are new.

A core made the same and told the same must decide the same: it has no clock, no randomness and no
I/O.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Final, get_args

import msgspec

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.dues import Dues
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.core.ground import Answer, Ground, News, Wish
from plexrl_slurm.core.hold_news import HoldNews, KeepRules, left_out, to_do
from plexrl_slurm.core.holding import Fault, HoldAction, HoldView
from plexrl_slurm.core.ids import CauseId, JobId, WpgId
from plexrl_slurm.core.leaving import LeaveRules, Leaves, Leaving, Stays, still_right
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """By which rules everything beside the core decides."""

    queue: QueueRules = field(default_factory=QueueRules)
    leaving: LeaveRules = field(default_factory=LeaveRules)
    holds: KeepRules = field(default_factory=KeepRules)


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
        leaving: LeaveRules | None = None,
        holds: KeepRules | None = None,
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
        site = Site(
            queue=queue or QueueRules(),
            leaving=leaving or LeaveRules(),
            holds=holds or KeepRules(),
        )
        self._write(["core", FORMAT, policy.name, options, site])

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        out = super().handle(event)
        self._write(["handle", type(event).__name__, event, _named(out)])
        return out

    def plan(self, at_us: int, cause: CauseId) -> list[AnyInstruction]:
        out = super().plan(at_us, cause)
        self._write(["plan", at_us, cause, _named(out)])
        return out

    def grounded(self, news: News) -> None:
        """What has changed of who lives where since the last one."""
        if news:
            self._write(["ground", news])

    def placed(self, news: News, wish: Wish, found: Answer) -> None:
        """A job got its homes, or found none. The core itself is not asked."""
        self.grounded(news)
        self._write(["place", wish, found])

    def left(
        self, news: News, stays: Stays, at_us: int, asked: list[WpgId] | None, found: Leaving | None
    ) -> None:
        """Somebody leaves one of the WPGs ``asked`` (``None``: any, to make it empty), or not;
        ``stays``: what has changed since this was told."""
        self.grounded(news)
        if stays:
            self._write(["stays", stays])
        said = None if found is None else (found.wpg, found.homes)
        self._write(["merge", at_us, said] if asked is None else ["relieve", at_us, asked, said])

    def still(self, news: News, right: bool) -> None:
        """What was decided the last time would be decided now, or not."""
        self.grounded(news)
        self._write(["still", right])

    def passed(
        self, news: QueueNews, at_us: int, told: Sequence[Said], said: Sequence[Said]
    ) -> None:
        """The queue was looked along; ``news``: what has changed since this was told."""
        self._write(["queue", news])
        self._write(["pass", at_us, told, _in_runs(said)])

    def refused(self, refused: Refused) -> None:
        """A job was over a limit when it came."""
        self._write(["refuse", refused.subject, refused.submitted, refused.kind])

    def vacated(
        self,
        news: News,
        stays: Stays,
        at_us: int,
        holds: Sequence[tuple[str, Sequence[WpgId]]],
        found: str | None,
    ) -> None:
        """Everybody could leave one of these holds, or none."""
        self.grounded(news)
        if stays:
            self._write(["stays", stays])
        self._write(["vacate", at_us, holds, found])

    def held(self, news: HoldNews, at_us: int, actions: Sequence[HoldAction]) -> None:
        """What is to be done with the holds."""
        self._write(["hold", at_us, news, _named(actions)])

    def excluded(self, faults: Sequence[Fault], at_us: int, nodes: list[str]) -> None:
        """The next hold is not to have some nodes; ``faults`` that were not told yet."""
        self._write(["exclude", at_us, faults, nodes])

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

    def __init__(self, core: SchedulerCore, site: Site) -> None:
        rules = site.queue
        self._core, self._site, self._rules = core, site, rules
        self._ground = Ground(rules.reservation)
        self._dues = Dues(rules.weights.half_life_us)
        self._jobs: dict[JobId, Queued] = {}
        #: Jobs for which a place was found since the last pass.
        self._found: set[JobId] = set()
        self._since_us: dict[JobId, int] = {}
        self._leaving: Leaving | None = None
        self._holds: dict[str, HoldView] = {}
        self._faults: list[Fault] = []

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
        if verb == "stays":
            stays = msgspec.convert(said, Stays, str_keys=True)
            self._since_us.update(stays.since_us)
            for job in stays.gone:
                del self._since_us[job]
            return None, None
        if verb in ("relieve", "merge"):
            return said, self._leave(verb, msgspec.convert(told[0], int), *told[1:])
        if verb == "still":
            if self._leaving is None:
                raise BadInput("a WPG was drained, and no line says who leaves it")
            return said, still_right(self._ground.open, self._site.leaving, self._leaving)
        if verb == "vacate":
            at_us, holds = msgspec.convert(told, tuple[int, list[tuple[str, list[WpgId]]]])
            return said, self._leaves(at_us).vacated(holds)
        if verb == "hold":
            at_us, changed = msgspec.convert(told, tuple[int, HoldNews])
            return said, _named(self._hold(at_us, changed))
        if verb == "exclude":
            at_us, faults = msgspec.convert(told, tuple[int, list[Fault]])
            self._faults += faults
            return said, left_out(at_us, self._faults, self._site.holds)
        raise ValueError(f"unknown verb {verb!r}")

    def _leaves(self, at_us: int) -> Leaves:
        return Leaves(self._site.leaving, self._ground.open, self._since_us, at_us)

    def _leave(self, verb: str, at_us: int, asked: Any = None) -> Any:
        leaves = self._leaves(at_us)
        if verb == "merge":
            found = leaves.merged()
        else:
            found = leaves.relieved(msgspec.convert(asked, list[WpgId]))
        self._leaving = found or self._leaving
        return None if found is None else (found.wpg, found.homes)

    def _hold(self, at_us: int, news: HoldNews) -> Sequence[HoldAction]:
        self._holds.update((each.id, each) for each in news.holds)
        for name in news.gone:
            del self._holds[name]
        views = self._holds.values()
        return to_do(at_us, views, news.demand, news.failed_us, self._site.holds)

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
                f"is of format {version}, and this version reads {FORMAT}: "
                f"replay it with the version of plexrl that wrote it"
            )
            raise BadScript(str(path), 1, known)
        (rules,) = more
        site = msgspec.convert(rules, Site, str_keys=True)
        core = SchedulerCore(find_policy(policy), costs=SwitchCosts(), **options)
        return _Again(core, site)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BadScript):
            raise
        raise BadScript(str(path), 1, "does not begin like a journal of plexrl") from error


def _named(out: Sequence[AnyInstruction | HoldAction]) -> list[Any]:
    return [[type(order).__name__, order] for order in out]


def _in_runs(said: Sequence[Said]) -> list[tuple[str, list[JobId]]]:
    """Jobs by what was said of them; most wait for the same."""
    return [(word, [job for job, _ in run]) for word, run in groupby(said, lambda each: each[1])]


def _text(said: Any) -> str:
    return msgspec.json.encode(said).decode()[:300]
