"""The world of nodes where images turn out to be damaged, in memory and in the durable tier."""

from dataclasses import replace

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import DeploymentId
from plexrl_slurm.core.messages import (
    AnyInstruction,
    Deployment,
    DeploymentPlaced,
    DurableLost,
    Forget,
    ImagesLeft,
    Persisted,
    Pool,
    SaveImage,
    Switch,
    SwitchEnded,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from tests.core.harness import CAUSE
from tests.core.nodes import Copy, Image, NodeWorld


class DamagedWorld(NodeWorld):
    """``damages``: how often a load, or a copy, meets a bad image."""

    damages = 0.3

    def make_core(self) -> SchedulerCore:
        if not hasattr(self, "spares"):
            self.spares: dict[DeploymentId, Image] = {}
            #: Copies under way of images that were found to be bad since.
            self.spoiled: list[Copy] = []
        return SchedulerCore(
            find_policy(self.policy),
            costs=SwitchCosts(),
            hold_us=self.hold_us,
            image_every=self.image_every,
            durable_every=self.durable_every,
            spare_images=True,
        )

    def make_durable(self, name: DeploymentId, copy: Copy) -> None:
        before = self.durable.get(name)
        super().make_durable(name, copy)
        if before is not None and self.durable[name] is not before:
            self.spares[name] = before

    def perform(self, order: AnyInstruction) -> None:
        if isinstance(order, Forget):
            assert self.spares[order.deployment][0] >= order.progress, "the spare needs them"
        super().perform(order)

    def placed(
        self, deployment: Deployment, image: tuple[int, int] | None, applied: tuple[int, int]
    ) -> DeploymentPlaced:
        event = super().placed(deployment, image, applied)
        spare = self.spares.get(deployment.id)
        if spare is None or event.durable is None or spare[0] >= event.durable:
            return event
        return replace(event, spare=spare[0])

    # -- damage -----------------------------------------------------------------------------

    def damage(self, name: DeploymentId) -> None:
        """The newest image of a deployment is bad, if calls can still make up for it."""
        image, durable = self.images.get(name), self.durable.get(name)
        if image is None:
            return
        if durable is not None and durable[0] >= image[0]:
            spare = self.spares.pop(name, None)
            if (spare[0] if spare is not None else (0, 0)) < self.forgotten.get(name, (0, 0)):
                return
            self.seen["durable damaged"] += 1
            durable = spare
            del self.durable[name]
            self.known.pop(name, None)
            if durable is not None:
                self.durable[name] = durable
                self.known[name] = durable[0]
        self.seen["damaged"] += 1
        self.said.pop(name, None)
        self.to_durable(name)
        if name in self.copies:
            self.spoiled.append(self.copies[name])

    def scrub(self, name: DeploymentId) -> None:
        """Somebody looks at durable images, and the newest is bad; a newer one is in memory."""
        image, durable = self.images.get(name), self.durable.get(name)
        if image is None or durable is None or durable[0] >= image[0] or not self.daemon:
            return
        spare = self.spares.get(name)
        if (spare[0] if spare is not None else (0, 0)) < self.forgotten.get(name, (0, 0)):
            return
        self.seen["durable scrubbed"] += 1
        for known in (self.spares, self.durable, self.known, self.said):
            known.pop(name, None)
        if spare is not None:
            self.durable[name], self.known[name] = spare, spare[0]
        self.send(
            DurableLost(
                deployment=name,
                durable=self.progress(name),
                spare=None,
                at_us=self.now,
                cause=CAUSE,
            )
        )

    def left(self, name: DeploymentId) -> ImagesLeft:
        image = self.images.get(name)
        return ImagesLeft(image=image and image[0], durable=self.progress(name))

    def end_move(self, order: Switch | SaveImage, born: int) -> None:
        device = self.devices[order.wpg]
        trains = isinstance(order, Switch) and (self.deployments[order.incoming].pool is Pool.TRAIN)
        if device.born != born or not isinstance(order, Switch) or not trains:
            super().end_move(order, born)
            return
        name = order.incoming
        if self.rng.random() < self.damages:
            self.damage(name)
        device.move = None
        ok = name in self.images and self.rng.random() >= self.failures
        if not ok:
            device.resident, device.state = None, "?"
        else:
            if order.outgoing is not None:
                self.images[order.outgoing] = (order.outgoing_progress, device.state)
            device.resident = name
            device.progress, device.state = self.images[name]
        if self.daemon:
            self.send(
                SwitchEnded(
                    wpg=order.wpg,
                    ok=ok,
                    moved_bytes=1_000_000,
                    left=self.left(name),
                    at_us=self.now,
                    cause=CAUSE,
                )
            )
        for each in sorted(self.durable):
            if self.rng.random() < self.damages:
                self.scrub(each)

    def end_copy(self, name: DeploymentId, copy: Copy) -> None:
        spoiled = any(each is copy for each in self.spoiled)
        if self.copies.get(name) is not copy or not (spoiled or self.rng.random() < self.damages):
            super().end_copy(name, copy)
            return
        del self.copies[name]
        if not spoiled:
            self.damage(name)
        if self.daemon:
            self.asked.discard(name)
            self.send(
                Persisted(
                    deployment=name,
                    progress=copy.image[0],
                    ok=False,
                    left=self.left(name),
                    at_us=self.now,
                    cause=CAUSE,
                )
            )
