"""A small world around the core: WPGs that compute hash chains, ranks that die, a daemon that
restarts, clients that pipeline, repeat, cancel and leave. Everything random comes from one seed.

It plays the shell as the shell must play it, and checks every instruction while it does.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    WRITES,
    AnyEvent,
    AnyInstruction,
    Call,
    CallArrived,
    CallCancelled,
    Charge,
    Deployment,
    DeploymentDropped,
    DeploymentPlaced,
    Finish,
    Forget,
    FunctionKind,
    Pool,
    Run,
    RunEnded,
    SaveImage,
    Switch,
    SwitchEnded,
    Tick,
    WakeAt,
    Wpg,
    WpgDown,
    WpgHeld,
    WpgReleased,
    WpgUp,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore

CAUSE = CauseId("test")
MS = 1_000
SECOND = 1_000_000


def chain(state: str, *facts: object) -> str:
    """The state after one more change."""
    return blake2b(repr((state, *facts)).encode(), digest_size=8).hexdigest()


@dataclass
class Device:
    """What a gang of ranks has and does."""

    wpg: Wpg
    up: bool = False
    born: int = 0
    #: Resident deployment (training) or content (sampling), its state and progress.
    resident: DeploymentId | None = None
    #: Whose tail runs on in the second slot.
    beside: DeploymentId | None = None
    state: str = ""
    progress: tuple[int, int] = (0, 0)
    runs: dict[CallId, Run] = field(default_factory=dict)
    ended: list[tuple[Run, bool]] = field(default_factory=list)
    move: Switch | SaveImage | None = None


@dataclass
class Record:
    """The database row of a call."""

    call: Call
    arrived_us: int = 0
    fails: bool = False
    deadly: bool = False
    finished: bool | None = None
    effect: int = 0
    begun_us: int | None = None
    ended_us: int = 0


class World:
    """The shell, the ranks and the clients."""

    def __init__(
        self,
        seed: int,
        *,
        policy: str = "hrrs",
        wpgs: tuple[Wpg, ...],
        deaths: float = 0.0,
        failures: float = 0.0,
        unit_us: int = 10 * MS,
        hold_us: int = 2 * SECOND,
        image_every: int = 3,
    ) -> None:
        self.rng = random.Random(seed)
        self.policy, self.hold_us, self.image_every = policy, hold_us, image_every
        self.deaths, self.failures, self.unit_us = deaths, failures, unit_us
        self.now = SECOND
        self.daemon = True
        self.core = self.make_core()
        self.devices = {wpg.id: Device(wpg) for wpg in wpgs}
        self.deployments: dict[DeploymentId, Deployment] = {}
        self.dropped: set[DeploymentId] = set()
        #: What clients do once a call is answered.
        self.waiters: dict[CallId, Callable[[], object]] = {}
        self.images: dict[DeploymentId, tuple[tuple[int, int], str]] = {}
        self.records: dict[CallId, Record] = {}
        self.truth: dict[tuple[DeploymentId, int, int], str] = {}
        self.charges: dict[WpgId, list[Charge]] = defaultdict(list)
        #: WPGs that are held, and since when.
        self.held_us = {wpg.id: self.now for wpg in wpgs}
        self.events: list[AnyEvent | int] = []
        self.log: list[AnyInstruction] = []
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._count = 0
        self.longest_us = {"run": 0, "move": 0}
        self.step_us: dict[JobId, int] = defaultdict(int)
        for wpg in wpgs:
            self.send(WpgHeld(wpg=wpg, at_us=self.now, cause=CAUSE))
            self.after(self.rng.randint(0, 5 * self.unit_us), self.boot, wpg.id)

    def make_core(self) -> SchedulerCore:
        return SchedulerCore(
            find_policy(self.policy),
            costs=SwitchCosts(),
            hold_us=self.hold_us,
            image_every=self.image_every,
        )

    # -- time -----------------------------------------------------------------------------

    def after(
        self, delay_us: int, action: Callable[..., object], *args: object, **names: object
    ) -> None:
        self._count += 1
        todo: Callable[[], object] = partial(action, *args, **names)
        heapq.heappush(self._heap, (self.now + delay_us, self._count, todo))

    def run(self, limit: int = 100_000) -> None:
        """Let everything happen that happens."""
        while self._heap:
            limit -= 1
            assert limit > 0, "the world does not come to rest"
            at_us, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, at_us)
            action()

    # -- the shell ------------------------------------------------------------------------

    def send(self, event: AnyEvent) -> None:
        assert self.daemon
        self.events.append(event)
        self.carry_out(self.core.handle(event))
        self.core.check_invariants()
        if self.rng.random() < 0.7:
            self.plan()
        else:
            self.after(self.rng.randint(0, 3 * MS), self.plan)

    def plan(self) -> None:
        if self.daemon:
            self.events.append(self.now)
            self.carry_out(self.core.plan(self.now, CAUSE))
            assert self.core.plan(self.now, CAUSE) == [], "a second plan must find nothing to do"
            self.core.check_invariants()

    def carry_out(self, instructions: list[AnyInstruction]) -> None:
        self.log += instructions
        for order in instructions:
            self.perform(order)

    def perform(self, order: AnyInstruction) -> None:
        match order:
            case Run():
                self.start_run(order)
            case Switch() | SaveImage():
                self.start_move(order)
            case Finish(call=call, ok=ok):
                record = self.records[call]
                assert record.finished is None, f"{call} was answered twice"
                record.finished, record.ended_us = ok, self.now
                waiter = self.waiters.pop(call, None)
                if waiter is not None:
                    self.after(0, waiter)
            case Charge():
                self.charges[order.wpg].append(order)
            case WakeAt(at_us=at_us):
                self.after(max(0, at_us - self.now), self.tick)
            case Forget(deployment=name, progress=progress):
                assert self.images[name][0] == progress
            case _:
                raise AssertionError(f"nobody asked for {order}")

    def tick(self) -> None:
        if self.daemon:
            self.send(Tick(at_us=self.now, cause=CAUSE))

    def boot(self, wpg: WpgId) -> None:
        device = self.devices[wpg]
        device.up = True
        if self.daemon:
            self.send(WpgUp(wpg=wpg, at_us=self.now, cause=CAUSE))

    def kill(self, wpg: WpgId, only: int) -> None:
        """A rank of the gang that was ``only``-th born dies."""
        device = self.devices[wpg]
        if not device.up or device.born != only:
            return
        born = device.born + 1
        self.devices[wpg] = Device(device.wpg, born=born)
        if self.daemon:
            self.send(WpgDown(wpg=wpg, reason="killed", at_us=self.now, cause=CAUSE))
        self.after(self.rng.randint(1, 20 * self.unit_us), self.boot, wpg)

    # -- ranks ----------------------------------------------------------------------------

    def start_run(self, order: Run) -> None:
        device, record = self.devices[order.wpg], self.records[order.call]
        call, deployment = record.call, self.deployments[order.deployment]
        assert device.up and device.move is None, "the WPG is not free"
        assert deployment.wpg == order.wpg
        others = [self.records[c].call.kind for c in device.runs]
        if call.kind is FunctionKind.SAMPLE:
            assert all(kind is FunctionKind.SAMPLE for kind in others)
            assert device.resident is not None
            assert self.content(device.resident) == deployment.content
            assert self.contents(device) <= {deployment.content, self.content(device.beside)}
        else:
            assert not others, "a training function runs alone"
            if call.kind is FunctionKind.CREATE:
                device.resident, device.state, device.progress = deployment.id, "", (0, 0)
            assert device.resident == deployment.id
            known = self.truth.setdefault((deployment.id, call.seq, order.part), device.state)
            assert known == device.state, f"{order} runs on a state that it must not see"
        if record.begun_us is None:
            record.begun_us = self.now
        assert order.replay <= (record.finished is not None or order.part < record.effect)
        device.runs[call.id] = order
        deadly = record.deadly or self.rng.random() < self.deaths
        duration = self.rng.randint(1, 10 * self.unit_us)
        self.longest_us["run"] = max(self.longest_us["run"], duration)
        born = device.born
        if deadly:
            self.after(duration, self.kill, order.wpg, born)
        else:
            self.after(duration, self.end_run, order, born)

    def end_run(self, order: Run, born: int) -> None:
        device, record = self.devices[order.wpg], self.records[order.call]
        call = record.call
        if device.born != born or device.runs.get(call.id) is not order:
            return
        del device.runs[call.id]
        ok = not (record.fails and order.part == call.parts - 1)
        if ok and call.kind in WRITES:
            device.state = chain(device.state, call.id, order.part)
            record.effect = max(record.effect, order.part + 1)
        last = order.part + 1 == call.parts or not ok
        if call.kind is not FunctionKind.SAMPLE:
            device.progress = (call.seq + 1, 0) if last else (call.seq, order.part + 1)
        elif ok:
            record.effect = order.part + 1
        if self.daemon:
            self.answer_run(order, ok)
        else:
            device.ended.append((order, ok))

    def answer_run(self, order: Run, ok: bool) -> None:
        at_us = self.now - self.rng.randint(0, 200)
        self.send(
            RunEnded(
                wpg=order.wpg, call=order.call, part=order.part, ok=ok, at_us=at_us, cause=CAUSE
            )
        )
        for job in {d.job for d in self.deployments.values()}:
            seen = self.core._books.estimates.step_us(job)
            self.step_us[job] = max(self.step_us[job], seen)

    def start_move(self, order: Switch | SaveImage) -> None:
        device = self.devices[order.wpg]
        assert device.up and device.move is None, "the WPG is not free"
        if device.runs:
            assert isinstance(order, Switch) and device.wpg.second_slot, "the WPG is not free"
            tail = {self.content(order.beside or order.incoming)}
            assert self.contents(device) == tail, "no slot is free"
        device.move = order
        if isinstance(order, SaveImage):
            assert device.resident == order.deployment
        elif order.outgoing is not None:
            assert device.resident == order.outgoing
        born, duration = device.born, self.rng.randint(1, 8 * self.unit_us)
        self.longest_us["move"] = max(self.longest_us["move"], duration)
        if self.rng.random() < self.deaths:
            self.after(duration, self.kill, order.wpg, born)
        else:
            self.after(duration, self.end_move, order, born)

    def content(self, name: DeploymentId | None) -> str | None:
        return None if name is None else self.deployments[name].content

    def contents(self, device: Device) -> set[str | None]:
        """Of what it samples."""
        return {self.content(run.deployment) for run in device.runs.values()}

    def end_move(self, order: Switch | SaveImage, born: int) -> None:
        device = self.devices[order.wpg]
        if device.born != born:
            return
        device.move = None
        ok = self.rng.random() >= self.failures
        if isinstance(order, Switch):
            device.beside = order.beside
        if isinstance(order, SaveImage):
            if ok:
                self.images[order.deployment] = (order.progress, device.state)
        elif not ok:
            device.resident, device.state = None, "?"
        else:
            if order.outgoing is not None:
                self.images[order.outgoing] = (order.outgoing_progress, device.state)
            device.resident = order.incoming
            if self.deployments[order.incoming].pool is Pool.TRAIN:
                device.progress, device.state = self.images[order.incoming]
        if self.daemon:
            moved, now = 1_000_000, self.now
            self.send(SwitchEnded(wpg=order.wpg, ok=ok, moved_bytes=moved, at_us=now, cause=CAUSE))

    # -- a daemon that dies and comes back --------------------------------------------------

    def stop_daemon(self, pause_us: int) -> None:
        if self.daemon:
            self.daemon = False
            self.after(pause_us, self.start_daemon)

    def start_daemon(self) -> None:
        if any(device.move is not None for device in self.devices.values()):
            self.after(self.unit_us, self.start_daemon)  # a switch ends before WpgUp may be said
            return
        self.core, self.daemon = self.make_core(), True
        self.events.clear()
        self.log.clear()
        #: Whether the gangs know the progress of their states.
        tells = self.rng.random() < 0.5
        for wpg, since_us in self.held_us.items():
            booked = self.charges[wpg]
            at_us = booked[-1].stop_us if booked else since_us
            self.send(WpgHeld(wpg=self.devices[wpg].wpg, at_us=at_us, cause=CAUSE))
        for name, deployment in self.deployments.items():
            if name in self.dropped:
                continue
            image = self.images.get(name)
            progress = None if image is None else image[0]
            device = self.devices[deployment.wpg]
            applied = progress or (0, 0)
            if tells:
                applied = max(applied, self.answered(name))
            elif device.resident == name and device.up:
                applied = self.applied(device)
            has = device.progress if device.resident == name else progress or (0, 0)
            for record in self.records.values():
                # Parts that only the lost device had are as if they had never been.
                if record.call.deployment == name and record.finished is None:
                    seq = record.call.seq
                    record.effect = has[1] if has[0] == seq else record.effect * (has[0] > seq)
            self.send(self.placed(deployment, progress, applied))
        for record in self.records.values():
            if record.call.deployment not in self.dropped:
                self.say_again(record)
        for device in self.devices.values():
            if device.up:
                ended, device.ended = device.ended, []
                orders = [*device.runs.values(), *(order for order, _ in ended)]
                self.send(
                    WpgUp(
                        wpg=device.wpg.id,
                        resident=device.resident,
                        beside=device.beside,
                        progress=device.progress if tells else None,
                        running=tuple((order.call, order.part) for order in orders),
                        at_us=self.now,
                        cause=CAUSE,
                    )
                )
                for order, ok in ended:
                    self.answer_run(order, ok)

    def placed(
        self, deployment: Deployment, image: tuple[int, int] | None, applied: tuple[int, int]
    ) -> DeploymentPlaced:
        """What a new daemon says of a deployment."""
        return DeploymentPlaced(
            deployment=deployment, image=image, applied=applied, at_us=self.now, cause=CAUSE
        )

    def kept_from(self, name: DeploymentId) -> int:
        """The first seq whose body the spool still has."""
        image = self.images.get(name)
        return 0 if image is None else image[0][0]

    def answered(self, name: DeploymentId) -> tuple[int, int]:
        """One past the last call that has an answer."""
        mine = [r for r in self.records.values() if r.call.deployment == name]
        last = max((r.call.seq for r in mine if r.finished is not None), default=-1)
        return last + 1, 0

    def applied(self, device: Device) -> tuple[int, int]:
        """What has taken effect, as the agent or only as the daemon knows it: both must do."""
        for order, ok in device.ended:
            if ok and self.rng.random() < 0.5:
                break
            return self.records[order.call].call.seq, order.part
        return device.progress

    def say_again(self, record: Record) -> None:
        """What the database says of a call."""
        call, done = record.call, record.finished is not None
        if done and call.kind is FunctionKind.SAMPLE:
            return
        if done and call.seq < self.kept_from(call.deployment):
            return
        if record.finished is False:
            parts = record.effect if call.kind in WRITES else 0
            call = Call(
                id=call.id,
                deployment=call.deployment,
                job=call.job,
                kind=call.kind,
                seq=call.seq,
                tokens=call.tokens,
                parts=max(1, parts),
                doomed=parts == 0,
            )
        self.send(CallArrived(call=call, done=done, at_us=self.now, cause=CAUSE))

    # -- clients ----------------------------------------------------------------------------

    def place(self, deployment: Deployment) -> None:
        if not self.daemon:
            self.after(self.unit_us, self.place, deployment)
            return
        self.deployments[deployment.id] = deployment
        self.send(DeploymentPlaced(deployment=deployment, at_us=self.now, cause=CAUSE))

    def submit(self, call: Call, *, fails: bool = False, deadly: bool = False) -> None:
        """A client asks, or asks again; while nobody listens it tries later."""
        if not self.daemon or call.deployment not in self.deployments:
            self.after(self.unit_us, self.submit, call, fails=fails, deadly=deadly)
            return
        record = self.records.get(call.id)
        if record is None:
            self.records[call.id] = Record(call, self.now, fails, deadly)
        elif record.finished is not None:
            return  # the border answers a repeat by itself
        self.send(CallArrived(call=call, at_us=self.now, cause=CAUSE))

    def cancel(self, call: CallId) -> None:
        if self.daemon and call in self.records and self.records[call].finished is None:
            self.send(CallCancelled(call=call, at_us=self.now, cause=CAUSE))

    def drop(self, name: DeploymentId) -> None:
        if not self.daemon:
            self.after(self.unit_us, self.drop, name)
            return
        if name not in self.deployments:
            return
        self.dropped.add(name)
        self.send(DeploymentDropped(deployment=name, at_us=self.now, cause=CAUSE))

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Release every WPG and audit the books."""
        for wpg in list(self.held_us):
            self.now += 1
            self.send(WpgReleased(wpg=wpg, at_us=self.now, cause=CAUSE))
            self.audit(self.devices[wpg].wpg, self.held_us[wpg], self.now)

    def audit(self, wpg: Wpg, start_us: int, stop_us: int) -> None:
        """Charges partition the time held."""
        at_us, rows = start_us, self.charges[wpg.id]
        while rows:
            group = [row for row in rows[:16] if row.start_us == at_us]
            assert group == rows[: len(group)] and group, f"gap or overlap at {at_us}: {rows[0]}"
            until_us = group[0].stop_us
            assert until_us > at_us
            assert {row.stop_us for row in group} == {until_us}
            assert sum(row.gpu_us for row in group) == (until_us - at_us) * wpg.gpus
            rows, at_us = rows[len(group) :], until_us
        assert at_us == stop_us
