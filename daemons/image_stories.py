"""Which tiers each image went through, and when: what agents say of their stocks, one by one."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.transport import messages as tm

#: Lines of each image's story that are kept.
_LINES: Final = 32


class ImageStories:
    """In the daemon's memory, since its start."""

    def __init__(self) -> None:
        self._stories: dict[str, deque[tuple[int, str]]] = {}
        self._now: dict[tuple[str, str], str] = {}

    def heard(self, node: str, stock: tm.Stock) -> None:
        """An agent has other images, or has them elsewhere, than it said before."""
        found: dict[str, list[str]] = {}
        for image in stock.images:
            seq, part = image.progress
            at = f"{image.tier} (seq {seq}{f'.{part}' if part else ''})"
            found.setdefault(image.deployment, []).append(at)
        known = {name for where, name in self._now if where == node}
        for name in sorted(known | found.keys()):
            text = " and ".join(sorted(found.get(name, []))) or "gone"
            if self._now.get((node, name), "gone") == text:
                continue
            if text == "gone":
                self._now.pop((node, name))
            else:
                self._now[node, name] = text
            lines = self._stories.setdefault(name, deque(maxlen=_LINES))
            lines.append((now_us(), f"{node}: {text}"))

    def of(self, deployment: str) -> Sequence[dict[str, Any]]:
        """The story of an image, oldest first."""
        return [{"at_us": at, "text": text} for at, text in self._stories.get(deployment, ())]

    def forget(self, deployment: str) -> None:
        """It is dropped."""
        self._stories.pop(deployment, None)
        for key in [key for key in self._now if key[1] == deployment]:
            del self._now[key]
