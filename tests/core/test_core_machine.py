"""The core as a state machine: any fact at any time, and everything it promises after each.

Properties of the scheduling study, section 6, and where each is tried: ``make nightly`` with 10^5
examples (``PLEXRL_EXAMPLES``), CI with few. *(world)*: a whole world of hundreds of facts for each
example, a twentieth as many.

* 1 no two functions overlap on a GPU: ``Core.start_run``; (world) ``test_scheduler_properties``; on
  shared GPUs (world) ``test_shared_properties``
* 1 a gang is whole or nothing: ``test_placement_machine``, ``test_admission_properties``
* 2 held = busy + switch + kept + idle + down, in integers: ``Core.books_are_exact``, and each is
  what the WPG did: ``Core.charge``; with tails
  that are paused (world) ``test_tail_properties``
* 3 affinity is constant: ``Core.start_run``, ``start_move``; with moves (world)
  ``test_node_properties``
* 3 memory is never exceeded: ``test_placement_machine``, ``test_admission_properties``; tiers, in
  the middle of switches: (world) ``tests/daemons/test_tier_properties.py``
* 4 program order, each (job, seq) once: ``Core.start_run``, ``end_run``, ``finish``; with restarts,
  lost nodes, damaged images (world) ``test_scheduler_``, ``test_node_``, ``test_damage_properties``
* 5 lag at most 1, versions only grow: ``tests/sim/test_run_properties.py``
* 6 the starvation bound: (world) ``test_scheduler_``, ``test_shared_properties``; attackers:
  ``test_starvation``, 10^6 facts by ``python -m benchmarks.starvation``
* 6 nobody waits for an idle WPG, but for a hold: ``Core.nobody_waits_for_an_idle_wpg``
* 7 every job of a trace ends, whatever it shares: ``tests/sim/test_run_properties.py``. No function
  needs two pools, so there is no order of locks; two WPGs on the same GPUs: (world)
  ``test_shared_properties``
* 8 the order of facts of one instant changes nothing: ``test_order_properties``
* 8 the same facts, the same decisions: ``Core.teardown``; ``tests/test_journal.py``,
  ``tests/sim/test_same_bytes.py``
* 9 alone it takes what it takes alone: ``tests/sim/test_run_properties.py``
* 9 a larger weight is no smaller share: (world) ``test_order_properties``
* 10 fit admits nobody against a promise: ``test_placement_machine``, ``test_admission_properties``
* 10 what a crash frees is taken by a waiter: ``Core.nobody_waits_for_an_idle_wpg``; what an end
  frees: ``test_placement_machine``
"""

from collections import defaultdict
from typing import ClassVar

from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId
from plexrl_slurm.core.messages import (
    WRITES,
    Activity,
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
    WpgDraining,
    WpgHeld,
    WpgResumed,
    WpgUp,
)
from plexrl_slurm.core.policy import POLICIES, find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.core.tails import TailRules
from tests.core.dice import BURST, DICE, THROWS, Actions, Dice
from tests.core.effort import effort, tried
from tests.core.workloads import ROLLOUT, TRAIN, call, sampled, trained

CAUSE = CauseId("machine")
SECOND, HOLD_US = 1_000_000, 2_000_000
WPGS: dict[str, Wpg] = {TRAIN.id: TRAIN, ROLLOUT.id: ROLLOUT}
KINDS = (
    FunctionKind.FORWARD,
    FunctionKind.FORWARD_BACKWARD,
    FunctionKind.FORWARD_BACKWARD,
    FunctionKind.OPTIM_STEP,
    FunctionKind.PUBLISH,
    FunctionKind.SAVE_STATE,
)
LATER = (0, 0, 1, 1_000, 60_000, SECOND, 3 * SECOND, 30 * SECOND, 100 * SECOND)
POOLS, NAMES = tuple(Pool), tuple(sorted(WPGS))
#: Three ends of four are good.
ENDS = (True, True, True, False)
ACTIONS = Actions()


