"""The core as a state machine once more, with a WPG that has a second engine slot: tails run on
beside others, are paused where they cannot, and never is a third on the device."""

from dataclasses import replace
from typing import ClassVar

from hypothesis.stateful import initialize

from plexrl_slurm.core.ids import CallId
from plexrl_slurm.core.messages import (
    AnyInstruction,
    CallArrived,
    DeploymentPlaced,
    FunctionKind,
    Pause,
    Paused,
    Run,
    RunEnded,
    SaveImage,
    Switch,
    SwitchEnded,
    Wpg,
)
from plexrl_slurm.core.tails import ENOUGH
from tests.core import test_core_machine
from tests.core.dice import BURST, DICE, Actions, Dice
from tests.core.effort import effort
from tests.core.tailed import TOGETHER
from tests.core.test_core_machine import CAUSE, LATER, SECOND, Core
from tests.core.workloads import ROLLOUT, TRAIN, call, sampled

TWO = replace(ROLLOUT, second_slot=True)
#: Switches beside a tail that any example has seen.
SEEN: list[Switch] = []
ACTIONS = test_core_machine.ACTIONS.more()


class Two(Core):
    """Jobs 5 to 7 have sampled before, so that it is known what a tail of theirs is."""

    actions: ClassVar[Actions] = ACTIONS
    wpgs: ClassVar[dict[str, Wpg]] = {TRAIN.id: TRAIN, TWO.id: TWO}
    tails = TOGETHER

    @initialize(dice=DICE, swarm=DICE)
    def begin(self, dice: Dice, swarm: Dice) -> None:
        #: Runs that were asked to pause.
        self.pausing: set[CallId] = set()
        #: What each call that ever ran samples; a snapshot of it may be dropped meanwhile.
        self.content: dict[CallId, str] = {}
        super().begin(dice, swarm)
        for job in (5, 6, 7):
            self.sample(job, ENOUGH)
            self.settle()
        self.sample(5, 4)
        self.end_moves()
        self.end_one(next(iter(self.runs)))

    def sample(self, job: int, count: int) -> None:
        home = sampled(job, f"s{job}")
        if home.id not in self.homes:
            self.homes[home.id] = home
            self.tell(DeploymentPlaced(deployment=home, at_us=self.now, cause=CAUSE))
        for _ in range(count):
            asked = call(home, FunctionKind.SAMPLE, self.asked[home.id])
            self.asked[home.id] += 1
            self.calls[asked.id] = asked
            self.tell(CallArrived(call=asked, at_us=self.now, cause=CAUSE))
        self.plan(0)

    def end_moves(self) -> None:
        for wpg in list(self.moves):
            del self.moves[wpg]
            self.tell(SwitchEnded(wpg=self.wpgs[wpg].id, ok=True, moved_bytes=1000,
                                  at_us=self.now, cause=CAUSE))  # fmt: skip
        self.plan(0)

    def end_one(self, name: CallId) -> None:
        run = self.runs.pop(name)
        self.ended[name].add(run.part)
        self.tell(RunEnded(wpg=run.wpg, call=name, part=run.part, ok=True, at_us=self.now,
                           cause=CAUSE))  # fmt: skip
        self.plan(0)

    def settle(self) -> None:
        """Let everything end, a minute after it began."""
        while self.moves or self.runs:
            self.end_moves()
            self.now += 60 * SECOND
            for name in list(self.runs):
                self.end_one(name)

    def hear(self, instructions: list[AnyInstruction]) -> None:
        super().hear(instructions)
        for order in instructions:
            if isinstance(order, Pause):
                assert set(order.calls) <= self.runs.keys()
                self.pausing |= set(order.calls)

    def contents(self, wpg: str) -> set[str]:
        """What is sampled there."""
        return {self.content[name] for name in self.running_on(wpg)}

    def check_free(self, order: Switch | SaveImage) -> None:
        if order.wpg != TWO.id:
            super().check_free(order)
            return
        assert isinstance(order, Switch) and order.outgoing is None
        assert len(self.contents(TWO.id)) <= 1, "both slots are in use"
        if order.beside is not None:
            assert self.running_on(TWO.id), "there is no tail"
            SEEN.append(order)

    def start_run(self, order: Run) -> None:
        super().start_run(order)
        self.content[order.call] = self.homes[order.deployment].content
        assert len(self.contents(order.wpg)) <= (2 if order.wpg == TWO.id else 1)

    @property
    def pausable(self) -> list[CallId]:
        """Asked to pause, and still running."""
        return sorted(self.pausing & self.runs.keys())

    @ACTIONS.action(needs="pausable")
    def paused(self, dice: Dice) -> None:
        self.now += dice.of(LATER)
        name = dice.of(self.pausable)
        run = self.runs.pop(name)
        self.pausing.discard(name)
        self.tell(Paused(wpg=run.wpg, call=run.call, part=run.part, tokens=1, at_us=self.now,
                         cause=CAUSE))  # fmt: skip

    def check(self) -> None:
        super().check()
        self.nobody_waits_for_a_tail_alone()

    def nobody_waits_for_a_tail_alone(self) -> None:
        if self.core._books.stale:
            return
        lane = self.core._books.lanes[TWO.id]
        if not lane.up or lane.draining or lane.move is not None or lane.working():
            return
        died = any(entry.deaths for tenant in lane.waiting.values() if (entry := tenant.head()))
        if lane.beside is not None and lane.waiting and not died:
            assert lane.kept_until_us is not None, "it could come in beside the tail"


TestBeside = Two.TestCase
TestBeside.settings = effort(60, steps=40 // BURST)


def test_examples_have_let_others_in_beside_tails() -> None:
    if not SEEN:
        TestBeside().runTest()
    assert SEEN
