"""The world of the harness with one training and one rollout WPG on the same GPUs."""

from dataclasses import replace
from typing import Any

from plexrl_slurm.core.ids import DeploymentId, WpgId
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    Drained,
    Grant,
    Granted,
    Pool,
    Run,
    SaveImage,
    Switch,
    Wpg,
    WpgDraining,
    WpgResumed,
    WpgUp,
)
from tests.core.harness import CAUSE, World
from tests.core.workloads import TRAIN

ROLLOUT = Wpg(id=WpgId("rollout-0"), pool=Pool.ROLLOUT, gpus=0, shares=TRAIN.id)


class SharedWorld(World):
    """The agent's half too: gangs that sleep, and grants that take a while, fail or are lost."""

    def __init__(self, seed: int, *, refusals: float = 0.0, **options: Any) -> None:
        """``refusals``: how many grants end with memory that is not free."""
        self.refusals = refusals
        #: Whose gang has the memory of the GPUs, really.
        self.awake: WpgId | None = None
        #: Grants that the agent carries out, one after another.
        self.granting: list[Grant] = []
        self.grants = 0
        #: A new daemon hears of both gangs, which one agent has, before it plans.
        self.hello = False
        wpgs = (ROLLOUT, TRAIN) if seed % 2 else (TRAIN, ROLLOUT)
        super().__init__(seed, wpgs=wpgs, **options)
        self.longest_us["grant"] = 0

    # -- the shell ------------------------------------------------------------------------

    def send(self, event: AnyEvent) -> None:
        if isinstance(event, WpgUp):
            event = replace(event, awake=self.awake == event.wpg)
        super().send(event)

    def perform(self, order: AnyInstruction) -> None:
        if isinstance(order, Grant):
            self.granting.append(order)
            if len(self.granting) == 1:
                self.begin_grant()
        elif not isinstance(order, Drained):
            super().perform(order)

    def plan(self) -> None:
        if self.hello:
            return
        super().plan()
        lane = self.core._books.lanes.get(TRAIN.id)
        if not self.daemon or lane is None or lane.group is None:
            return
        group, turn = lane.group, lane.group.turn
        if group.grant is None and (turn is None or (not turn.running and turn.move is None)):
            kept = turn is not None and turn.kept_until_us is not None
            waits = [lane for lane in group.lanes if lane.waiting and group.allows(lane)]
            dirty = turn is not None and turn.resident is not None and turn.resident.dirty
            stuck = turn is not None and turn.draining and dirty
            assert kept or stuck or not waits, f"{waits[0].id} waits for GPUs that nobody uses"

    # -- ranks ----------------------------------------------------------------------------

    def start_run(self, order: Run) -> None:
        assert self.awake == order.wpg, f"{order} on a WPG that sleeps"
        assert not self.granting
        super().start_run(order)

    def start_move(self, order: Switch | SaveImage) -> None:
        assert self.awake == order.wpg, f"{order} on a WPG that sleeps"
        super().start_move(order)

    def begin_grant(self) -> None:
        order = self.granting[0]
        before, born = self.awake, {name: device.born for name, device in self.devices.items()}
        for device in self.devices.values():
            assert not device.runs and device.move is None, "somebody still works"
            if device.wpg.id != order.wpg:
                device.resident, device.state = None, "?"
        duration = self.rng.randint(1, 5 * self.unit_us)
        self.grants += 1
        self.longest_us["grant"] = max(self.longest_us["grant"], duration)
        if self.rng.random() < self.deaths:
            name = self.rng.choice(list(self.devices))
            self.after(duration // 2, self.kill, name, born[name])
        self.after(duration, self.end_grant, order, before, born)

    def end_grant(self, order: Grant, before: WpgId | None, born: dict[WpgId, int]) -> None:
        same = {name for name, device in self.devices.items() if device.born == born[name]}
        ok = len(same) == len(born) and all(self.devices[name].up for name in same & {order.wpg})
        if ok and self.rng.random() >= self.refusals:
            self.awake = order.wpg
        else:
            ok = False
            self.awake = before if before in same else None
            if before is not None:
                self.devices[before].resident = None
        del self.granting[0]
        if self.granting:
            self.begin_grant()
        if self.daemon:
            self.send(
                Granted(
                    wpg=order.wpg, number=order.number, ok=ok, awake=self.awake or WpgId(""),
                    error="" if ok else "memory is not free", at_us=self.now, cause=CAUSE,
                )
            )  # fmt: skip

    def kill(self, wpg: WpgId, only: int) -> None:
        device = self.devices[wpg]
        if device.up and device.born == only and self.awake == wpg:
            self.awake = None
        super().kill(wpg, only)

    def kill_now(self, wpg: WpgId) -> None:
        """Whatever it does."""
        self.kill(wpg, self.devices[wpg].born)

    def start_daemon(self) -> None:
        if self.granting:
            self.after(self.unit_us, self.start_daemon)
            return
        self.hello = True
        super().start_daemon()
        self.hello = False
        self.plan()

    # -- the site ---------------------------------------------------------------------------

    def drain(self, wpg: WpgId, pause_us: int) -> None:
        """It is to be given back, and then it is not."""
        if self.daemon:
            self.send(WpgDraining(wpg=wpg, at_us=self.now, cause=CAUSE))
            self.after(pause_us, self.resume, wpg)

    def resume(self, wpg: WpgId) -> None:
        if self.daemon:
            self.send(WpgResumed(wpg=wpg, at_us=self.now, cause=CAUSE))

    def audit(self, wpg: Wpg, start_us: int, stop_us: int) -> None:
        if wpg.gpus:
            super().audit(wpg, start_us, stop_us)
        else:
            assert not self.charges[wpg.id], "it has no GPUs that could be charged"

    def resident_of(self, wpg: WpgId) -> DeploymentId | None:
        """What is really on its device."""
        return self.devices[wpg].resident
