"""The harness with tails that are paused."""

from collections import defaultdict
from dataclasses import replace

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId
from plexrl_slurm.core.messages import AnyInstruction, FunctionKind, Pause, Paused, Run, Switch
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.core.tails import TailRules
from tests.core.harness import CAUSE, World
from tests.core.workloads import call, sampled

#: Every tail that may be paused is.
EAGER = TailRules(running=100, share=100, least_us=0, pauses=2)


#: And what may run on beside another does.
TOGETHER = replace(EAGER, co_resident=True, slowdown=0)


class Tailed(World):
    """Ranks that stop a sample between two tokens, if asked in time and if it can be split."""

    def __init__(self, *args: object, **names: object) -> None:
        self.pauses: dict[CallId, int] = defaultdict(int)
        super().__init__(*args, **names)  # type: ignore[arg-type]

    rules = EAGER

    def make_core(self) -> SchedulerCore:
        return SchedulerCore(
            find_policy(self.policy),
            costs=SwitchCosts(),
            hold_us=self.hold_us,
            image_every=self.image_every,
            tails=self.rules,
        )

    def perform(self, order: AnyInstruction) -> None:
        if not isinstance(order, Pause):
            super().perform(order)
            return
        device = self.devices[order.wpg]
        for name in order.calls:
            delay_us = self.rng.randint(0, self.unit_us)
            self.after(delay_us, self.pause, device.runs[name], device.born)

    def together(self) -> int:
        """Switches beside a tail."""
        return sum(isinstance(order, Switch) and order.beside is not None for order in self.log)

    def pause(self, run: Run, born: int) -> None:
        device, splits = self.devices[run.wpg], self.rng.random() < 0.9
        if not (self.daemon and splits and device.born == born):
            return
        if device.runs.get(run.call) is run:
            del device.runs[run.call]
            self.pauses[run.call] += 1
            tokens = self.pauses[run.call]
            event = Paused(
                wpg=run.wpg, call=run.call, part=run.part, tokens=tokens, at_us=self.now,
                cause=CAUSE,
            )  # fmt: skip
            self.send(event)


def rollouts(world: World, *, jobs: int, each: int, calls: int, name: str = "snapshot") -> None:
    """Every job has one rollout after another, of so many calls that come at once; for the later
    ones it pays to pause the earlier ones'."""
    for job in range(1, jobs + 1):
        for number in range(each):
            snapshot = replace(sampled(job, f"{name}-{job}-{number}"), priority=job**4)
            at_us = number * world.rng.randint(1, 60) * world.unit_us
            world.after(at_us, world.place, snapshot)
            for seq in range(calls):
                asked = call(snapshot, FunctionKind.SAMPLE, seq, tokens=seq % 7)
                world.after(at_us + 1, world.submit, asked)


class Together(Tailed):
    """The same with WPGs that have a second engine slot."""

    rules = TOGETHER
