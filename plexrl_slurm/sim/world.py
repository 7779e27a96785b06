"""Drives the core as the daemon does: GPUs that take their time, controllers that ask.

Everything that happens comes from the trace and one seed; the same input gives the same events.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from plexrl_slurm.core.backlog import Backlog, Waiting
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.grouping import Group, Home, Member, Placement, Why, place
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.ledger import split
from plexrl_slurm.core.messages import (
    Activity,
    AnyEvent,
    AnyInstruction,
    Call,
    CallArrived,
    Charge,
    Deployment,
    DeploymentDropped,
    DeploymentPlaced,
    Drained,
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
    WpgHeld,
    WpgReleased,
    WpgUp,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.controller import Controller
from plexrl_slurm.sim.host import HostRooms
from plexrl_slurm.sim.job import SimJob
from plexrl_slurm.sim.lifetimes import Lifetimes
from plexrl_slurm.sim.mover import Mover
from plexrl_slurm.sim.profiles import Profiles
from plexrl_slurm.sim.promises import Promises
from plexrl_slurm.sim.records import Record, Stretch
from plexrl_slurm.sim.trace import TraceJob

CAUSE: Final = CauseId("sim")
#: Instants between two calls of ``progress``.
PROGRESS_EVERY: Final = 20_000


@dataclass(slots=True, eq=False, kw_only=True)
class Device:
    """A WPG's hardware."""

    wpg: Wpg
    #: By whose number its time is billed; -1: to the only job that it has.
    group: int = -1
    #: Loss of a node ends everything of an earlier life.
    life: int = 0
    up: bool = True
    held_us: int = 0


