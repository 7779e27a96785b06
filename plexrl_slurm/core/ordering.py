"""Which calls of one training deployment may run, and what a loss makes run again.

A :class:`Program` has two cursors over ``(seq, part)``: the *frontier* (the next part that was
never done) and the *position* (the next part that the state on the device lacks). They differ
only while calls run again after the state went back to its image.
"""

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from plexrl_slurm.core.messages import WRITES, Call, FunctionKind

#: ``(seq, part)``: the part that comes next.
Position: TypeAlias = tuple[int, int]
START: Final[Position] = (0, 0)
_NOT_CREATED: Final = "the deployment could not be created"


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """What is known of one call."""

    call: Call
    #: Since when it, or its next part, could run.
    ready_us: int
    #: Its caller has the answer (``Finish`` was given, or it ended before a restart).
    answered: bool = False
    #: Parts that take effect: all of them, or those before the one that failed.
    effect: int = 0
    #: Why it will fail in its turn; "" if it will run.
    doom: str = ""
    #: Next part of a sample.
    part: int = 0
    #: How often each part was begun.
    begun: dict[int, int] = field(default_factory=dict)
    #: Losses of the WPG while it ran, since a part of it last succeeded.
    deaths: int = 0
    #: How often a sample was paused, how many tokens it had then, and the time it has run before.
    pauses: int = 0
    sampled: int = 0
    spent_us: int = 0
    #: Nobody waits for it any more, and it runs.
    cancelled: bool = False

    @classmethod
    def of(cls, call: Call, *, at_us: int, done: bool = False) -> "Entry":
        doom = "its input is bad" if call.doomed else ""
        effect = 0 if call.doomed else call.parts
        return cls(call=call, ready_us=at_us, answered=done, effect=effect, doom=doom)


