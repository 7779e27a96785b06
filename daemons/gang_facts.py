"""What the agents of a WPG on several nodes say of their parts, put together. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from plexrl_slurm.transport import messages as tm

Position: TypeAlias = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Said:
    """What one agent said of its part in its hello, and what has ended since."""

    state: str = "down"
    incarnation: int = 0
    resident: str = ""
    progress: Position = (0, 0)
    #: ``(call, part)`` that its ranks work on.
    running: set[tuple[str, int]] = field(default_factory=set)
    #: Runs that have ended and were not acknowledged.
    finished: list[tm.Done] = field(default_factory=list)
    images: list[tm.ImageHeld] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, hello: tm.Hello, wpg: str) -> "Said":
        """The part of ``wpg``."""
        images = [image for image in hello.images if image.wpg == wpg]
        finished = [done for done in hello.finished if (done.wpg, done.what) == (wpg, "run")]
        held = next((held for held in hello.wpgs if held.name == wpg), None)
        if held is None:
            return cls(images=images, finished=finished)
        return cls(
            state=held.state,
            incarnation=held.incarnation,
            resident=held.resident,
            progress=held.progress,
            running=set(held.running),
            finished=finished,
            images=images,
            pids=held.pids,
        )

    def ended(self, done: tm.Done) -> None:
        """One of its runs has ended since its hello."""
        self.running.discard((done.call, done.part))
        self.finished.append(done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """A gang whose parts agree: it goes on."""

    resident: str
    progress: Position
    running: tuple[tuple[str, int], ...]
    finished: list[tm.Done]


def merge(said: Sequence[Said]) -> Alive | None:
    """The gang as one; ``None`` if its parts are not all at the same place: an order that reached
    one part and not the other would keep its ranks waiting for ever."""
    first = said[0]
    if any(each.state != "up" or each.incarnation != first.incarnation for each in said):
        return None
    ended = [{(done.call, done.part) for done in each.finished} for each in said]
    running = set().union(*(each.running for each in said))
    for each, over in zip(said, ended, strict=True):
        if not running <= each.running | over:
            return None
    if not running and any(
        (each.resident, each.progress) != (first.resident, first.progress) for each in said
    ):
        return None
    over = set.intersection(*ended) - running
    slowest = min(said, key=lambda each: each.progress)
    return Alive(
        resident=slowest.resident,
        progress=slowest.progress,
        running=tuple(sorted(running)),
        finished=[done for done in first.finished if (done.call, done.part) in over],
    )


def common_images(
    parts: Sequence[Sequence[tm.ImageHeld]],
) -> tuple[dict[str, Position], dict[str, Position | None]]:
    """The newest image of each deployment that every part has; and the same with ``None`` for
    those of which there is none, though some part has one."""
    found: list[dict[str, set[Position]]] = []
    for images in parts:
        mine: dict[str, set[Position]] = {}
        for image in images:
            mine.setdefault(image.deployment, set()).add(image.progress)
        found.append(mine)
    settled: dict[str, Position | None] = {}
    for deployment in set().union(*found):
        both = set.intersection(*(each.get(deployment, set()) for each in found))
        settled[deployment] = max(both, default=None)
    return {name: at for name, at in settled.items() if at is not None}, settled
