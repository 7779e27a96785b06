"""Writes down what the core decided: ledger rows, ends of calls, images. Implements Books."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from plexrl_slurm import wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import NotFound, StorageFull
from plexrl_slurm.core.ids import CallId, DeploymentId, WpgId
from plexrl_slurm.core.messages import Charge, FunctionKind
from plexrl_slurm.daemons.entries import Entry
from plexrl_slurm.daemons.spool import Spool
from plexrl_slurm.daemons.writer import Writer
from plexrl_slurm.db import calls, deployments, ledger
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: Called in a call's transaction, or when it has ended: what its end means for the service.
Ended = Callable[[Entry, wire.Result, bool], None]


class Accounting:
    """The daemon's books."""

    def __init__(self, writer: Writer, spool: Spool) -> None:
        self._writer, self._spool = writer, spool
        #: Which hold each WPG belongs to.
        self.holds: dict[WpgId, str] = {}
        #: Set by the service.
        self.on_end: Ended | None = None
        #: ``(deployment, seq) -> call`` of training calls whose bodies may still be needed.
        self.kept: dict[DeploymentId, dict[int, CallId]] = {}

    def charge(self, charge: Charge) -> None:
        """A ledger row; it shares the transaction of whatever is written next."""
        # The name may belong to another hold by the time it is written.
        self._writer.add(_append, charge, {charge.wpg: self.holds[charge.wpg]}, lazy=True)

    def finished(
        self, entry: Entry, result: wire.Result, *, ok: bool, after: Callable[[], None]
    ) -> None:
        """A call ended: result into the spool, row and ledger in one transaction, then answer."""
        if self.on_end is not None:
            self.on_end(entry, result, ok)
        call = entry.call
        if call.kind is FunctionKind.SAMPLE:
            # A restart runs it again with the same seed: nothing has to be durable.
            after()
            return
        kept = True
        try:
            self._spool.write_result(call.id, wire.encode(result))
        except StorageFull as problem:
            say(log, "result_not_kept", call=call.id, reason=problem)
            kept = False
        message = result.message if isinstance(result, wire.Failed) else ""
        self._writer.add(self._finish, call.id, ok, message, kept, after=after)
        if call.parts > 1 and ok:
            # Of a call that failed they tell a later daemon how many parts took effect.
            self._spool.drop_result(call.id, parts=call.parts)

    def _finish(self, session: Any, call: CallId, ok: bool, message: str, kept: bool) -> None:
        calls.finish_call(
            session,
            call,
            ok=ok,
            now_us=now_us(),
            message=message,
            result_kept=kept,
        )

    def image(
        self, wpg: WpgId, deployment: DeploymentId, progress: tuple[int, int], size: int
    ) -> None:
        """A complete image exists in the host tier."""
        self._writer.add(_image, wpg, deployment, progress, size, now_us(), lazy=True)

    def persisted(self, deployment: DeploymentId, progress: tuple[int, int], path: str) -> None:
        """A complete image lies in the durable tier."""
        self._writer.add(_persisted, deployment, progress, path)

    def remember(self, deployment: DeploymentId, seq: int, call: CallId) -> None:
        """A training call whose body is in the spool."""
        self.kept.setdefault(deployment, {})[seq] = call

    def forget(self, deployment: DeploymentId, progress: tuple[int, int]) -> list[CallId]:
        """Calls of ``deployment`` that no replay can need: all below ``progress``."""
        bodies = self.kept.get(deployment, {})
        gone = [seq for seq in bodies if seq < progress[0]]
        if gone:
            self._writer.add(self._drop_bodies, deployment, progress[0], lazy=True)
        return [bodies.pop(seq) for seq in gone]

    def forget_all(self, deployment: DeploymentId) -> list[CallId]:
        """The deployment is dropped."""
        return list(self.kept.pop(deployment, {}).values())

    def _drop_bodies(self, session: Any, deployment: DeploymentId, seq: int) -> None:
        calls.drop_bodies_below(session, deployment, seq=seq)


def _append(session: Any, charge: Charge, holds: dict[WpgId, str]) -> None:
    ledger.append(session, [charge], holds=holds)


def _persisted(
    session: Any, deployment: DeploymentId, progress: tuple[int, int], path: str
) -> None:
    with contextlib.suppress(NotFound):
        deployments.persisted(session, deployment, progress=progress, path=path)


def _image(
    session: Any,
    wpg: WpgId,
    deployment: DeploymentId,
    progress: tuple[int, int],
    size: int,
    now: int,
) -> None:
    deployments.image_completed(
        session, deployment, wpg=wpg, tier="host", progress=progress, bytes=size, now_us=now
    )
