"""The core fed by hand: short verbs for events, and a clock that one sets."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Self

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId, CauseId
from plexrl_slurm.core.messages import (
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
    DurableLost,
    Expect,
    Expected,
    Finish,
    Forget,
    ImagesLeft,
    Pause,
    Paused,
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
    Wpg,
    WpgDown,
    WpgDraining,
    WpgHeld,
    WpgReleased,
    WpgResumed,
    WpgUp,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.core.tails import TailRules

CAUSE = CauseId("test")
SECOND = 1_000_000


class Hand:
    """One core, one WPG at a time, one clock. Every verb returns what followed, charges apart."""

    def __init__(
        self,
        wpg: Wpg,
        *,
        policy: str = "hrrs",
        image_every: int = 10,
        durable_every: int | None = None,
        spare_images: bool = False,
        hints: bool = False,
        tails: TailRules | None = None,
    ) -> None:
        self.wpg, self.now, self.policy, self.image_every = wpg, SECOND, policy, image_every
        self.durable_every, self.spare_images = durable_every, spare_images
        self.hints, self.tails = hints, tails
        self.core = self.make_core()
        self.charges: list[Charge] = []
        self.wakes: list[int] = []
        self.held()

    def make_core(self) -> SchedulerCore:
        return SchedulerCore(
            find_policy(self.policy),
            costs=SwitchCosts(),
            image_every=self.image_every,
            durable_every=self.durable_every,
            spare_images=self.spare_images,
            hints=self.hints,
            tails=self.tails,
        )

    def restart(self) -> None:
        """A new core that knows nothing."""
        self.core = self.make_core()
        self.held()

    def at(self, wpg: Wpg) -> Self:
        """The verbs are about ``wpg`` from now on."""
        self.wpg = wpg
        return self

    def later(self, seconds: float) -> Self:
        self.now += int(seconds * SECOND)
        return self

    def held(self) -> list[AnyInstruction]:
        return self._then(self.core.handle(WpgHeld(wpg=self.wpg, at_us=self.now, cause=CAUSE)))

    def up(
        self,
        resident: Deployment | None = None,
        running: tuple[tuple[CallId, int], ...] = (),
        progress: tuple[int, int] | None = None,
        beside: Deployment | None = None,
    ) -> list[AnyInstruction]:
        name = None if resident is None else resident.id
        event = WpgUp(
            wpg=self.wpg.id,
            resident=name,
            running=running,
            progress=progress,
            beside=None if beside is None else beside.id,
            at_us=self.now,
            cause=CAUSE,
        )
        return self._then(self.core.handle(event))

    def down(self, reason: str = "rank 0 died", *, blame: bool = True) -> list[AnyInstruction]:
        event = WpgDown(wpg=self.wpg.id, reason=reason, blame=blame, at_us=self.now, cause=CAUSE)
        return self._then(self.core.handle(event))

    def release(self, reason: str = "") -> list[AnyInstruction]:
        event = WpgReleased(wpg=self.wpg.id, reason=reason, at_us=self.now, cause=CAUSE)
        return self._then(self.core.handle(event))

    def drain(self, relief: str = "") -> list[AnyInstruction]:
        event = WpgDraining(wpg=self.wpg.id, at_us=self.now, cause=CAUSE, relief=relief)
        return self._then(self.core.handle(event))

    def resume(self) -> list[AnyInstruction]:
        event = WpgResumed(wpg=self.wpg.id, at_us=self.now, cause=CAUSE)
        return self._then(self.core.handle(event))

    def move(
        self, deployment: Deployment, to: Wpg, *, image: tuple[int, int] | None = None
    ) -> list[AnyInstruction]:
        there = replace(deployment, wpg=to.id)
        event = DeploymentMoved(deployment=there, image=image, at_us=self.now, cause=CAUSE)
        return self._then(self.core.handle(event))

    def durable_lost(
        self, deployment: Deployment, durable: tuple[int, int] | None
    ) -> list[AnyInstruction]:
        event = DurableLost(
            deployment=deployment.id, durable=durable, spare=None, at_us=self.now, cause=CAUSE
        )
        return self._then(self.core.handle(event))

    def persisted(
        self,
        deployment: Deployment,
        progress: tuple[int, int],
        *,
        ok: bool = True,
        left: ImagesLeft | None = None,
    ) -> list[AnyInstruction]:
        event = Persisted(
            deployment=deployment.id,
            progress=progress,
            ok=ok,
            left=left,
            at_us=self.now,
            cause=CAUSE,
        )
        return self._then(self.core.handle(event))

    def place(
        self,
        *deployments: Deployment,
        image: tuple[int, int] | None = None,
        applied: tuple[int, int] = (0, 0),
        durable: tuple[int, int] | None = None,
        spare: tuple[int, int] | None = None,
        expected: Expected | None = None,
    ) -> list[AnyInstruction]:
        out: list[AnyInstruction] = []
        for deployment in deployments:
            event = DeploymentPlaced(
                deployment=deployment,
                image=image,
                applied=applied,
                durable=durable,
                spare=spare,
                expected=expected,
                at_us=self.now,
                cause=CAUSE,
            )
            out += self._then(self.core.handle(event))
        return out

    def drop(self, deployment: Deployment) -> list[AnyInstruction]:
        event = DeploymentDropped(deployment=deployment.id, at_us=self.now, cause=CAUSE)
        return self._then(self.core.handle(event))

    def arrive(self, *calls: Call, done: bool = False) -> list[AnyInstruction]:
        out: list[AnyInstruction] = []
        for call in calls:
            event = CallArrived(call=call, done=done, at_us=self.now, cause=CAUSE)
            out += self.core.handle(event)
        return self._then(out)

    def cancel(self, call: Call) -> list[AnyInstruction]:
        event = CallCancelled(call=call.id, at_us=self.now, cause=CAUSE)
        return self._then(self.core.handle(event))

    def end(
        self, call: Call, *, part: int = 0, ok: bool = True, prefilled: tuple[int, int] = (0, 0)
    ) -> list[AnyInstruction]:
        event = RunEnded(
            wpg=self.wpg.id,
            call=call.id,
            part=part,
            ok=ok,
            prefilled=prefilled,
            at_us=self.now,
            cause=CAUSE,
        )
        return self._then(self.core.handle(event))

    def paused(self, call: Call, *, tokens: int = 1, part: int = 0) -> list[AnyInstruction]:
        event = Paused(
            wpg=self.wpg.id, call=call.id, part=part, tokens=tokens, at_us=self.now, cause=CAUSE
        )
        return self._then(self.core.handle(event))

    def switched(
        self,
        *,
        ok: bool = True,
        moved_bytes: int = 0,
        error: str = "",
        left: ImagesLeft | None = None,
        room: Room = Room.ENOUGH,
    ) -> list[AnyInstruction]:
        event = SwitchEnded(
            wpg=self.wpg.id,
            ok=ok,
            moved_bytes=moved_bytes,
            error=error,
            left=left,
            room=room,
            at_us=self.now,
            cause=CAUSE,
        )
        return self._then(self.core.handle(event))

    def tick(self) -> list[AnyInstruction]:
        return self._then(self.core.handle(Tick(at_us=self.now, cause=CAUSE)))

    def work(self, *calls: Call) -> list[AnyInstruction]:
        """Calls that arrive and end one after another, a millisecond each."""
        out: list[AnyInstruction] = []
        for call in calls:
            self.arrive(call)
            out = self.later(0.001).end(call)
        return out

    def _then(self, out: list[AnyInstruction]) -> list[AnyInstruction]:
        out = [*out, *self.core.plan(self.now, CAUSE)]
        self.core.check_invariants()
        self.charges += [order for order in out if isinstance(order, Charge)]
        self.wakes += [order.at_us for order in out if isinstance(order, WakeAt)]
        return [order for order in out if not isinstance(order, Charge | WakeAt)]


def short(orders: list[AnyInstruction]) -> list[str]:
    """Instructions as words, for tables."""
    return list(_words(orders))


def _words(orders: list[AnyInstruction]) -> Iterator[str]:
    for order in orders:
        match order:
            case Run(call=call, part=part, replay=replay):
                yield f"{'replay' if replay else 'run'} {call}" + (f" part {part}" if part else "")
            case Switch(outgoing=outgoing, incoming=incoming, beside=beside):
                then = f" beside {beside}" if beside else ""
                yield f"switch {outgoing or 'nothing'} -> {incoming}{then}"
            case SaveImage(deployment=deployment, progress=progress):
                yield f"save {deployment} at {progress}"
            case Finish(call=call, ok=ok, reason=reason):
                yield f"{'finish' if ok else 'fail'} {call}" + (f": {reason}" if reason else "")
            case Forget(deployment=deployment, progress=progress):
                yield f"forget {deployment} below {progress}"
            case Persist(deployment=deployment, wpg=wpg, progress=progress):
                yield f"persist {deployment} at {progress} from {wpg}"
            case Pause(calls=calls):
                yield " ".join(["pause", *calls])
            case Expect(deployment=expected):
                yield f"expect {expected or 'nobody'}"
            case Drained(wpg=wpg):
                yield f"drained {wpg}"
            case _:
                yield type(order).__name__
