"""Orders to agents, as messages: the outgoing half of the hub."""

from plexrl_slurm.core.ids import CallId, WpgId
from plexrl_slurm.core.messages import (
    Call,
    Expect,
    Grant,
    Pause,
    Persist,
    Run,
    SaveImage,
    Switch,
)
from plexrl_slurm.daemons.agent_views import AgentView, WpgView
from plexrl_slurm.daemons.gang_hub import GangHub
from plexrl_slurm.daemons.image_stories import ImageStories
from plexrl_slurm.daemons.orders import Durable, Weights
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.daemons.snapshot_places import SnapshotPlaces
from plexrl_slurm.settings import Settings
from plexrl_slurm.transport import messages as tm
from plexrl_slurm.transport.links import AgentServer


class OrderPost:
    """A part of :class:`AgentHub`, which makes what it uses."""

    agents: dict[bytes, AgentView]
    wpgs: dict[str, WpgView]
    #: WPGs that lie on several nodes.
    gangs: GangHub
    stories: ImageStories
    snapshots: SnapshotPlaces
    _server: AgentServer
    _shell: Shell
    _epoch: int
    _settings: Settings
    _orders: int
    #: Persists under way: ``deployment -> (address, progress)``.
    _persisting: dict[str, tuple[bytes, tuple[int, int]]]

    def switch(self, step: Switch, weights: Weights | None, durable: Durable | None) -> None:
        view = self.wpgs[step.wpg]
        if (gang := self.gangs.get(step.wpg)) is not None:
            self.gangs.orders.switch(gang, step, durable)
            return
        known = self._shell.deployments.get(step.incoming)
        in_memory = weights is not None and not weights.path
        self._post(
            view.agent,
            tm.SwitchOrder(
                epoch=self._epoch,
                id=self.order_id(),
                wpg=step.wpg,
                incarnation=view.incarnation,
                incoming=step.incoming,
                outgoing=step.outgoing or "",
                progress=step.outgoing_progress,
                snapshot_path=weights.path if weights else "",
                model=weights.model if weights else "",
                durable_path=durable.path if durable else "",
                durable_progress=durable.progress if durable else (0, 0),
                sources=self.snapshots.sources(step.incoming) if in_memory else [],
                snapshot_bytes=known.image_bytes if known is not None and in_memory else 0,
                replaceable=self._replaceable(step.outgoing),
                beside=step.beside or "",
            ),
        )

    def _replaceable(self, deployment: str | None) -> bool:
        """Whether its durable image is written down, so that the calls since then are kept, and
        no other is under way."""
        kept = self._settings.durable and deployment in self._shell.durable
        return kept and deployment not in self._persisting

    def save(self, step: SaveImage) -> None:
        view = self.wpgs[step.wpg]
        if (gang := self.gangs.get(step.wpg)) is not None:
            self.gangs.orders.save(gang, step)
            return
        self._post(
            view.agent,
            tm.SaveOrder(
                epoch=self._epoch,
                id=self.order_id(),
                wpg=step.wpg,
                incarnation=view.incarnation,
                deployment=step.deployment,
                progress=step.progress,
                replaceable=self._replaceable(step.deployment),
            ),
        )

    def grant(self, step: Grant) -> None:
        order = tm.GrantOrder(
            epoch=self._epoch, id=self.order_id(), wpg=step.wpg, number=step.number
        )
        self._post(self.wpgs[step.wpg].agent, order)

    def hint(self, step: Expect) -> None:
        order = tm.ExpectOrder(epoch=self._epoch, wpg=step.wpg, deployment=step.deployment or "")
        for address in self._agents_of(step.wpg):
            self._post(address, order)

    def persist(self, step: Persist, known: Durable | None) -> None:
        view, gang = self.wpgs.get(step.wpg), self.gangs.get(step.wpg)
        if gang is not None:
            if self.gangs.orders.persist(gang, step, known.progress if known else None):
                self._persisting[step.deployment] = (gang.parts[0].address, step.progress)
            else:
                self._shell.persist_later(step)
            return
        if view is None or not view.agent:
            # Its agent has not said hello since it was last lost.
            self._shell.persist_later(step)
            return
        self._persisting[step.deployment] = (view.agent, step.progress)
        self._post(
            view.agent,
            tm.PersistOrder(
                epoch=self._epoch,
                id=self.order_id(),
                wpg=step.wpg,
                deployment=step.deployment,
                folder=str(self._settings.durable_dir),
                known=known.progress if known else None,
            ),
        )

    def run(self, step: Run, call: Call, body: bytes, publish: str) -> None:
        view, gang = self.wpgs[step.wpg], self.gangs.get(step.wpg)
        order = tm.RunOrder(
            epoch=self._epoch,
            id=self.order_id(),
            wpg=step.wpg,
            incarnation=view.incarnation if gang is None else gang.incarnation,
            call=step.call,
            part=step.part,
            deployment=step.deployment,
            seq=call.seq,
            parts=call.parts,
            body=body,
            publish=publish,
        )
        if gang is None:
            self._post(view.agent, order)
        else:
            self.gangs.orders.run(gang, order)

    def abort(self, wpg: WpgId, call: CallId) -> None:
        for address in self._agents_of(wpg):
            self._post(address, tm.AbortOrder(epoch=self._epoch, wpg=wpg, call=call))

    def pause(self, step: Pause) -> None:
        for address in self._agents_of(step.wpg):
            for call in step.calls:
                order = tm.AbortOrder(epoch=self._epoch, wpg=step.wpg, call=call, pause=True)
                self._post(address, order)

    def _agents_of(self, wpg: str) -> list[bytes]:
        """Those that have said hello."""
        view = self.wpgs.get(wpg)
        alone = [view.agent] if view is not None and view.agent else []
        return self.gangs.addresses(wpg) or alone

    def drop(self, *, deployments: list[str], snapshots: list[str]) -> None:
        """Tell every agent to delete what nobody needs any more."""
        self.snapshots.dropped(snapshots)
        order = tm.DropOrder(epoch=self._epoch, deployments=deployments, snapshots=snapshots)
        self.gangs.drop(deployments)
        for deployment in deployments:
            self.stories.forget(deployment)
        for address in self.agents:
            self._post(address, order)

    def drop_at(self, wpg: WpgId, *, deployments: list[str]) -> None:
        """They have left this WPG: its agent's images of them are garbage."""
        addresses = self._agents_of(wpg)
        if self.gangs.get(wpg) is not None:
            self.gangs.drop(deployments)
        order = tm.DropOrder(epoch=self._epoch, deployments=deployments, snapshots=[])
        for address in addresses:
            self._post(address, order)
        for deployment in deployments:
            if self._persisting.get(deployment, (b"",))[0] in addresses:
                del self._persisting[deployment]  # the core has forgotten it with the move

    def is_persisting(self, deployment: str) -> bool:
        """Whether its image is being copied to the durable tier, as the core asked."""
        return deployment in self._persisting

    def order_id(self) -> str:
        """Of the next order."""
        self._orders += 1
        return f"{self._epoch}.{self._orders}"

    def _post(self, address: bytes, command: tm.Command) -> None:
        # Without a task of its own: the link's queue has no limit, so this never waits.
        self._server.post(address, command)
