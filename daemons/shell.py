"""Carries out the core's instructions, and brings back what happened.

It has the bodies, the links to the agents and the books. Events of one turn are planned once.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Protocol, assert_never

from plexrl_slurm import wire
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import StorageFull
from plexrl_slurm.core.explain import Asker, ReasonKind
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, WpgId
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    Call,
    CallArrived,
    CallCancelled,
    Charge,
    Deployment,
    DeploymentDropped,
    DeploymentMoved,
    DeploymentPlaced,
    Drained,
    Expect,
    Finish,
    Forget,
    FunctionKind,
    Grant,
    ImagesLeft,
    Pause,
    Persist,
    Persisted,
    Room,
    Run,
    RunEnded,
    SaveImage,
    Switch,
    SwitchEnded,
    Tick,
    WakeAt,
    WpgDown,
)
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.daemons.entries import Entry
from plexrl_slurm.daemons.orders import Durable, Orders, Weights
from plexrl_slurm.daemons.parts import cut, join
from plexrl_slurm.daemons.pauses import Pauses
from plexrl_slurm.daemons.spool import Spool
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: After a switch that failed (the host tier is full, say) it is tried again after this.
RETRY_S = 1.0


class Books(Protocol):
    """What has to be written down; implemented by ``accounting.Accounting``."""

    def charge(self, charge: Charge) -> None: ...
    def finished(
        self, entry: Entry, result: wire.Result, *, ok: bool, after: Callable[[], None]
    ) -> None: ...
    def image(
        self, wpg: WpgId, deployment: DeploymentId, progress: tuple[int, int], size: int
    ) -> None: ...
    def forget(self, deployment: DeploymentId, progress: tuple[int, int]) -> list[CallId]: ...


class Shell:
    """The impure half of the scheduler."""

    def __init__(
        self, core: SchedulerCore, *, spool: Spool, books: Books, max_part_tokens: int
    ) -> None:
        self.core = core
        self.entries: dict[CallId, Entry] = {}
        self.deployments: dict[DeploymentId, Deployment] = {}
        self.weights: dict[DeploymentId, Weights] = {}
        self.durable: dict[DeploymentId, Durable] = {}
        self.orders: Orders | None = None
        #: Called when a WPG that is to be given back is empty.
        self.on_drained: Callable[[WpgId], None] = lambda _wpg: None
        #: Where a snapshot will be sampled from host memory, also if it is not placed yet.
        self.sampled_at: Callable[[DeploymentId], WpgId | None] = lambda _snapshot: None
        #: Set when the core contradicts itself: the daemon must end.
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spool, self._books, self._max_part_tokens = spool, books, max_part_tokens
        self._planned = False
        self._wake: asyncio.TimerHandle | None = None
        self._homeless: dict[DeploymentId, list[Call]] = {}
        self._pauses = Pauses()
        #: Instruction that a WPG moves state by: its end changes the image.
        self._moving: dict[WpgId, Switch | SaveImage] = {}

    # -- facts in ----------------------------------------------------------------------------
    def feed(self, event: AnyEvent) -> None:
        """Hand the core one fact; it plans at the end of this turn."""
        if isinstance(event, WpgDown):
            self._moving.pop(event.wpg, None)
        try:
            self._perform(self.core.handle(event))
        except Exception as problem:
            self._break(problem)
            raise
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._plan)

    def place(
        self,
        deployment: Deployment,
        *,
        image: tuple[int, int] | None,
        applied: tuple[int, int],
        done: list[Call],
        weights: Weights | None = None,
    ) -> None:
        """Tell the core of a deployment, then of all its calls that are known."""
        self.deployments[deployment.id] = deployment
        if weights is not None:
            self.weights[deployment.id] = weights
        cause = CauseId(f"place {deployment.id}")
        self.feed(
            DeploymentPlaced(
                at_us=now_us(),
                cause=cause,
                deployment=deployment,
                image=image,
                applied=applied,
                durable=self.durable_progress(deployment.id),
                spare=self._spare(deployment.id),
            )
        )
        for call in done:
            self.feed(CallArrived(at_us=now_us(), cause=cause, call=call, done=True))
        for call in self._homeless.pop(deployment.id, []):
            self.feed(CallArrived(at_us=now_us(), cause=cause, call=call))

    def move(
        self, deployment: Deployment, *, image: tuple[int, int] | None, cause: CauseId
    ) -> None:
        """A deployment that the core knows has another home."""
        self.deployments[deployment.id] = deployment
        self.feed(DeploymentMoved(at_us=now_us(), cause=cause, deployment=deployment, image=image))

    def durable_progress(self, deployment: DeploymentId) -> tuple[int, int] | None:
        """Of its newest durable image."""
        found = self.durable.get(deployment)
        return found.progress if found is not None else None

    def _spare(self, deployment: DeploymentId) -> tuple[int, int] | None:
        found = self.durable.get(deployment)
        return found.spare if found is not None else None

    def persisted(
        self,
        deployment: DeploymentId,
        progress: tuple[int, int],
        *,
        ok: bool,
        left: ImagesLeft | None = None,
    ) -> None:
        """A persist ended; if ``ok``, that is written down."""
        self.feed(
            Persisted(
                at_us=now_us(),
                cause=CauseId(f"image of {deployment}"),
                deployment=deployment,
                progress=progress,
                ok=ok,
                left=left,
            )
        )

    def persist_later(self, step: Persist) -> None:
        """Nobody could be asked to persist it."""
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: self.persisted(step.deployment, step.progress, ok=False))

    def submit(self, entry: Entry) -> None:
        """A call that is durable. It waits here if its deployment is not placed yet."""
        call = entry.call
        self.entries[call.id] = entry
        if call.deployment in self.deployments:
            cause = CauseId(f"call {call.id}")
            self.feed(CallArrived(at_us=now_us(), cause=cause, call=call))
        else:
            self._homeless.setdefault(call.deployment, []).append(call)

    def refuse(self, entry: Entry, reason: str) -> None:
        """A durable call whose deployment went while it was accepted: it fails at once."""
        self.entries[entry.call.id] = entry
        self._finish(Finish(call=entry.call.id, ok=False, reason=reason, cause=CauseId("too late")))

    def drop(self, deployment: DeploymentId, *, reason: str = "the job has ended") -> None:
        """Its job ended, or nobody names the snapshot any more."""
        for call in self._homeless.pop(deployment, []):
            self._finish(Finish(call=call.id, ok=False, reason=reason, cause=CauseId("drop")))
        if self.deployments.pop(deployment, None) is not None:
            cause = CauseId(f"drop {deployment}")
            self.feed(DeploymentDropped(at_us=now_us(), cause=cause, deployment=deployment))
        self.weights.pop(deployment, None)
        self.durable.pop(deployment, None)

    def cancel(self, call: CallId) -> None:
        """Nobody waits for it any more."""
        entry = self.entries.get(call)
        if entry is None or entry.ended.is_set():
            return
        deployment = self.deployments.get(entry.call.deployment)
        cause = CauseId(f"cancel {call}")
        if deployment is None and entry.sample is not None:
            self._homeless.get(entry.call.deployment, []).remove(entry.call)
            self._finish(Finish(call=call, ok=False, reason="cancelled", cause=cause))
        elif deployment is not None:
            self.feed(CallCancelled(at_us=now_us(), cause=cause, call=call))
            if entry.call.kind is FunctionKind.SAMPLE and self.orders is not None:
                self.orders.abort(deployment.wpg, call)

    def run_ended(
        self, wpg: WpgId, call: CallId, part: int, *, ok: bool, result: bytes, error: str,
        order: str = "",
    ) -> None:  # fmt: skip
        """An agent says that a run ended. Its result is stored before the core hears of it."""
        said = self._pauses.event(wpg, call, part, ok=ok, result=result, error=error, order=order)
        if isinstance(said, RunEnded):
            self.keep_part(call, part, ok=ok, result=result, error=error)
        if said is not None:
            self.feed(said)

    def keep_part(self, call: CallId, part: int, *, ok: bool, result: bytes, error: str) -> None:
        """Remember one part's result until the call finishes."""
        entry = self.entries.get(call)
        if entry is None or entry.ended.is_set():
            return
        entry.parts[part] = wire.decode_result(result) if ok else wire.Failed(error, "user")
        if ok and entry.call.parts > 1:
            try:
                self._spool.write_result(call, result, part=part)
            except StorageFull as problem:
                say(log, "part_not_kept", call=call, part=part, reason=problem)

    def switch_ended(
        self,
        wpg: WpgId,
        *,
        ok: bool,
        moved_bytes: int,
        error: str = "",
        left: ImagesLeft | None = None,
        room: Room = Room.ENOUGH,
    ) -> None:
        """An agent says that a switch or a save ended."""
        step = self._moving.get(wpg)
        if ok:
            self._moving.pop(wpg, None)
        if ok and isinstance(step, SaveImage):
            self._books.image(wpg, step.deployment, step.progress, moved_bytes)
        elif ok and isinstance(step, Switch) and step.outgoing is not None:
            self._books.image(wpg, step.outgoing, step.outgoing_progress, moved_bytes)
        cause = step.cause if step is not None else CauseId(f"agent of {wpg}")
        event = SwitchEnded(
            at_us=now_us(), cause=cause, wpg=wpg, ok=ok, moved_bytes=moved_bytes,
            error=error, left=left, room=room,
        )  # fmt: skip
        if ok:
            self.feed(event)
        else:
            asyncio.get_running_loop().call_later(RETRY_S, self._feed_late, event, step)

    def _feed_late(self, event: SwitchEnded, step: Switch | SaveImage | None) -> None:
        if self._moving.get(event.wpg) is not step:
            return  # the WPG went down meanwhile, and may be at another one
        self._moving.pop(event.wpg, None)
        self.feed(dataclasses.replace(event, at_us=now_us()))

    # -- decisions out -----------------------------------------------------------------------
    def _plan(self) -> None:
        self._planned = False
        try:
            self._perform(self.core.plan(now_us(), CauseId("plan")))
        except Exception as problem:
            self._break(problem)

    def _break(self, problem: Exception) -> None:
        log.error("the core contradicts itself", exc_info=problem)
        if not self.broken.done():
            self.broken.set_exception(problem)

    def _perform(self, instructions: list[AnyInstruction]) -> None:
        for instruction in instructions:
            self._do(instruction)

    def _do(self, step: AnyInstruction) -> None:
        match step:
            case Run():
                self._run(step)
            case Pause():
                self._agents().pause(step)
            case Switch():
                self._moving[step.wpg] = step
                say(log, "switch", wpg=step.wpg, out=step.outgoing, into=step.incoming)
                into = step.incoming
                self._agents().switch(step, self.weights.get(into), self.durable.get(into))
            case SaveImage():
                self._moving[step.wpg] = step
                self._agents().save(step)
            case Grant():
                self._agents().grant(step)
            case Finish():
                self._finish(step)
            case Forget():
                for call in self._books.forget(step.deployment, step.progress):
                    self.forget(call)
            case Persist():
                self._agents().persist(step, self.durable.get(step.deployment))
            case Expect():
                self._agents().hint(step)
            case Drained():
                asyncio.get_running_loop().call_soon(self.on_drained, step.wpg)
            case Charge():
                self._books.charge(step)
            case WakeAt():
                self._wake_at(step.at_us)
            case _:
                assert_never(step)

    def _agents(self) -> Orders:
        if self.orders is None:
            raise RuntimeError("an instruction before any agent is known")
        return self.orders

    def _run(self, step: Run) -> None:
        entry = self.entries[step.call]
        if entry.sample is not None:
            body = self._pauses.body(step.call, entry.sample)
            self._agents().run(step, entry.call, body, "")
            return
        data = entry.data if entry.data is not None else self._spool.read_body(step.call)
        if data is None:
            message = f"the body of call {step.call} is gone, so it cannot be run again"
            body = wire.encode(wire.Doomed(message))
        elif entry.call.parts > 1:
            whole = wire.decode_body(data)
            if not isinstance(whole, wire.ForwardBackward):
                raise TypeError(f"{type(whole).__name__} has no parts")
            body = wire.encode(cut(whole, part=step.part, max_tokens=self._max_part_tokens))
        else:
            body = data
        self._agents().run(step, entry.call, body, entry.publish)

    def _finish(self, step: Finish) -> None:
        entry = self.entries.get(step.call)
        if entry is None or entry.ended.is_set():
            return
        result = self.result_of(entry, ok=step.ok, reason=step.reason)
        entry.data = None
        self._pauses.over(step.call)
        entry.parts.clear()
        self._books.finished(
            entry,
            result,
            ok=step.ok,
            after=lambda: entry.resolve(entry.translate(result) if entry.translate else result),
        )

    def finish_late(self, entry: Entry, *, ok: bool) -> None:
        """A training call ended while no daemon was there; the core never hears of it."""
        entry.late = True
        self._finish(Finish(call=entry.call.id, ok=ok, cause=CauseId("ended unseen")))

    def result_of(self, entry: Entry, *, ok: bool, reason: str) -> wire.Result:
        """The whole call's result out of its parts'."""
        if isinstance(entry.sample, wire.Doomed):
            return wire.Failed(entry.sample.message, "user")
        if not ok:
            failed = [part for part in entry.parts.values() if isinstance(part, wire.Failed)]
            if failed and not reason:
                return failed[-1]
            if entry.call.doomed:  # the core knows only that it is, the body knows why
                body = self._spool.read_body(entry.call.id)
                doomed = wire.decode_body(body) if body is not None else None
                if isinstance(doomed, wire.Doomed):
                    return wire.Failed(doomed.message, "user")
            return wire.Failed(reason or "the function failed", "server" if reason else "user")
        parts = []
        for part in range(entry.call.parts):
            result = entry.parts.get(part)
            if result is None:
                data = self._spool.read_result(entry.call.id, part=part)
                result = wire.decode_result(data) if data is not None else None
            if result is None:
                return wire.Failed(f"the result of part {part} of the call is lost", "server")
            parts.append(result)
        return join(parts)

    def forget(self, call: CallId) -> None:
        """No replay needs its body."""
        self._spool.drop_body(call)
        if (entry := self.entries.get(call)) is not None:
            entry.forgotten = True

    def discard(self, call: CallId) -> None:
        """Nobody will ask for it, and no replay needs it."""
        entry = self.entries.pop(call, None)
        self._pauses.over(call)
        if entry is not None and entry.sample is None:
            self._spool.drop_body(call)
            self._spool.drop_result(call)
            self._spool.drop_result(call, parts=entry.call.parts)

    def collect(self, *, fetched_before_us: int, ended_before_us: int) -> None:
        """Forget calls that no replay needs and whose answers were fetched long ago.

        ``ended_before_us``: the same of answers that nobody has ever fetched.
        """
        for call, entry in list(self.entries.items()):
            if not entry.ended.is_set() or not (entry.forgotten or entry.sample is not None):
                continue
            if entry.fetched_us is None:
                old = entry.ended_us < ended_before_us
            else:
                old = entry.fetched_us < fetched_before_us
            if old:
                self.discard(call)

    def image_found(self, deployment: DeploymentId, image: tuple[int, int] | None) -> None:
        """Its agent was started again, and this is what it found in the host tier."""
        self.feed(
            DeploymentPlaced(
                at_us=now_us(),
                cause=CauseId("agent was started again"),
                deployment=self.deployments[deployment],
                image=image,
                durable=self.durable_progress(deployment),
            )
        )

    # -- views -------------------------------------------------------------------------------
    @staticmethod
    def decode(result: bytes) -> wire.Result:
        """A stored result."""
        return wire.decode_result(result)

    def why_waits(self, call: CallId, asker: Asker) -> str:
        """What a call waits for; "" if it runs."""
        entry = self.entries.get(call)
        if entry is not None and entry.call.deployment not in self.deployments:
            return "its weights are not there yet"
        reasons = self.core.explain(call, asker).reasons
        # One that the core does not know has ended, and its end is being written down.
        said = (ReasonKind.RUNNING, ReasonKind.UNKNOWN)
        return "; ".join(reason.sentence for reason in reasons if reason.kind not in said)

    def _wake_at(self, at_us: int) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, (at_us - now_us()) / 1e6)
        self._wake = asyncio.get_running_loop().call_later(delay, self._ring, at_us)

    def _ring(self, at_us: int) -> None:
        """The loop's clock may run ahead of ours: a tick before its instant would do nothing."""
        if now_us() < at_us:
            self._wake_at(at_us)
        else:
            self.tick()

    def tick(self, *, flush: bool = False) -> None:
        """Let the core book what has passed; with ``flush`` to the last microsecond."""
        self.feed(Tick(at_us=now_us(), cause=CauseId("tick"), flush=flush))