class Program:
    """Calls of one training deployment that a loss may make run again, in order of ``seq``.

    That is, those that no complete image contains; with ``tiered``, no durable one; with
    ``spares``, not the durable one before the newest, which may turn out to be damaged.
    """

    def __init__(
        self,
        *,
        image: Position | None,
        applied: Position,
        tiered: bool = False,
        durable: Position | None = None,
        spares: bool = False,
        spare: Position | None = None,
    ) -> None:
        self.calls: dict[int, Entry] = {}
        #: Images live on nodes that can be lost, and have durable copies.
        self._tiered, self._spares = tiered, spares
        #: Progress of the newest complete image that its home can load.
        self.image = image
        #: Progress of the newest durable image; may be another home's, and newer.
        self.durable = durable if tiered else None
        #: Progress of the durable image before it.
        self.spare = spare if tiered and spares else None
        #: Whether gradients were pending when these were made; ``None``: the calls tell.
        self._image_open: bool | None = None
        self._durable_open = self._spare_open = False
        self.position: Position = image or START
        #: What a WPG that kept its memory has, if it says that it has this deployment.
        self.applied: Position = max(applied, self.position)
        self.frontier: Position = self.applied
        #: Why nothing of it can ever run again; "" if all is well.
        self.broken = ""
        #: What ``broken`` will be if the device loses the state before a newer image is complete.
        self._fatal = ""
        #: A weight or gradient changed since the image.
        self.dirty = False
        #: forward_backward done, optim_step pending.
        self.open_step = False
        #: Optimizer steps since the image.
        self.steps = 0

    @property
    def replaying(self) -> bool:
        """Whether what runs next has run before."""
        return self.position < self.frontier

    @property
    def floor(self) -> Position:
        """Calls before it never run again."""
        image = self.image or START
        if not self._tiered:
            return image
        kept = self.spare if self._spares else self.durable
        return min(image, kept or START)

    @property
    def safe(self) -> bool:
        """Whether the loss of its home costs nothing that has taken effect on the device."""
        if self.broken:
            return True
        if self.dirty or self.image is None:
            return not self.dirty
        return not self._tiered or (self.durable is not None and self.durable >= self.image)

    @property
    def wants_copy(self) -> bool:
        """Whether its image is newer than its durable one."""
        if not self._tiered or self.broken or self.image is None:
            return False
        return self.durable is None or self.durable < self.image

    def steps_at_risk(self) -> int:
        """Optimizer steps in the image that no durable one has. Reads all calls that are kept."""
        first, last = (self.durable or START)[0], (self.image or START)[0]
        return sum(
            first <= seq < last and entry.call.kind is FunctionKind.OPTIM_STEP and entry.effect > 0
            for seq, entry in self.calls.items()
        )

    def add(self, entry: Entry) -> bool:
        """Take a call in; false for a repeat, or for one that can never run again."""
        seq = entry.call.seq
        if seq in self.calls or seq < self.floor[0]:
            return False
        self.calls[seq] = entry
        if seq == 0 and entry.answered and not entry.effect:
            self.broken = _NOT_CREATED
        return True

    def head(self) -> Entry | None:
        """The next call that has no answer, if it has arrived."""
        return self.calls.get(self.frontier[0])

    def upcoming(self) -> tuple[Entry, int] | None:
        """The part that has to run next so that the head gets its answer."""
        entry = self.calls.get(self.position[0])
        if entry is None or self.head() is None:
            return None
        return entry, self.position[1]

    def settle(self) -> list[Entry]:
        """Pass calls whose turn has come and that need no GPU; the new ones among them."""
        passed = []
        while (entry := self.calls.get(self.frontier[0])) is not None:
            seq, part = self.frontier
            if not entry.answered:
                if self.broken or (entry.doom and part == 0):
                    entry.doom = self.broken or entry.doom
                    entry.effect = part
                elif part < entry.call.parts:
                    break
                passed.append(entry)
            self.frontier = (seq + 1, 0)
            if seq == 0 and entry.effect == 0:
                self.broken = self.broken or _NOT_CREATED
        self._skip()
        return passed

    def ended(self, entry: Entry, part: int, *, ok: bool, why: str = "") -> bool:
        """A part has ended, badly because of ``why``; whether its call is to be answered now."""
        seq = entry.call.seq
        if (seq, part) < self.frontier:
            if not ok:
                self.broken = f"its state cannot be rebuilt: seq {seq} failed when it ran again"
                self.broken += f" ({why})" if why else ""
            elif (seq, part) == self.position:
                self._took_effect(entry, part)
            return False
        if ok:
            self._took_effect(entry, part)
            self.frontier = self.position
            return self.position[1] == 0
        self.fail(entry, part)
        return True

    def fail(self, entry: Entry, part: int) -> None:
        """``entry``, at the frontier, has failed at ``part`` and is passed, now and in replays."""
        entry.effect = part
        seq = entry.call.seq
        self.frontier = (seq + 1, 0)
        if seq == 0:
            self.broken = self.broken or _NOT_CREATED
        self._skip()

    def rewind(self) -> None:
        """The state on the device is gone: go back to the image."""
        self.broken = self.broken or self._fatal
        self.applied = self.position
        self.position = self.image or START
        self.dirty, self.open_step, self.steps = False, self._open_at(self.image), 0
        self._skip()

    def loaded(self) -> None:
        """The image is on the device."""
        self.open_step = self._open_at(self.image)

    def lost_image(self, image: Position | None, *, alive: bool = False) -> None:
        """Its newest image is gone; ``image`` is the one that is left. ``alive``: the device has
        its state."""
        self._image_open = self._open_at(image)
        self.image = image
        first = image[0] if image is not None else 0
        if any(seq not in self.calls for seq in range(first, self.frontier[0])):
            lost = (
                "its state is lost: its newest image is gone, and so are calls that no older one "
                "contains; start from a checkpoint"
            )
            self._fatal = lost
            if not alive:
                self.broken = self.broken or lost

    def fell_back(
        self, image: Position | None, durable: Position | None, *, alive: bool = False
    ) -> None:
        """Newer images are damaged or gone: these are the newest of all, and the durable one."""
        if self._tiered and durable != self.durable:
            is_open = self._open_at(durable)
            if self.spare is not None and (durable is None or self.spare >= durable):
                self.spare = None
            self.durable, self._durable_open = durable, is_open
        self.frontier = max(self.frontier, image or START)
        self.lost_image(image, alive=alive)

    def lost_durable(self, durable: Position | None, spare: Position | None) -> None:
        """A durable image is damaged; these are left, and its host image as it was."""
        if not self._tiered:
            return
        if durable != self.durable:
            self.durable, self._durable_open = durable, self._open_at(durable)
        if spare != self.spare and self._spares:
            self.spare, self._spare_open = spare, self._open_at(spare)

    def adopt(self, position: Position) -> list[Entry]:
        """The device has the state after all, at ``position``; calls that this answers."""
        self.position = position
        self.frontier = max(self.frontier, self.position)
        below = self.image or START
        self.dirty, self.open_step, self.steps = False, self._open_at(self.image), 0
        if self.image is None and self.position > START:
            self.dirty = True
        for seq in sorted(self.calls):
            entry = self.calls[seq]
            if seq >= below[0] and (seq, 0) < self.position and entry.effect:
                self._changes(entry.call.kind)
        self._skip()
        return self.unanswered()

    def unanswered(self) -> list[Entry]:
        """Calls that have taken effect, though nobody has been told."""
        return [
            entry
            for seq, entry in self.calls.items()
            if not entry.answered and (seq + 1, 0) <= self.frontier
        ]

    def saved(self, progress: Position) -> list[Entry]:
        """A complete image has ``progress``; returns the entries that nobody needs any more."""
        self._image_open = self._open_at(progress)
        self.image = progress
        self.dirty, self.steps, self._fatal = False, 0, ""
        return self.trim()

    def persisted(self, progress: Position) -> list[Entry]:
        """A durable image has ``progress``; returns the entries that nobody needs any more."""
        if not self._tiered or (self.durable is not None and progress <= self.durable):
            return []
        is_open = self._open_at(progress)
        self.spare, self._spare_open = self.durable, self._durable_open
        self.durable, self._durable_open = progress, is_open
        return self.trim()

    def moved(self, image: Position | None) -> None:
        """Its new home can load ``image``, and nothing else; ``trim`` and ``rewind`` follow."""
        if image is not None and image > self.frontier:
            self.frontier = image
        self.lost_image(image)
        self.position = image or START
        if self._tiered:
            self.durable, self._durable_open = image, bool(self._image_open)
            if self.spare is not None and (image is None or self.spare >= image):
                self.spare = None

    def trim(self) -> list[Entry]:
        """Let go of the entries that never run again."""
        first = self.floor[0]
        return [self.calls.pop(seq) for seq in sorted(self.calls) if seq < first]

    def _open_at(self, at: Position | None) -> bool:
        """Whether gradients are pending at ``at``."""
        if at is None:
            return False
        if at == self.image and self._image_open is not None:
            return self._image_open
        if at == self.position and at != self.image:
            return self.open_step
        first, is_open = START, False
        for known, was_open in (
            (self.spare, self._spare_open), (self.durable, self._durable_open),
        ):  # fmt: skip
            if known is not None and known <= at:
                first, is_open = known, was_open
        for seq in sorted(seq for seq in self.calls if first[0] <= seq <= at[0]):
            entry = self.calls[seq]
            ran = entry.effect > 0 and (seq < at[0] or at[1] > 0)
            if ran and entry.call.kind in WRITES:
                is_open = entry.call.kind is FunctionKind.FORWARD_BACKWARD
        return is_open

    def cancel(self, entry: Entry) -> bool:
        """Doom a call none of whose parts has begun to count; whether it was possible."""
        if entry.answered or self.frontier > (entry.call.seq, 0):
            return False
        entry.doom, entry.effect = "cancelled", 0
        return True

    def to_replay(self) -> int:
        """Number of calls that must run again before the head."""
        if not self.replaying:
            return 0
        first, last = self.position[0], self.frontier[0]
        return sum(
            first <= seq < last and bool(entry.effect) and entry.call.kind in WRITES
            for seq, entry in self.calls.items()
        )

    def _took_effect(self, entry: Entry, part: int) -> None:
        seq = entry.call.seq
        entry.deaths = 0
        self._changes(entry.call.kind)
        self.position = (seq, part + 1) if part + 1 < entry.call.parts else (seq + 1, 0)
        self._skip()

    def _changes(self, kind: FunctionKind) -> None:
        if kind not in WRITES:
            return
        self.dirty = True
        self.open_step = kind is FunctionKind.FORWARD_BACKWARD
        self.steps += kind is FunctionKind.OPTIM_STEP

    def _skip(self) -> None:
        """Move the position over what has no effect on the state, up to the frontier."""
        while self.position < self.frontier:
            seq, part = self.position
            entry = self.calls.get(seq)
            if entry is None or (entry.call.kind in WRITES and part < entry.effect):
                return
            self.position = min((seq + 1, 0), self.frontier)
