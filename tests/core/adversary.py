"""Clients that want the WPGs for themselves, and a clock that sees how long the others wait.

The bound, for a call that could run on a WPG of ``k`` deployments, where no function takes longer
than ``F`` and no move longer than ``S``: after ``2 * step`` of its job its phase is *long overdue*
(guard 2), and nothing but those that were so before goes first: each of them once, since running
pays its due. Each costs a function, a switch and perhaps a save. One hold may be under way::

    wait <= 2 * step + k * (F + 2 * S) + hold

Without guards (``fifo``, ``round_robin``) everybody else goes first once: ``k * (F + 2 * S)``.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId
from plexrl_slurm.core.messages import (
    AnyEvent,
    Call,
    CallArrived,
    Deployment,
    DeploymentDropped,
    DeploymentPlaced,
    Finish,
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
    WpgUp,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from tests.core.workloads import ROLLOUT, TRAIN

CAUSE = CauseId("adversary")
MS, SECOND = 1_000, 1_000_000
HOLD_US = 2 * SECOND
FB, OPTIM = FunctionKind.FORWARD_BACKWARD, FunctionKind.OPTIM_STEP
#: Policies without guards.
BARE = ("fifo", "round_robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a client behaves; times in microseconds, drawn between the two."""

    kinds: tuple[FunctionKind, ...] = (FB, FB, OPTIM)
    takes: tuple[int, int] = (MS, 20 * MS)
    gaps: tuple[int, int] = (0, 5 * MS)
    #: After the last of its kinds.
    rests: tuple[int, int] = (0, 5 * MS)
    priority: int = 1
    #: Calls that it has under way at once.
    depth: int = 1
    #: It goes after so many answers, and another one comes. 0: it stays.
    lives: int = 0
    #: Now and then a function takes so long, whatever was learned of it.
    lies: int = 0


LONG = Manner(kinds=(FB, FB, FB, OPTIM), takes=(SECOND, 4 * SECOND), gaps=(20 * MS, 200 * MS),
              rests=(SECOND, 20 * SECOND))  # fmt: skip
SHORT = Manner()

#: What the others do to one long job.
ATTACKS: dict[str, Callable[[random.Random], list[Manner]]] = {
    "short phases flood": lambda rng: [SHORT] * rng.randint(2, 8),
    "a phase that never ends": lambda rng: (
        [replace(SHORT, kinds=(FB,), gaps=(0, 900 * MS))] * rng.randint(1, 4)
    ),
    "weights": lambda rng: [replace(SHORT, priority=rng.choice((10, 1000)))] * rng.randint(2, 6),
    "newcomers": lambda rng: [replace(SHORT, lives=rng.randint(1, 4))] * rng.randint(2, 10),
    "liars": lambda rng: [replace(SHORT, lies=10 * SECOND)] * rng.randint(2, 5),
    "long queues": lambda rng: [replace(SHORT, depth=rng.randint(2, 30))] * rng.randint(1, 5),
    "anybody": lambda rng: [_anybody(rng) for _ in range(rng.randint(2, 12))],
}


def _anybody(rng: random.Random) -> Manner:
    scale = rng.choice((MS, 20 * MS, 500 * MS))
    return Manner(
        kinds=(FB,) * rng.randint(1, 6) + (OPTIM,) * rng.randint(0, 1),
        takes=(scale, scale * rng.randint(1, 20)),
        gaps=(0, rng.choice((0, 5 * MS, SECOND, 3 * SECOND))),
        rests=(0, rng.choice((0, SECOND, 30 * SECOND))),
        priority=rng.choice((1, 1, 3, 100)),
        depth=rng.choice((1, 1, 4)),
        lives=rng.choice((0, 0, 5, 50)),
        lies=rng.choice((0, 0, 5 * SECOND)),
    )


