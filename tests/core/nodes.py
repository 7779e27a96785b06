"""The world of the harness with nodes that are lost, a durable tier, drains and moves.

Every WPG is on a node of its own, with an agent of its own. What the shell must do for the core
is done here: a deployment's home forgets what it has of one that moved, and copies no more.
"""

from collections import Counter
from dataclasses import dataclass, replace

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.core.ids import DeploymentId, WpgId
from plexrl_slurm.core.messages import (
    AnyInstruction,
    Deployment,
    DeploymentMoved,
    DeploymentPlaced,
    Drained,
    Forget,
    Persist,
    Persisted,
    Pool,
    Run,
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
from tests.core.harness import CAUSE, Device, World

Image = tuple[tuple[int, int], str]


@dataclass
class Copy:
    """An image on its way to the durable tier."""

    wpg: WpgId
    image: Image


class NodeWorld(World):
    """``images`` are what a deployment's home can load; ``durable`` survives everything."""

    def __init__(
        self,
        seed: int,
        *,
        policy: str = "hrrs",
        wpgs: tuple[Wpg, ...],
        deaths: float = 0.0,
        failures: float = 0.0,
        copy_failures: float = 0.0,
        durable_every: int | None = 2,
        image_every: int = 2,
    ) -> None:
        self.durable_every, self.copy_failures = durable_every, copy_failures
        self.durable: dict[DeploymentId, Image] = {}
        #: Progress of durable images as the database has it.
        self.known: dict[DeploymentId, tuple[int, int]] = {}
        #: Calls whose bodies are dropped: ever, and by this daemon.
        self.forgotten: dict[DeploymentId, tuple[int, int]] = {}
        self.said: dict[DeploymentId, tuple[int, int]] = {}
        self.copies: dict[DeploymentId, Copy] = {}
        #: Copies that this daemon asked for, without an answer.
        self.asked: set[DeploymentId] = set()
        #: WPGs that are being given back: whether ``Drained`` was heard.
        self.drains: dict[WpgId, bool] = {}
        #: Nodes lost while nobody listened.
        self.unheard: set[WpgId] = set()
        self.releasing: WpgId | None = None
        self.seen: Counter[str] = Counter()
        super().__init__(
            seed, policy=policy, wpgs=wpgs, deaths=deaths, failures=failures,
            image_every=image_every,
        )  # fmt: skip

    def make_core(self) -> SchedulerCore:
        return SchedulerCore(
            find_policy(self.policy),
            costs=SwitchCosts(),
            hold_us=self.hold_us,
            image_every=self.image_every,
            durable_every=self.durable_every,
        )

    def some(self, least: int, most: int) -> int:
        return self.rng.randint(least * self.unit_us, most * self.unit_us)

    def homed(self, wpg: WpgId) -> list[DeploymentId]:
        return [
            name
            for name, deployment in self.deployments.items()
            if deployment.wpg == wpg and name not in self.dropped
        ]

    def perform(self, order: AnyInstruction) -> None:
        self.seen[type(order).__name__] += 1
        match order:
            case Run():
                self.seen["Replay"] += order.replay
                kept_from = self.forgotten.get(order.deployment, (0, 0))
                assert self.records[order.call].call.seq >= kept_from[0], f"{order} has no body"
                if self.deployments[order.deployment].pool is Pool.TRAIN:
                    runs = [run for d in self.devices.values() for run in d.runs.values()]
                    assert all(run.deployment != order.deployment for run in runs)
                assert order.wpg not in self.drains, f"{order.wpg} is being given back"
                super().perform(order)
            case Forget(deployment=name, progress=progress):
                assert self.images[name][0] >= progress
                assert self.durable_every is None or self.durable[name][0] >= progress
                assert self.said.get(name, (0, 0)) < progress, "it was said before"
                self.said[name] = progress
                self.forgotten[name] = max(progress, self.forgotten.get(name, progress))
            case Persist():
                self.start_copy(order)
            case Drained(wpg=wpg):
                self.drained(wpg)
            case _:
                super().perform(order)

    # -- the durable tier -------------------------------------------------------------------

    def start_copy(self, order: Persist) -> None:
        name = order.deployment
        assert self.durable_every is not None
        assert name not in self.asked, f"two copies of {name} at a time"
        assert order.wpg == self.deployments[name].wpg and order.wpg in self.held_us
        assert order.progress == self.images[name][0]
        self.asked.add(name)
        if name not in self.copies:  # an agent makes one at a time
            copy = self.copies[name] = Copy(order.wpg, self.images[name])
            self.after(self.some(1, 30), self.end_copy, name, copy)

    def end_copy(self, name: DeploymentId, copy: Copy) -> None:
        if self.copies.get(name) is not copy:
            return  # lost with its node, or nobody wants it any more
        del self.copies[name]
        if self.rng.random() < 0.5:
            copy.image = self.images[name]  # a newer one was there before it began to write
        ok = self.rng.random() >= self.copy_failures
        if ok:
            self.make_durable(name, copy)
        if self.daemon:
            self.asked.discard(name)
            if ok:
                self.known[name] = max(copy.image[0], self.known.get(name, (0, 0)))
            self.send(
                Persisted(
                    deployment=name, progress=copy.image[0], ok=ok, at_us=self.now, cause=CAUSE
                )
            )

    def make_durable(self, name: DeploymentId, copy: Copy) -> None:
        if name not in self.durable or self.durable[name][0] < copy.image[0]:
            self.durable[name] = copy.image

    def progress(self, name: DeploymentId) -> tuple[int, int] | None:
        return self.durable[name][0] if name in self.durable else None

    def to_durable(self, name: DeploymentId) -> None:
        """Its home has no more than the durable image."""
        self.images.pop(name, None)
        if name in self.durable:
            self.images[name] = self.durable[name]

    # -- nodes ------------------------------------------------------------------------------

    def boot(self, wpg: WpgId) -> None:
        if self.devices[wpg].up or wpg not in self.held_us or wpg in self.unheard:
            return
        if self.daemon:  # the agent says hello
            for name in self.homed(wpg):
                image = self.images.get(name)
                self.send(self.placed(self.deployments[name], image and image[0], (0, 0)))
        self.devices[wpg].up = True
        if self.daemon:
            self.send(WpgUp(wpg=wpg, at_us=self.now, cause=CAUSE))

    def placed(
        self, deployment: Deployment, image: tuple[int, int] | None, applied: tuple[int, int]
    ) -> DeploymentPlaced:
        durable = self.known.get(deployment.id)
        if self.rng.random() < 0.5:
            durable = self.progress(deployment.id)
        return replace(super().placed(deployment, image, applied), durable=durable)

    def kept_from(self, name: DeploymentId) -> int:
        return self.forgotten.get(name, (0, 0))[0]

    def lose_node(self, wpg: WpgId) -> None:
        """Its memory, its host images and the copies under way are gone."""
        if wpg not in self.held_us or wpg in self.unheard:
            return
        self.seen["lost"] += 1
        device = self.devices[wpg]
        self.devices[wpg] = Device(device.wpg, born=device.born + 1)
        for name in [name for name, copy in self.copies.items() if copy.wpg == wpg]:
            copy = self.copies.pop(name)
            if self.rng.random() < 0.3:
                self.make_durable(name, copy)  # complete, but nobody was told
        for name in self.homed(wpg):
            self.to_durable(name)
        if not self.daemon:
            self.unheard.add(wpg)
            return
        if device.up:
            self.send(
                WpgDown(wpg=wpg, reason="node lost", blame=False, at_us=self.now, cause=CAUSE)
            )
        self.release(wpg)

    def release(self, wpg: WpgId) -> None:
        self.unheard.discard(wpg)
        for name in self.homed(wpg):
            self.asked.discard(name)
            self.copies.pop(name, None)
            self.to_durable(name)
            self.after(self.some(0, 40), self.rehome, name)
        self.devices[wpg] = Device(self.devices[wpg].wpg, born=self.devices[wpg].born + 1)
        since_us = self.held_us.pop(wpg)
        self.releasing = wpg
        self.send(WpgReleased(wpg=wpg, reason="lost", at_us=self.now, cause=CAUSE))
        self.releasing = None
        self.drains.pop(wpg, None)
        self.audit(self.devices[wpg].wpg, since_us, max(since_us, self.now))
        self.charges[wpg] = []
        self.after(self.some(0, 60), self.hold, wpg)

    def hold(self, wpg: WpgId) -> None:
        if not self.daemon:
            self.after(self.unit_us, self.hold, wpg)
            return
        self.held_us[wpg] = self.now
        self.send(WpgHeld(wpg=self.devices[wpg].wpg, at_us=self.now, cause=CAUSE))
        self.after(self.some(0, 20), self.boot, wpg)

    # -- moves ------------------------------------------------------------------------------

    def rehome(self, name: DeploymentId) -> None:
        """Its home was lost, or is given back: find another, or the same again."""
        if name in self.dropped:
            return
        if not self.daemon:
            self.after(self.unit_us, self.rehome, name)
        elif self.deployments[name].wpg not in self.held_us:
            assert self.move(name), "nobody needs the leave of a WPG that is gone"

    def wander(self, name: DeploymentId) -> None:
        """Move for no reason, if that is possible."""
        if self.daemon and name in self.deployments and name not in self.dropped:
            self.move(name)

    def move(self, name: DeploymentId) -> bool:
        was, image = self.deployments[name], self.images.get(name)
        homes = [w for w, device in self.devices.items() if device.wpg.pool is was.pool]
        now = replace(was, wpg=self.rng.choice(homes))
        up = self.devices[was.wpg].up
        self.deployments[name] = now
        if self.durable_every is not None:
            self.to_durable(name)
        loads = self.images.get(name)
        try:
            moved = DeploymentMoved(
                deployment=now, image=loads and loads[0], at_us=self.now, cause=CAUSE
            )
            out = self.core.handle(moved)
        except InvalidTransition:
            assert up
            self.seen["refused"] += 1
            self.deployments[name] = was
            self.images.pop(name, None)
            if image is not None:
                self.images[name] = image
            return False
        self.seen["moved"] += 1
        self.events.append(moved)
        self.copies.pop(name, None)
        self.asked.discard(name)
        device = self.devices[was.wpg]
        if device.resident == name and was.pool is Pool.TRAIN:
            device.resident, device.state, device.progress = None, "", (0, 0)
        self.carry_out(out)
        self.core.check_invariants()
        self.plan()
        return True

    # -- drains -----------------------------------------------------------------------------

    def drain(self, wpg: WpgId) -> None:
        if not self.daemon or wpg not in self.held_us or wpg in self.drains:
            return
        self.drains[wpg] = False
        if self.rng.random() < 0.2:
            self.after(self.some(0, 60), self.resume, wpg)
        self.send(WpgDraining(wpg=wpg, at_us=self.now, cause=CAUSE))

    def resume(self, wpg: WpgId) -> None:
        if self.daemon and wpg in self.drains:
            del self.drains[wpg]
            self.send(WpgResumed(wpg=wpg, at_us=self.now, cause=CAUSE))

    def drained(self, wpg: WpgId) -> None:
        assert self.drains[wpg] is False, f"{wpg} was drained twice"
        self.drains[wpg] = True
        self.after(self.some(0, 20), self.give_back, wpg)
        if self.releasing == wpg:
            return
        self.seen["lossless"] += 1
        device = self.devices[wpg]
        assert device.up and not device.runs and device.move is None
        assert all(self.deployments[name].wpg != wpg for name in self.asked - self.dropped)
        for name in self.homed(wpg):
            if self.core._books.homes[name][1].program is None or self.broken(name):
                continue
            newest = device.state if device.resident == name else None
            if newest is None and name in self.images:
                newest = self.images[name][1]
            kept = self.images if self.durable_every is None else self.durable
            assert newest is None or kept[name][1] == newest, f"{name} would lose changes"

    def broken(self, name: DeploymentId) -> bool:
        program = self.core._books.homes[name][1].program
        return program is not None and bool(program.broken)

    def give_back(self, wpg: WpgId) -> None:
        if not self.daemon:
            self.after(self.unit_us, self.give_back, wpg)
            return
        if not self.drains.get(wpg) or wpg not in self.held_us:
            return
        if self.rng.random() < 0.6:
            for name in self.homed(wpg):
                assert self.move(name), "a drained WPG lets its deployments go"
        if self.rng.random() < 0.5:
            self.resume(wpg)
        elif self.durable_every is not None:
            self.release(wpg)
        else:
            self.after(0, self.resume, wpg)

    # -- a daemon that dies and comes back ---------------------------------------------------

    def stop_daemon(self, pause_us: int) -> None:
        super().stop_daemon(pause_us)
        self.asked.clear()
        self.said.clear()

    def start_daemon(self) -> None:
        again, self.drains = list(self.drains), {}
        super().start_daemon()
        if not self.daemon:
            self.drains = dict.fromkeys(again, False)
            return
        for wpg in sorted(self.unheard):
            self.release(wpg)
        for name, deployment in self.deployments.items():
            if deployment.wpg not in self.held_us and name not in self.dropped:
                self.after(self.some(0, 40), self.rehome, name)
        for wpg in again:
            if wpg in self.held_us:
                self.drains[wpg] = False
                self.send(WpgDraining(wpg=wpg, at_us=self.now, cause=CAUSE))

    def close(self) -> None:
        assert not self.drains, "a drain never ended"
        super().close()

    def tick(self) -> None:
        super().tick()
        if self.daemon:
            for record in self.records.values():
                if record.finished is None and record.call.deployment not in self.dropped:
                    assert self.core.explain(record.call.id).sentence