class World:
    """One run of one trace."""

    #: Whether a training WPG on which nobody lives stays held.
    keeps_empty = False

    def __init__(
        self, trace: list[TraceJob], cluster: Cluster, plan: Plan, *, chart: bool = False
    ) -> None:
        self.cluster, self.plan, self.cause = cluster, plan, CAUSE
        self.core = SchedulerCore(
            find_policy(plan.policy),
            costs=SwitchCosts(),
            hold_us=plan.hold_us,
            hysteresis=plan.hysteresis,
            tails=plan.tails,
        )
        self.pools = cluster.pools()
        fit = plan.rules.placement is Placement.FIT
        self.backlog = Backlog(
            backfill=plan.backfill, guard_us=plan.guard_us, depth=plan.depth, joins_first=fit
        )
        self.records = {
            JobId(number): Record(job=SimJob.of(number, job), submit_us=job.submit_us)
            for number, job in enumerate(trace, 1)
        }
        self.now_us = 0
        #: Events handled, and plans made.
        self.events = self.decisions = 0
        self.gpu_us: dict[tuple[Pool, Activity], int] = defaultdict(int)
        self.chart: list[Stretch] | None = [] if chart else None
        #: GPUs held, as ``(at_us, train, rollout)``, whenever it changes.
        self.held: list[tuple[int, int, int]] = [(0, 0, 0)]
        #: GPU time that each group was held for, and of it what each job worked.
        self._group_us: dict[int, int] = {}
        self._busy_us: dict[tuple[int, JobId], int] = defaultdict(int)
        self._controllers: dict[JobId, Controller] = {}
        self._devices: dict[WpgId, Device] = {}
        self._calls: dict[CallId, tuple[Call, int]] = {}
        #: Training calls of each job that may run again, in their order.
        self._kept: dict[JobId, deque[CallId]] = {}
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._groups = 0
        self._promises = Promises()
        self.profiles = Profiles(cluster, plan, (job.train.gpus for job in trace))
        #: Progress of the newest image of each deployment.
        self.images: dict[DeploymentId, tuple[int, int]] = {}
        #: Groups whose promises are to be looked at again.
        self.doubtful: set[int] = set()
        self.mover = Mover(self)
        self.lifetimes = Lifetimes(self)
        self._host = HostRooms(self.pools, cluster)
        self.rng = np.random.default_rng(plan.seed)
        self._pass = False
        for number, record in self.records.items():
            self.at(record.submit_us, self._submitted, number)

    # -- time --------------------------------------------------------------------------------
    def at(self, at_us: int, action: Callable[..., None], *args: Any) -> None:
        """Do ``action`` at that instant."""
        self._count += 1
        heapq.heappush(self._heap, (at_us, self._count, action, args))

    def run(self, progress: Callable[["World"], None] | None = None) -> None:
        """Until every job has ended that can."""
        heap, seen = self._heap, 0
        while heap:
            now_us = self.now_us = heap[0][0]
            while heap and heap[0][0] == now_us:
                _, _, action, args = heapq.heappop(heap)
                action(*args)
            if self._pass:
                self._pass = False
                self.backlog.run(self.now_us, self._place, self._take)
                self.mover.look()
            self.decisions += 1
            if todo := self.core.plan(now_us, CAUSE):
                self._do(todo)
            seen += 1
            if progress is not None and seen % PROGRESS_EVERY == 0:
                progress(self)
        left = [each.job.trace.id for each in self.records.values() if each.end_us < 0]
        if left:
            raise AssertionError(f"nothing happens any more, and these have not ended: {left}")

    def send(self, event: AnyEvent) -> None:
        """Tell the core a fact."""
        self.events += 1
        if todo := self.core.handle(event):
            self._do(todo)

    # -- instructions ------------------------------------------------------------------------
    def _do(self, instructions: list[AnyInstruction]) -> None:
        for order in instructions:
            match order:
                case Charge():
                    self._charge(order)
                case Run():
                    call, length_us = self._calls[order.call]
                    life = self._devices[order.wpg].life
                    self.at(self.now_us + length_us, self._ran, order, life)
                case Switch() | SaveImage():
                    moved, length_us = self._move(order)
                    life = self._devices[order.wpg].life
                    self.at(self.now_us + length_us, self._switched, order, moved, life)
                case Finish(call=call_id, ok=ok):
                    call, _ = self._calls[call_id]
                    if call.kind is FunctionKind.SAMPLE:
                        del self._calls[call_id]
                    if not ok:
                        raise AssertionError(f"{call_id} failed: {order.reason}")
                    self._controllers[call.job].finished(call)
                case Forget(deployment=name, progress=(seq, _)):
                    self._forget(JobId(int(name.partition("-")[2])), seq)
                case Drained(wpg=wpg):
                    if not self.lifetimes.drained(wpg):
                        self.mover.drained(wpg)
                case WakeAt(at_us=at_us):
                    self.at(max(at_us, self.now_us), self._tick)
                case _:
                    pass

    def _charge(self, charge: Charge) -> None:
        device = self._devices[charge.wpg]
        self.gpu_us[device.wpg.pool, charge.activity] += charge.gpu_us
        if charge.job is not None and device.group >= 0:
            self._busy_us[device.group, charge.job] += charge.gpu_us
        if self.chart is not None:
            self.chart.append(
                Stretch(
                    wpg=charge.wpg,
                    gpus=device.wpg.gpus,
                    activity=charge.activity,
                    job=charge.job,
                    start_us=charge.start_us,
                    stop_us=charge.stop_us,
                )
            )

    def _move(self, order: Switch | SaveImage) -> tuple[int, int]:
        """Bytes that it moves, and how long that takes; both ways of a switch one after the
        other."""
        gpus = self._devices[order.wpg].wpg.gpus
        names = [order.deployment] if isinstance(order, SaveImage) else [order.incoming]
        if isinstance(order, Switch) and order.outgoing is not None:
            names.append(order.outgoing)
        moved = sum(self._image_bytes(name) for name in names)
        disk_us = 0
        if self.cluster.nvme_bytes and isinstance(order, Switch):
            sizes = {name: self._image_bytes(name) for name in names}
            disk_us = self._host.switch_us(order, gpus, sizes)
        return moved, self.cluster.move_us(moved, gpus) + disk_us

    def _image_bytes(self, name: DeploymentId) -> int:
        pool, _, number = name.partition("-")
        job = self.records[JobId(int(number))].job
        return self.rollout_bytes(job) if pool == Pool.ROLLOUT else job.trace.model.image_bytes

    def _ran(self, order: Run, life: int) -> None:
        device = self._devices.get(order.wpg)
        if device is not None and device.life == life:
            self.send(
                RunEnded(
                    wpg=order.wpg,
                    call=order.call,
                    part=order.part,
                    ok=True,
                    at_us=self.now_us,
                    cause=CAUSE,
                )
            )

    def _switched(self, order: Switch | SaveImage, moved: int, life: int) -> None:
        device = self._devices.get(order.wpg)
        if device is None or device.life != life:
            return
        if isinstance(order, SaveImage):
            self.images[order.deployment] = order.progress
        elif order.outgoing is not None:
            self.images[order.outgoing] = order.outgoing_progress
        self.send(
            SwitchEnded(wpg=order.wpg, ok=True, moved_bytes=moved, at_us=self.now_us, cause=CAUSE)
        )

    def _tick(self) -> None:
        self.send(Tick(at_us=self.now_us, cause=CAUSE))

    # -- jobs --------------------------------------------------------------------------------
    def _submitted(self, number: JobId) -> None:
        record = self.records[number]
        trace = record.job.trace
        self.backlog.arrive(
            Waiting(
                member=self.profiles.member(record.job),
                priority=trace.priority,
                since_us=self.now_us,
            )
        )
        self._pass = True

    def _place(self, member: Member) -> Home | Why:
        return place(member, self.pools, self.plan.rules)

    def _take(self, member: Member, home: Home) -> None:
        record = self.records[member.job]
        record.start_us = self.now_us
        if home.group is None:
            group = self.new_group(member.train_gpus)
        else:
            group = self.pools.groups[home.group]
        group.members[member.job] = member
        record.group = group.number
        self.pools.rollout_free -= member.rollout_gpus
        rollout = WpgId(f"rollout-{member.job}")
        self.hold(rollout, Pool.ROLLOUT, member.rollout_gpus)
        self.begin(member, rollout)

    def begin(self, member: Member, rollout: WpgId) -> None:
        """Its deployments are placed, and its controller starts."""
        record = self.records[member.job]
        train = train_wpg(record.group)
        for pool, wpg, size in (
            (Pool.TRAIN, train, member.image_bytes),
            (Pool.ROLLOUT, rollout, self.rollout_bytes(record.job)),
        ):
            name = DeploymentId(f"{pool}-{member.job}")
            self.send(
                DeploymentPlaced(
                    deployment=Deployment(
                        id=name,
                        job=member.job,
                        pool=pool,
                        wpg=wpg,
                        image_bytes=size,
                        content=name,
                        priority=record.job.weight,
                    ),
                    at_us=self.now_us,
                    cause=CAUSE,
                )
            )
        controller = Controller(record.job, self)
        self._controllers[member.job] = controller
        self._kept[member.job] = deque()
        controller.begin()

    def rollout_bytes(self, job: SimJob) -> int:
        """What a switch of the rollout WPG moves for it; alone there, pulls are all that moves."""
        return 0

    def new_group(self, gpus: int) -> Group:
        """Hold another training WPG."""
        self._groups += 1
        host_bytes = self.pools.host_bytes(gpus)
        group = Group(number=self._groups, gpus=gpus, host_bytes=host_bytes)
        self.pools.groups[group.number] = group
        self.pools.train_free -= gpus
        self.hold(train_wpg(group.number), Pool.TRAIN, gpus)
        return group

    def give_back(self, number: int) -> None:
        """A training WPG on which nobody lives is held no more."""
        name = train_wpg(number)
        gpus = self.gpus_of(name)
        self._group_us[number] = self.release(name)
        self.pools.groups.pop(number, None)
        self.pools.train_free += gpus
        self._pass = True

    def gpus_of(self, wpg: WpgId) -> int:
        """GPUs of a WPG that is held."""
        return self._devices[wpg].wpg.gpus

    def image_of(self, job: JobId) -> int:
        """Bytes of a job's training image."""
        return self.records[job].job.trace.model.image_bytes

    def has_ended(self, job: JobId) -> bool:
        """Whether nothing of it is left."""
        return self.records[job].end_us >= 0

    def settled(self, job: JobId) -> bool:
        """Whether its own steps have been measured."""
        controller = self._controllers.get(job)
        return controller is not None and controller.steps >= max(1, self.plan.learn_steps)

    def left_us(self, job: JobId) -> int:
        """How long it would still run, by the steps that it was submitted with."""
        trace = self.records[job].job.trace
        member = self.pools.groups[self.records[job].group].members[job]
        return (trace.steps - self._controllers[job].steps) * member.profile.step_us

    def saved_percent(self) -> dict[JobId, float]:
        """GPU time that each ended job did not need to hold, against WPGs of its own.

        What its training WPG was held for is split by busy time.
        """
        bill = dict.fromkeys(self.records, 0)
        for group, held_us in self._group_us.items():
            busy = {job: us for (number, job), us in self._busy_us.items() if number == group}
            for job, share in split(held_us, busy).items() if busy else ():
                bill[job] += share
        found = {}
        for number, record in self.records.items():
            if record.end_us >= 0:
                trace = record.job.trace
                alone_us = record.job.alone_us() * (trace.train.gpus + trace.rollout.gpus)
                found[number] = 100 * (1 - (bill[number] + record.own_gpu_us) / alone_us)
        return found

    def call(self, job: JobId, kind: FunctionKind, seq: int, length_us: int) -> None:
        """A controller asks for a function that takes so long."""
        samples = kind is FunctionKind.SAMPLE
        if not samples and kind is not FunctionKind.CREATE:
            group = self.pools.groups[self.records[job].group]
            length_us = int(length_us * group.members[job].factor(group.gpus))
        name = DeploymentId(f"rollout-{job}" if samples else f"train-{job}")
        call = Call(id=CallId(f"{name}/{seq}"), deployment=name, job=job, kind=kind, seq=seq)
        self._calls[call.id] = (call, length_us)
        if not samples:
            self._kept[job].append(call.id)
        self.send(CallArrived(call=call, at_us=self.now_us, cause=CAUSE))

    def _forget(self, job: JobId, seq: int) -> None:
        """Calls below ``seq`` of a job's training never run again."""
        kept = self._kept.get(job, deque())
        while kept and self._calls[kept[0]][0].seq < seq:
            del self._calls[kept.popleft()]

    def stepped(self, job: SimJob, steps: int) -> None:
        """A job has taken so many steps."""
        record = self.records[job.number]
        group = self.pools.groups[record.group]
        self.lifetimes.stepped()
        if self._promises.stepped(job, steps, self.now_us - record.start_us, group):
            self.doubtful.add(group.number)
            self._pass = True
        if steps != self.plan.learn_steps:
            return
        learned = self.profiles.learn(job)
        group.members[job.number] = replace(group.members[job.number], profile=learned)
        self.doubtful.add(group.number)
        self._pass = True

    def ended(self, job: SimJob) -> None:
        """A controller has all it wanted; nothing of its last answer is under way then."""
        self.at(self.now_us + job.end_us, self._ended, job)

    def _ended(self, job: SimJob) -> None:
        record = self.records[job.number]
        record.end_us = self.now_us
        group = self.pools.groups[record.group]
        for pool in Pool:
            name = DeploymentId(f"{pool}-{job.number}")
            self.send(DeploymentDropped(deployment=name, at_us=self.now_us, cause=CAUSE))
        del group.members[job.number]
        self._leave(record, group)
        self._controllers.pop(job.number)
        for call in self._kept.pop(job.number):
            del self._calls[call]
        self._pass = True

    def _leave(self, record: Record, group: Group) -> None:
        """Give back what it had alone."""
        record.own_gpu_us = self.release(WpgId(f"rollout-{record.job.number}"))
        self.pools.rollout_free += record.job.trace.rollout.gpus
        if not group.members and not self.mover.takes_part(group.number):
            self.give_back(group.number)

    # -- WPGs --------------------------------------------------------------------------------
    def hold(self, name: WpgId, pool: Pool, gpus: int) -> None:
        """Hold a WPG, which is up at once."""
        wpg = Wpg(id=name, pool=pool, gpus=gpus, second_slot=pool is Pool.ROLLOUT)
        group = int(name.partition("-")[2]) if pool is Pool.TRAIN else -1
        device = self._devices[name] = Device(wpg=wpg, group=group, held_us=self.now_us)
        self.send(WpgHeld(wpg=wpg, at_us=self.now_us, cause=CAUSE))
        self.send(WpgUp(wpg=name, at_us=self.now_us, cause=CAUSE))
        self._count_held(pool, gpus)
        self.lifetimes.begin(name, device)

    def release(self, name: WpgId) -> int:
        """Give a WPG back; the GPU-microseconds that it was held for."""
        self.send(WpgReleased(wpg=name, at_us=self.now_us, cause=CAUSE))
        device = self._devices.pop(name)
        self._count_held(device.wpg.pool, -device.wpg.gpus)
        return (self.now_us - device.held_us) * device.wpg.gpus

    def _count_held(self, pool: Pool, gpus: int) -> None:
        at_us, train, rollout = self.held[-1]
        if pool is Pool.TRAIN:
            train += gpus
        else:
            rollout += gpus
        now = (self.now_us, train, rollout)
        if at_us == self.now_us:
            self.held[-1] = now
        else:
            self.held.append(now)

    def has(self, name: WpgId, device: Device) -> bool:
        """Whether that is what is held under this name."""
        return self._devices.get(name) is device


def train_wpg(group: int) -> WpgId:
    """Name of a group's training WPG."""
    return WpgId(f"train-{group}")