class Core(RuleBasedStateMachine):
    """The core, and what the shell and the WPGs know."""

    actions: ClassVar[Actions] = ACTIONS
    wpgs: ClassVar[dict[str, Wpg]] = WPGS
    #: Of tails; ``None``: they run to their end.
    tails: TailRules | None = None

    @initialize(dice=DICE, swarm=DICE)
    def begin(self, dice: Dice, swarm: Dice) -> None:
        self.policy, self.every = dice.of(sorted(POLICIES)), 1 + dice.to(2)
        self.enabled = self.actions.some(swarm)
        self.core = self.made()
        self.now = self.began_us = SECOND
        #: When it was asked last: what was to ring since then is said as it was.
        self.planned_us = SECOND
        self.told: list[AnyEvent | int] = []
        self.said: list[AnyInstruction] = []
        self.homes: dict[DeploymentId, Deployment] = {}
        self.asked: dict[DeploymentId, int] = defaultdict(int)
        self.calls: dict[CallId, Call] = {}
        self.answers: dict[CallId, bool] = {}
        #: Parts that ended well.
        self.ended: dict[CallId, set[int]] = defaultdict(set)
        self.runs: dict[CallId, Run] = {}
        self.moves: dict[str, Switch | SaveImage] = {}
        self.up: dict[str, bool] = dict.fromkeys(self.wpgs, False)
        #: What the time since the last instructions may be called.
        self.does = {wpg: {Activity.DOWN} for wpg in self.wpgs}
        self.draining: set[str] = set()
        self.charged_us: dict[str, int] = dict.fromkeys(self.wpgs, SECOND)
        self.held: dict[str, int] = dict.fromkeys(self.wpgs, 0)
        #: Writes that took effect on the newest state of each deployment, in order.
        self.effects: dict[DeploymentId, list[tuple[int, int]]] = defaultdict(list)
        for wpg in self.wpgs.values():
            self.tell(WpgHeld(wpg=wpg, at_us=self.now, cause=CAUSE))
            self.up[wpg.id] = True
            self.tell(WpgUp(wpg=wpg.id, at_us=self.now, cause=CAUSE))

    @rule(throws=THROWS)
    def steps(self, throws: bytes) -> None:
        for _ in self.actions.take(self, self.enabled, throws):
            self.check()

    def check(self) -> None:
        """After every step."""
        self.nobody_waits_for_an_idle_wpg()
        self.books_are_exact()

    def made(self) -> SchedulerCore:
        return SchedulerCore(
            find_policy(self.policy),
            costs=SwitchCosts(),
            hold_us=HOLD_US,
            image_every=self.every,
            tails=self.tails,
        )

    def tell(self, event: AnyEvent) -> None:
        self.told.append(event)
        self.hear(self.core.handle(event))
        self.core.check_invariants()
        if len(self.told) % 3:  # the others are planned together with what comes next
            self.plan(0)

    @ACTIONS.action()
    def later(self, dice: Dice) -> None:
        self.plan(dice.of(LATER))

    def plan(self, later_us: int) -> None:
        self.now += later_us
        self.told.append(self.now)
        self.hear(self.core.plan(self.now, CAUSE))
        self.planned_us = self.now
        assert self.core.plan(self.now, CAUSE) == [], "a second plan finds nothing to do"

    # -- what it says -----------------------------------------------------------------------

    def hear(self, instructions: list[AnyInstruction]) -> None:
        self.said += instructions
        for order in instructions:
            match order:
                case Run():
                    self.start_run(order)
                case Switch() | SaveImage():
                    self.start_move(order)
                case Finish():
                    self.finish(order)
                case Charge():
                    self.charge(order)
                case WakeAt(at_us=at_us):
                    assert at_us >= self.planned_us - HOLD_US
                case _:
                    pass
        self.does = {wpg: self.doing(wpg) for wpg in self.wpgs}

    def doing(self, wpg: str) -> set[Activity]:
        """What its time is called while nothing changes."""
        if not self.up[wpg]:
            return {Activity.DOWN}
        if self.running_on(wpg):
            return {Activity.BUSY}
        return {Activity.SWITCH} if wpg in self.moves else {Activity.IDLE, Activity.KEPT}

    def start_run(self, order: Run) -> None:
        asked, here = self.calls[order.call], self.running_on(order.wpg)
        assert self.up[order.wpg] and order.wpg not in self.moves
        assert self.homes[order.deployment].wpg == order.wpg, "it runs at its home only"
        if asked.kind is not FunctionKind.SAMPLE:
            assert not here, "a training function runs alone"
            before = [c for c in self.calls.values() if c.deployment == order.deployment]
            assert all(c.id in self.answers for c in before if c.seq < asked.seq), "out of order"
            # Of several parts the first may have to run again before the last has run.
            had = order.call in self.answers or order.part in self.ended[order.call]
            assert order.replay == had
        else:
            assert order.call not in self.answers, "a sample that was answered runs again"
            assert all(self.calls[c].kind is FunctionKind.SAMPLE for c in here)
        assert order.call not in self.runs
        self.runs[order.call] = order

    def start_move(self, order: Switch | SaveImage) -> None:
        assert self.up[order.wpg] and order.wpg not in self.moves
        self.check_free(order)
        names = (
            [order.deployment]
            if isinstance(order, SaveImage)
            else [order.incoming, *([order.outgoing] if order.outgoing is not None else [])]
        )
        for name in names:
            if name in self.homes:
                assert self.homes[name].wpg == order.wpg, "state moves at its home only"
        self.moves[order.wpg] = order

    def check_free(self, order: Switch | SaveImage) -> None:
        assert not self.running_on(order.wpg), "nothing runs while state moves"

    def finish(self, order: Finish) -> None:
        assert order.call not in self.answers, "answered twice"
        self.answers[order.call] = order.ok
        if order.ok:
            parts = self.calls[order.call].parts
            assert self.ended[order.call] == set(range(parts)), "answered before it has ended"

    def charge(self, order: Charge) -> None:
        begun_us = self.charged_us[order.wpg]
        assert begun_us in (order.start_us, order.stop_us), "a gap or an overlap in the books"
        assert type(order.gpu_us) is int and order.stop_us > order.start_us
        assert order.activity in self.does[order.wpg], "it did something else"
        self.charged_us[order.wpg] = order.stop_us
        self.held[order.wpg] += order.gpu_us

    def running_on(self, wpg: str) -> list[CallId]:
        return [call_id for call_id, run in self.runs.items() if run.wpg == wpg]

    # -- what it is told --------------------------------------------------------------------

    @ACTIONS.action(often=2)
    def place(self, dice: Dice) -> None:
        job, trains, shared = 1 + dice.to(3), dice.of(POOLS) is Pool.TRAIN, dice.coin()
        new = trained(job) if trains else sampled(job, f"s{job}", "base" if shared else "")
        if new.id in self.homes or self.asked[new.id]:
            return  # the daemon names none again
        self.homes[new.id] = new
        self.tell(DeploymentPlaced(deployment=new, at_us=self.now, cause=CAUSE))

    @ACTIONS.action(needs="homes", often=3)
    def ask(self, dice: Dice) -> None:
        self.now += dice.of(LATER)
        home, count = self.homes[dice.of(sorted(self.homes))], 1 + dice.to(2)
        kind, parts, doomed = dice.of(KINDS), dice.of((1, 1, 2)), dice.coin()
        new = []
        for _ in range(count):
            seq = self.asked[home.id]
            self.asked[home.id] += 1
            if home.pool is Pool.ROLLOUT:
                kind = FunctionKind.SAMPLE
            what = kind if seq or home.pool is Pool.ROLLOUT else FunctionKind.CREATE
            new.append(call(home, what, seq, parts=parts, doomed=doomed and seq > 2, tokens=seq))
        self.calls |= {each.id: each for each in new}
        for each in new[::-1] if dice.coin() else new:
            self.tell(CallArrived(call=each, at_us=self.now, cause=CAUSE))

    @ACTIONS.action(needs="calls")
    def repeat_or_cancel(self, dice: Dice) -> None:
        asked = self.calls[dice.of(sorted(self.calls))]
        if asked.id in self.answers:
            return
        if dice.coin():
            self.tell(CallArrived(call=asked, at_us=self.now, cause=CAUSE))
        else:
            self.tell(CallCancelled(call=asked.id, at_us=self.now, cause=CAUSE))

    @ACTIONS.action(needs="runs", often=4)
    def end_run(self, dice: Dice) -> None:
        self.now += dice.of(LATER)
        run, ok = self.runs.pop(dice.of(sorted(self.runs))), dice.of(ENDS)
        asked = self.calls[run.call]
        if ok or run.replay:
            self.ended[run.call].add(run.part)
        if ok and asked.kind in WRITES and not run.replay:
            done = self.effects[run.deployment]
            at = (asked.seq, run.part)
            assert at not in done and (not done or at > done[-1]), "an effect twice, or too late"
            done.append(at)
        self.tell(RunEnded(wpg=run.wpg, call=run.call, part=run.part, ok=ok or run.replay,
                           at_us=self.now, cause=CAUSE))  # fmt: skip

    @ACTIONS.action(needs="moves", often=3)
    def end_move(self, dice: Dice) -> None:
        self.now += dice.of(LATER)
        wpg, ok = dice.of(sorted(self.moves)), dice.of(ENDS)
        del self.moves[wpg]
        self.tell(SwitchEnded(wpg=self.wpgs[wpg].id, ok=ok, moved_bytes=1000, at_us=self.now,
                              cause=CAUSE))  # fmt: skip

    @ACTIONS.action()
    def crash_or_come_back(self, dice: Dice) -> None:
        self.now += dice.of(LATER)
        wpg, blame = dice.of(NAMES), dice.coin()
        name = self.wpgs[wpg].id
        if self.up[wpg]:
            for call_id in self.running_on(wpg):
                del self.runs[call_id]
            self.moves.pop(wpg, None)
            self.up[wpg] = False
            self.tell(WpgDown(wpg=name, reason="killed", blame=blame, at_us=self.now, cause=CAUSE))
        else:
            self.up[wpg] = True
            self.tell(WpgUp(wpg=name, at_us=self.now, cause=CAUSE))

    @ACTIONS.action()
    def drain_or_resume(self, dice: Dice) -> None:
        wpg = dice.of(NAMES)
        name = self.wpgs[wpg].id
        if wpg in self.draining:
            self.draining.discard(wpg)
            self.tell(WpgResumed(wpg=name, at_us=self.now, cause=CAUSE))
        else:
            self.draining.add(wpg)
            self.tell(WpgDraining(wpg=name, at_us=self.now, cause=CAUSE))

    @ACTIONS.action(needs="homes")
    def drop(self, dice: Dice) -> None:
        name = dice.of(sorted(self.homes))
        del self.homes[name]
        self.tell(DeploymentDropped(deployment=name, at_us=self.now, cause=CAUSE))
        for asked in self.calls.values():
            if asked.deployment == name and asked.id not in self.runs:
                assert asked.id in self.answers, "dropped, and not answered"

    @ACTIONS.action()
    def tick(self, dice: Dice) -> None:
        self.now += dice.of(LATER)
        self.tell(Tick(flush=dice.coin(), at_us=self.now, cause=CAUSE))

    # -- what is always so ------------------------------------------------------------------

    def nobody_waits_for_an_idle_wpg(self) -> None:
        if self.core._books.stale:
            return
        for lane in self.core._books.lanes.values():
            busy = lane.running or lane.move is not None
            if lane.waiting and lane.up and not busy and not lane.draining:
                assert find_policy(self.policy).holds
                assert lane.kept_until_us is not None, f"{lane.id} does nothing"
                assert lane.now_us < lane.kept_until_us <= lane.now_us + HOLD_US

    def books_are_exact(self) -> None:
        """In whole microseconds, and what a stretch is split into sums to it."""
        for name, wpg in self.wpgs.items():
            assert self.held[name] == (self.charged_us[name] - self.began_us) * wpg.gpus

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        again, said = self.made(), []
        for told in self.told:
            said += (
                again.plan(told, CauseId("again")) if isinstance(told, int) else again.handle(told)
            )
        assert said == self.said, "the same facts, other decisions"
        tried("core machine")


TestCore = Core.TestCase
TestCore.settings = effort(60, steps=40 // BURST)