@dataclass(slots=True, eq=False)
class _Client:
    manner: Manner
    deployment: Deployment
    asked: int = 0
    answered: int = 0
    gone: bool = False
    #: Since when the next call of a training deployment could run; ``None``: it runs, or has not
    #: come. Of a sampler: of each call.
    ready_us: dict[int, int] = field(default_factory=dict)
    ended_us: int = 0
    #: The longest step that was believed of the job while something of it waited.
    step_us: int = 0


class Adversary:
    """One attack on both pools. ``run`` raises if anybody waits for too long."""

    def __init__(self, seed: int, policy: str, attack: str) -> None:
        self.rng, self.policy, self.attack = random.Random(seed), policy, attack
        self.core = SchedulerCore(find_policy(policy), costs=SwitchCosts(), hold_us=HOLD_US)
        self.now, self.events, self.waits = SECOND, 0, 0
        #: The longest wait as a share of its bound.
        self.worst = 0.0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = self._jobs = 0
        self._clients: dict[DeploymentId, _Client] = {}
        self._calls: dict[CallId, tuple[_Client, Call, int]] = {}
        self._longest = {wpg.id: [1, 1] for wpg in (TRAIN, ROLLOUT)}
        self._most = dict.fromkeys((TRAIN.id, ROLLOUT.id), 0)
        self._slow = self.rng.choice((MS, 100 * MS, 2 * SECOND))
        for wpg in (TRAIN, ROLLOUT):
            self._send(WpgHeld(wpg=wpg, at_us=self.now, cause=CAUSE))
            self._send(WpgUp(wpg=wpg.id, at_us=self.now, cause=CAUSE))
            manners = [LONG, *ATTACKS[attack](self.rng)] if attack in ATTACKS else []
            for manner in manners:
                self._at(self.now + self.rng.randint(0, SECOND), self._come, manner, wpg)

    def run(self, events: int) -> None:
        """Until the core has heard of so many facts."""
        while self.events < events:
            at_us, _, action, args = heapq.heappop(self._heap)
            self.now = at_us
            action(*args)
            self._do(self.core.plan(self.now, CAUSE))
            if self.events % 64 == 0:
                for client in self._clients.values():
                    for ready_us in list(client.ready_us.values())[:1]:
                        self._check(client, ready_us)

    # -- clients ----------------------------------------------------------------------------

    def invite(self, manner: Manner, wpg: Wpg) -> None:
        """One more client, now."""
        self._at(self.now, self._come, manner, wpg)

    def _come(self, manner: Manner, wpg: Wpg) -> None:
        self._jobs += 1
        name = DeploymentId(f"{wpg.pool}-{self._jobs}")
        deployment = Deployment(
            id=name, job=JobId(self._jobs), pool=wpg.pool, wpg=wpg.id, image_bytes=1_000_000,
            content=name, priority=manner.priority,
        )  # fmt: skip
        client = self._clients[name] = _Client(manner, deployment)
        here = sum(each.deployment.wpg == wpg.id for each in self._clients.values())
        self._most[wpg.id] = max(self._most[wpg.id], here)
        self._send(DeploymentPlaced(deployment=deployment, at_us=self.now, cause=CAUSE))
        for _ in range(manner.depth):
            self._ask(client)

    def _ask(self, client: _Client) -> None:
        if client.gone:
            return
        seq, manner, deployment = client.asked, client.manner, client.deployment
        client.asked += 1
        kind = FunctionKind.SAMPLE
        if deployment.pool is Pool.TRAIN:
            kind = manner.kinds[seq % len(manner.kinds)] if seq else FunctionKind.CREATE
        call = Call(
            id=CallId(f"{deployment.id}/{seq}"), deployment=deployment.id, job=deployment.job,
            kind=kind, seq=seq,
        )  # fmt: skip
        takes_us = self.rng.randint(*manner.takes)
        if manner.lies and self.rng.random() < 0.03:
            takes_us = manner.lies
        self._calls[call.id] = (client, call, takes_us)
        if deployment.pool is Pool.ROLLOUT or seq == client.answered:
            self._ready(client, seq)
        self._send(CallArrived(call=call, at_us=self.now, cause=CAUSE))

    def _ready(self, client: _Client, seq: int) -> None:
        if not client.ready_us:
            client.step_us = self._step_us(client)
        client.ready_us[seq] = self.now

    def _answered(self, client: _Client, call: Call) -> None:
        client.answered += 1
        manner = client.manner
        if client.deployment.pool is Pool.TRAIN and client.asked > client.answered:
            self._ready(client, client.answered)
        if manner.lives and client.answered >= manner.lives:
            if not client.gone:
                client.gone = True
                self._at(self.now, self._go, client)
            return
        ends = call.seq % len(manner.kinds) == 0
        self._at(self.now + self.rng.randint(*(manner.rests if ends else manner.gaps)),
                 self._ask, client)  # fmt: skip

    def _go(self, client: _Client) -> None:
        name = client.deployment.id
        del self._clients[name]
        self._send(DeploymentDropped(deployment=name, at_us=self.now, cause=CAUSE))
        pool = client.deployment.pool
        self._come(client.manner, TRAIN if pool is Pool.TRAIN else ROLLOUT)

    # -- the core, and its WPGs -------------------------------------------------------------

    def _at(self, at_us: int, action: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_us, self._count, action, args))

    def _send(self, event: AnyEvent) -> None:
        self.events += 1
        self._do(self.core.handle(event))

    def _do(self, instructions: list[Any]) -> None:
        for order in instructions:
            match order:
                case Run(call=call_id, wpg=wpg):
                    client, call, takes_us = self._calls[call_id]
                    self._check(client, client.ready_us.pop(call.seq))
                    self.waits += 1
                    self._longest[wpg][0] = max(self._longest[wpg][0], takes_us)
                    self._at(self.now + takes_us, self._ended, order)
                case Switch(wpg=wpg) | SaveImage(wpg=wpg):
                    takes_us = self.rng.randint(1, self._slow)
                    self._longest[wpg][1] = max(self._longest[wpg][1], takes_us)
                    self._at(self.now + takes_us, self._moved, order)
                case Finish(call=call_id, ok=ok):
                    client, call, _ = self._calls.pop(call_id)
                    if ok:
                        self._answered(client, call)
                case WakeAt(at_us=at_us):
                    self._at(max(at_us, self.now), self._tick)
                case _:
                    pass

    def _ended(self, order: Run) -> None:
        self._send(
            RunEnded(
                wpg=order.wpg, call=order.call, part=order.part, ok=True, at_us=self.now,
                cause=CAUSE,
            )
        )  # fmt: skip

    def _moved(self, order: Switch | SaveImage) -> None:
        self._send(
            SwitchEnded(wpg=order.wpg, ok=True, moved_bytes=1_000_000, at_us=self.now, cause=CAUSE)
        )

    def _tick(self) -> None:
        self._send(Tick(at_us=self.now, cause=CAUSE))

    # -- the bound --------------------------------------------------------------------------

    def _step_us(self, client: _Client) -> int:
        return self.core._books.estimates.step_us(client.deployment.job)

    def bound_us(self, client: _Client) -> int:
        """How long a call of ``client`` may wait, by what has happened so far."""
        wpg = client.deployment.wpg
        longest_us, move_us = self._longest[wpg]
        others_us = self._most[wpg] * (longest_us + 2 * move_us)
        if self.policy in BARE:
            return others_us
        return 2 * max(client.step_us, self._step_us(client)) + others_us + HOLD_US

    def _check(self, client: _Client, ready_us: int) -> None:
        waited_us, bound_us = self.now - ready_us, self.bound_us(client)
        self.worst = max(self.worst, waited_us / bound_us)
        if waited_us > bound_us:
            raise AssertionError(
                f"{self.attack}, {self.policy}: {client.deployment.id} has waited {waited_us} us "
                f"and the bound is {bound_us}"
            )
