"""What the daemon does when an agent met a damaged image, and what it looks at before it trusts
the durable images that its database names.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage, NotFound
from plexrl_slurm.core.ids import DeploymentId, JobId
from plexrl_slurm.daemons.fallback import newest_below
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.db import deployments, queue
from plexrl_slurm.logs import say
from plexrl_slurm.memory import durable
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

_LOST: Final = (
    "its state is lost, because calls that no older image contains are gone: "
    "start from a checkpoint"
)


class DamagedImages:
    """One a daemon."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def met(self, done: tm.Done, node: str) -> None:
        """An agent has to go on from an older image, or from none; before the core hears of it."""
        live = self._parts.state.deployments.get(DeploymentId(done.deployment))
        if done.left is None or live is None or live.dropped:
            return
        self._believe(live.id, done.left.durable)
        why = "; ".join(done.left.damaged) or f"node {node} has no image of it"
        kept = self._parts.books.kept.get(live.id, {})
        lost = is_lost(done.left, accepted=live.calls, kept=kept)
        instead = _LOST if lost else f"it goes on from {_instead(done.left)}"
        say(log, "image_damaged", deployment=live.id, node=node, reason=why, instead=instead)
        text = f"the newest image of {live.id} cannot be used ({why}); {instead}"
        add = self._parts.writer.add
        add(_fell_back, live.id, done.left, self._path(live.id), now_us())
        add(_note, live.job, text, now_us(), lazy=True)
        hub = self._parts.hub
        for sentence in done.left.damaged:
            if hub is not None and str(self._parts.settings.durable_dir) not in sentence:
                hub.on_fault(node, sentence)

    def _believe(self, name: DeploymentId, left: tuple[int, int] | None) -> None:
        """The newest durable image is this one."""
        known = self._parts.shell.durable.get(name)
        if known is None or left == known.progress:
            return
        if left is None:
            del self._parts.shell.durable[name]
            return
        folder = durable.folder_of(self._parts.settings.durable_dir, name, left)
        older = newest_below(folder.parent, left)
        self._parts.shell.durable[name] = Durable(
            progress=left, path=str(folder), spare=older.progress if older is not None else None
        )

    def _path(self, name: DeploymentId) -> str:
        known = self._parts.shell.durable.get(name)
        return known.path if known is not None else ""


def on_disk(
    known: Iterable[tuple[DeploymentId, Durable]],
) -> dict[DeploymentId, Durable | None]:
    """Of each deployment the newest durable image that is there; an agent may have set the one
    aside that the database names, and its report may be lost. Reads the disk."""
    found: dict[DeploymentId, Durable | None] = {}
    for name, kept in known:
        folder = Path(kept.path)
        try:
            durable.read_manifest(folder)
            progress = kept.progress
        except BadImage:
            older = newest_below(folder.parent, kept.progress)
            if older is None:
                # Without its home it is the file system that is not there.
                found[name] = None if folder.parent.is_dir() else kept
                continue
            folder, progress = older.folder, older.progress
        spare = newest_below(folder.parent, progress)
        found[name] = Durable(
            progress=progress,
            path=str(folder),
            spare=spare.progress if spare is not None else None,
        )
    return found


def is_lost(left: tm.ImagesLeft, *, accepted: Collection[int], kept: Collection[int]) -> bool:
    """Whether no replay can go on from what is left: bodies of calls after it were dropped.

    Of ``accepted`` calls, by number, the bodies of the lowest are dropped first.
    """
    first = left.image[0] if left.image is not None else 0
    return any(seq >= first for seq in accepted) and (not kept or min(kept) > first)


def _instead(left: tm.ImagesLeft) -> str:
    if left.image is None:
        return "its first call on, which all run again"
    seq, part = left.image
    tier = "durable image" if left.image == left.durable else "image"
    return f"the {tier} at seq {seq}" + (f".{part}" if part else "") + "; calls since run again"


def _fell_back(
    session: Any, deployment: DeploymentId, left: tm.ImagesLeft, path: str, now: int
) -> None:
    with contextlib.suppress(NotFound):
        deployments.fell_back(
            session, deployment, image=left.image, durable=left.durable, path=path, now_us=now
        )


def _note(session: Any, job: JobId, text: str, now: int) -> None:
    queue.note(session, job, at_us=now, kind="damaged", text=text)
