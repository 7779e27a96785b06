"""What the scheduler was told and what it decided: enough to decide it all again.

A journal is JSON Lines. The first line says how the core was made; every other is an array: the
verb (``handle`` or ``plan``), its argument, and the instructions that came of it; or ``place``, all
that a placement was decided on, and where the job went or what is in its way. A core made the same
and told the same must decide the same: it has no clock, no randomness and no I/O.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, get_args

import msgspec

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.core.ground import Answer, Ground, News, Wish
from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.messages import AnyEvent, AnyInstruction
from plexrl_slurm.core.policy import Policy, find_policy
from plexrl_slurm.core.queue_rules import QueueRules
from plexrl_slurm.core.scheduler import SchedulerCore

FORMAT: Final = 2
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
    core, queue = _made(path, lines[0])
    ground = Ground(queue.reservation)
    # What follows the last line feed was not written whole, or is nothing.
    for number, line in enumerate(lines[1:-1], 2):
        try:
            verb, *told, said = msgspec.json.decode(line)
            decided: Any = None
            if verb == "ground":
                ground.hear(msgspec.convert(said, News, str_keys=True))
                said = None
            elif verb == "handle":
                name, fields = told
                event = msgspec.convert(fields, _EVENTS[name])
                decided = _named(core.handle(event))
            elif verb == "plan":
                decided = _named(core.plan(told[0], CauseId(told[1])))
            elif verb == "place":
                decided = ground.answer(msgspec.convert(told[0], Wish, str_keys=True))
            else:
                raise ValueError(f"unknown verb {verb!r}")
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadScript(str(path), number, f"is no line of a journal: {error}") from error
        now = msgspec.json.decode(msgspec.json.encode(decided))
        if now != said:
            raise BadInput(
                f"{path}:{number}: decided then {_text(said)}, and now {_text(now)}: this is "
                "another version of the scheduler, or the journal was changed"
            )
        yield number


def _made(path: Path, line: bytes) -> tuple[SchedulerCore, QueueRules]:
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
        return core, msgspec.convert(queue, QueueRules, str_keys=True)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BadScript):
            raise
        raise BadScript(str(path), 1, "does not begin like a journal of plexrl") from error


def _named(out: list[AnyInstruction]) -> list[Any]:
    return [[type(order).__name__, order] for order in out]


def _text(said: Any) -> str:
    return msgspec.json.encode(said).decode()[:300]
