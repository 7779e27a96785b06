"""Which tiers each image went through, and when: what agents say of their stocks, one by one.

Every line is written down, so that the next daemon goes on where this one ends.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.db.image_moves import ImageMove
from plexrl_slurm.transport import messages as tm

#: Lines of each image's story that are kept.
LINES: Final = 32
#: Of all images together, for the timeline; those of dropped ones stay.
MOVES: Final = 20_000
#: Where durable images are, in place of a node.
DURABLE: Final = "durable tier"
_GONE: Final = "gone"


class ImageStories:
    """In the daemon's memory, and before that in an earlier one's."""

    def __init__(self) -> None:
        #: Told every new line.
        self.on_move: Callable[[ImageMove], None] = lambda _move: None
        self._stories: dict[str, deque[tuple[int, str]]] = {}
        self._now: dict[tuple[str, str], str] = {}
        self._moves: deque[dict[str, Any]] = deque(maxlen=MOVES)

    def restore(self, moves: Iterable[ImageMove]) -> None:
        """What an earlier daemon wrote down, oldest first."""
        for move in moves:
            self._add(move)

    def heard(self, node: str, stock: tm.Stock) -> None:
        """An agent has other images, or has them elsewhere, than it said before."""
        found: dict[str, list[str]] = {}
        for image in stock.images:
            at = f"{image.tier} ({_seq(image.progress)})"
            found.setdefault(image.deployment, []).append(at)
        known = {name for where, name in self._now if where == node}
        for name in sorted(known | found.keys()):
            self._note(node, name, " and ".join(sorted(found.get(name, []))) or _GONE)

    def durable(self, deployment: str, progress: tuple[int, int]) -> None:
        """Its newest durable image is of this progress."""
        self._note(DURABLE, deployment, _seq(progress))

    def _note(self, where: str, name: str, text: str) -> None:
        if self._now.get((where, name), _GONE) == text:
            return
        move = ImageMove(deployment=name, at_us=now_us(), place=where, text=text)
        self._add(move)
        self.on_move(move)

    def _add(self, move: ImageMove) -> None:
        name, where = move.deployment, move.place
        if move.text == _GONE:
            self._now.pop((where, name), None)
        else:
            self._now[where, name] = move.text
        lines = self._stories.setdefault(name, deque(maxlen=LINES))
        lines.append((move.at_us, f"{where}: {move.text}"))
        self._moves.append(
            {"at_us": move.at_us, "deployment": name, "where": where, "text": move.text}
        )

    def of(self, deployment: str) -> Sequence[dict[str, Any]]:
        """The story of an image, oldest first."""
        return [{"at_us": at, "text": text} for at, text in self._stories.get(deployment, ())]

    def between(self, since_us: int, until_us: int) -> list[dict[str, Any]]:
        """Moves of all images in a stretch of time, and before it the last of each that was
        somewhere then; oldest first."""
        before: dict[tuple[str, str], dict[str, Any]] = {}
        found = []
        for move in self._moves:
            if move["at_us"] < since_us:
                before[move["where"], move["deployment"]] = move
            elif move["at_us"] < until_us:
                found.append(move)
        return [*(move for move in before.values() if move["text"] != _GONE), *found]

    def forget(self, deployment: str) -> None:
        """It is dropped."""
        for where in [where for where, name in self._now if name == deployment]:
            self._note(where, deployment, _GONE)
        self._stories.pop(deployment, None)


def _seq(progress: tuple[int, int]) -> str:
    seq, part = progress
    return f"seq {seq}.{part}" if part else f"seq {seq}"
