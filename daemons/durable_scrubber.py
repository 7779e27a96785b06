"""Reads durable images again, slowly, to find damage while there are newer and older ones.

The daemon does it, which knows them all and need not agree with anybody: each image once in
``scrub_days``, one at a time, for at most a twentieth of the time. A damaged one is set aside, as
by an agent that meets one; what is left is believed, and the calls that it lacks are kept, because
calls are kept for the image before the newest.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadImage, NotFound
from plexrl_slurm.core.ids import CauseId, DeploymentId, JobId
from plexrl_slurm.core.messages import DurableLost
from plexrl_slurm.daemons.fallback import may_pass, newest_below
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.db import deployments, queue
from plexrl_slurm.logs import say
from plexrl_slurm.memory import durable
from plexrl_slurm.memory.nvme import Gate

log = logging.getLogger(__name__)

#: How often it looks whether an image is due.
PAUSE_S: Final = 60.0
#: Of the time.
SHARE: Final = 0.05
_DAY_US: Final = 86_400_000_000


class DurableScrubber:
    """One a daemon."""

    def __init__(self, parts: Parts, *, found: Callable[[dict[str, Any]], None]) -> None:
        """``found`` is told of each image that is set aside."""
        self._parts, self._found = parts, found
        settings = parts.settings
        self._every_us = settings.scrub_days * _DAY_US if settings.durable else 0
        #: Looked at in vain: the file system does not say when it was read.
        self._seen_us: dict[Path, int] = {}

    async def loop(self) -> None:
        """For as long as the daemon lives."""
        while True:
            await asyncio.sleep(PAUSE_S)
            while self._every_us and await self.once(now_us()):
                pass

    async def once(self, at_us: int) -> bool:
        """Read the image that was not read for longest, if that is long enough ago; whether there
        was one."""
        known = [(name, Path(kept.path).parent) for name, kept in self._parts.shell.durable.items()]
        ages = await asyncio.to_thread(_ages, known)
        self._seen_us = {path: us for path, us in self._seen_us.items() if path in ages}
        due = {path: max(us, self._seen_us.get(path, 0)) for path, (us, _) in ages.items()}
        folder = min(due, key=lambda each: due[each], default=None)
        if folder is None or due[folder] > at_us - self._every_us:
            return False
        self._seen_us[folder] = at_us
        await self._read(ages[folder][1], folder)
        return True

    async def _read(self, name: DeploymentId, folder: Path) -> None:
        gate = Gate(slow=True, share=SHARE)
        try:
            try:
                await asyncio.to_thread(durable.check_image, folder, gate=gate)
            except BadImage:  # it is not the disk that errs every time
                await asyncio.to_thread(durable.check_image, folder, gate=gate)
        except BadImage as problem:
            if may_pass(problem, folder):
                say(log, "durable_unreadable", deployment=name, reason=problem)
            else:
                await self._damaged(name, folder, problem)
        else:
            with contextlib.suppress(OSError):  # the next daemon need not begin again
                os.utime(folder / durable.MANIFEST)
        finally:
            gate.close()  # without a daemon the thread ends at its next block

    async def _damaged(self, name: DeploymentId, folder: Path, problem: BadImage) -> None:
        if not await asyncio.to_thread(folder.exists):
            return  # a newer one has taken its place meanwhile
        try:
            await asyncio.to_thread(durable.set_aside, folder)
        except OSError as error:
            say(log, "damaged_image_stays", folder=folder, reason=error.strerror)
            return
        parts, live = self._parts, self._parts.state.deployments.get(name)
        known = parts.shell.durable.get(name)
        if live is None or live.dropped or known is None:
            return
        kept = await asyncio.to_thread(_left, folder.parent, known.progress)
        if kept is not None:
            parts.shell.durable[name] = kept
        else:
            del parts.shell.durable[name]
        seq, part = durable.progress_of(folder)
        aside = folder.with_name(f"damaged-{folder.name}")
        say(log, "durable_damaged", deployment=name, folder=aside, reason=problem)
        self._found(
            {
                "id": name,
                "node": "",
                "seq": seq,
                "part": part,
                "reason": problem.explain(),
                "dropped": False,
                "aside": str(aside),
            }
        )
        text = f"a durable image of {name}, at seq {seq}, is damaged ({problem}) and set aside"
        parts.writer.add(_write, name, kept)
        parts.writer.add(_note, live.job, text, now_us(), lazy=True)
        if name in parts.shell.deployments:
            parts.shell.feed(
                DurableLost(
                    at_us=now_us(),
                    cause=CauseId("scrub"),
                    deployment=name,
                    durable=kept.progress if kept is not None else None,
                    spare=kept.spare if kept is not None else None,
                )
            )


def _ages(known: Iterable[tuple[DeploymentId, Path]]) -> dict[Path, tuple[int, DeploymentId]]:
    """When each image of these deployments was written or read."""
    found = {}
    for name, home in known:
        for folder in durable.folders_of(home):
            with contextlib.suppress(OSError):  # it is being deleted
                us = int((folder / durable.MANIFEST).stat().st_mtime * 1e6)
                found[folder] = us, name
    return found


def _left(home: Path, known: tuple[int, int]) -> Durable | None:
    """The newest image of a deployment up to the one that was ``known``, and what is before it."""
    seq, part = known
    newest = newest_below(home, (seq, part + 1))
    if newest is None:
        return None
    spare = newest_below(home, newest.progress)
    return Durable(
        progress=newest.progress,
        path=str(newest.folder),
        spare=spare.progress if spare is not None else None,
    )


def _write(session: Any, name: DeploymentId, kept: Durable | None) -> None:
    with contextlib.suppress(NotFound):
        deployments.durable_lost(
            session,
            name,
            durable=kept.progress if kept is not None else None,
            path=kept.path if kept is not None else "",
        )


def _note(session: Any, job: JobId, text: str, now: int) -> None:
    queue.note(session, job, at_us=now, kind="damaged", text=text)
