"""A held partition whose rollouts have tails: calls that may be paused, or run on beside others.

A rollout is :data:`CALLS` calls. The share of them that the trace calls ``tail.engines_needed``
lasts as long as the rollout, the others end when ``tail.frac`` of it is left. Two rollouts at once
on a WPG each take longer by ``Plan.slowdown``: an assumption, that tails are bound by memory and
leave most of the GPUs' work to others. A call that goes on after a pause takes
``Plan.prefill_us`` more.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    AnyInstruction,
    Call,
    CallArrived,
    Finish,
    FunctionKind,
    Pause,
    Paused,
    Run,
    Switch,
)
from plexrl_slurm.sim.held import HeldWorld
from plexrl_slurm.sim.world import CAUSE

#: Of one rollout.
CALLS: Final = 8


@dataclass(slots=True, eq=False, kw_only=True)
class _Work:
    """A sample call that runs."""

    order: Run
    life: int
    left_us: int
    #: Counts its ends that were foreseen: only the last one comes.
    version: int = 0


class TailedWorld(HeldWorld):
    """``plan.tails`` says what becomes of tails that others wait for."""

    def __init__(self, *args: Any, **names: Any) -> None:
        #: What runs on each WPG, and since when at the same speed.
        self._works: dict[WpgId, dict[CallId, _Work]] = defaultdict(dict)
        self._since_us: dict[WpgId, int] = {}
        #: Of calls that were paused.
        self._left_us: dict[CallId, int] = {}
        #: Calls of a rollout that have not ended.
        self._open: dict[tuple[JobId, int], int] = {}
        self._step_of: dict[CallId, int] = {}
        #: Calls paused, and switches beside a tail.
        self.pauses = self.besides = 0
        super().__init__(*args, **names)

    def call(self, job: JobId, kind: FunctionKind, seq: int, length_us: int) -> None:
        if kind is not FunctionKind.SAMPLE:
            super().call(job, kind, seq, length_us)
            return
        tail = self.records[job].job.trace.phases.tail
        last = max(1, round(tail.engines_needed * CALLS)) if tail.frac else CALLS
        name = DeploymentId(f"rollout-{job}")
        self._open[job, seq] = CALLS
        for number in range(CALLS):
            share = 1.0 if number < last else 1.0 - tail.frac
            call = Call(
                id=CallId(f"{name}/{seq}.{number}"),
                deployment=name,
                job=job,
                kind=kind,
                seq=seq * CALLS + number,
                tokens=1000,
            )
            self._calls[call.id] = (call, max(1, int(length_us * share)))
            self._step_of[call.id] = seq
            self.send(CallArrived(call=call, at_us=self.now_us, cause=CAUSE))

    def _do(self, instructions: Iterable[AnyInstruction]) -> None:
        for order in instructions:
            match order:
                case Run() if order.call in self._step_of:
                    self._begin(order)
                case Pause(wpg=wpg, calls=calls):
                    for call in calls:
                        self.at(self.now_us, self._pause, self._works[wpg][call])
                case Finish(call=call) if call in self._step_of:
                    self._finish(order)
                case Switch() if order.beside is not None:
                    self.besides += 1
                    super()._do([order])
                case _:
                    super()._do([order])

    def _finish(self, order: Finish) -> None:
        call, _ = self._calls.pop(order.call)
        number = self._step_of.pop(order.call)
        if not order.ok:
            raise AssertionError(f"{order.call} failed: {order.reason}")
        self._open[call.job, number] -= 1
        if not self._open[call.job, number]:
            del self._open[call.job, number]
            self._controllers[call.job].finished(replace(call, seq=number))

    # -- calls that run ----------------------------------------------------------------------
    def _begin(self, order: Run) -> None:
        self._here(order.wpg)
        self._advance(order.wpg)
        left_us = self._left_us.pop(order.call, None)
        if left_us is None:
            left_us = self._calls[order.call][1]
        else:
            left_us += self.plan.prefill_us
        life = self._devices[order.wpg].life
        self._works[order.wpg][order.call] = _Work(order=order, life=life, left_us=left_us)
        self._foresee(order.wpg)

    def _pause(self, work: _Work) -> None:
        order = work.order
        if self._here(order.wpg).get(order.call) is not work:
            return  # it ended first, or was lost
        self._advance(order.wpg)
        del self._works[order.wpg][order.call]
        self._left_us[order.call] = work.left_us
        self._foresee(order.wpg)
        self.pauses += 1
        self.send(
            Paused(wpg=order.wpg, call=order.call, part=0, tokens=1, at_us=self.now_us, cause=CAUSE)
        )

    def _end(self, work: _Work, version: int) -> None:
        order = work.order
        if self._here(order.wpg).get(order.call) is not work or work.version != version:
            return
        self._advance(order.wpg)
        del self._works[order.wpg][order.call]
        self._foresee(order.wpg)
        self._ran(order, work.life)

    def _here(self, wpg: WpgId) -> dict[CallId, _Work]:
        """What runs there, without what was lost with a node."""
        works, device = self._works[wpg], self._devices.get(wpg)
        for call in [c for c, w in works.items() if device is None or w.life != device.life]:
            del works[call]
        return works

    def _percent(self, wpg: WpgId) -> int:
        """How much longer everything takes there now."""
        two = len({work.order.deployment for work in self._works[wpg].values()}) > 1
        return 100 + (self.plan.slowdown if two else 0)

    def _advance(self, wpg: WpgId) -> None:
        """Book what was done until now, before what runs changes."""
        done_us = (self.now_us - self._since_us.get(wpg, self.now_us)) * 100 // self._percent(wpg)
        for work in self._works[wpg].values():
            work.left_us = max(0, work.left_us - done_us)
        self._since_us[wpg] = self.now_us

    def _foresee(self, wpg: WpgId) -> None:
        """When each ends, if nothing changes."""
        percent = self._percent(wpg)
        for work in self._works[wpg].values():
            work.version += 1
            left_us = -(-work.left_us * percent // 100)
            self.at(self.now_us + left_us, self._end, work, work.version)
