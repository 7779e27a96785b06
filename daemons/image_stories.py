"""Which tiers each image went through, and when: what agents say of their stocks, one by one."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.transport import messages as tm

#: Lines of each image's story that are kept.
_LINES: Final = 32
#: Of all images together, for the timeline; those of dropped ones stay.
_MOVES: Final = 20_000
#: Where durable images are, in place of a node.
DURABLE: Final = "durable tier"
_GONE: Final = "gone"


class ImageStories:
    """In the daemon's memory, since its start; it begins with what agents say they hold then."""

    def __init__(self) -> None:
        self._stories: dict[str, deque[tuple[int, str]]] = {}
        self._now: dict[tuple[str, str], str] = {}
        self._moves: deque[dict[str, Any]] = deque(maxlen=_MOVES)

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
        if text == _GONE:
            self._now.pop((where, name))
        else:
            self._now[where, name] = text
        at_us = now_us()
        lines = self._stories.setdefault(name, deque(maxlen=_LINES))
        lines.append((at_us, f"{where}: {text}"))
        self._moves.append({"at_us": at_us, "deployment": name, "where": where, "text": text})

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
