"""What the daemon knows of WPGs by their agents' reports."""

import logging
from collections.abc import Callable

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import CauseId, DeploymentId, WpgId
from plexrl_slurm.core.messages import ImagesLeft, WpgDown, WpgUp
from plexrl_slurm.daemons.agent_views import AgentView, WpgView
from plexrl_slurm.daemons.gang_hub import GangHub
from plexrl_slurm.daemons.gang_view import Gang
from plexrl_slurm.daemons.image_stories import ImageStories
from plexrl_slurm.daemons.layout import HeldWpg, Place
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.logs import say
from plexrl_slurm.transport import messages as tm

log = logging.getLogger(__name__)

#: A WPG that failed to start so often in a row will not.
NEVER = 4


class AgentReports:
    """Of :class:`AgentHub`: who came up, went down, persisted, and who never will."""

    agents: dict[bytes, AgentView]
    wpgs: dict[str, WpgView]
    gangs: GangHub
    #: See :class:`AgentHub`.
    on_left: Callable[[tm.Done, str], None]
    stories: ImageStories
    _shell: Shell
    _persisted: Callable[[tm.Done], None]
    _after_commit: Callable[[Callable[[], None]], None]
    _places: dict[Place, tuple[HeldWpg, ...]]
    _expected_us: dict[Place, int]
    _persisting: dict[str, tuple[bytes, tuple[int, int]]]

    def hopeless(self) -> list[tuple[Place, str]]:
        """Places with a WPG that does not start there, however often it is tried."""
        failing = [
            (place, held.id, max(view.failures, view.lost_wakes))
            for place, wpgs in self._places.items()
            for held in wpgs
            if (view := self.wpgs.get(held.id)) is not None
        ]
        return [
            (place, f"WPG {wpg} does not start: {self.wpgs[wpg].reason}")
            for place, wpg, failures in (*failing, *self.gangs.failures())
            if failures >= NEVER
        ]

    def heard_us(self) -> dict[Place, int]:
        """When each agent was heard last."""
        return {
            agent.place: agent.heard_us
            for agent in self.agents.values()
            if agent.place in self._places and not agent.refused
        }

    def unheard_us(self) -> dict[Place, int]:
        """Since when each agent is awaited that has not said a word."""
        heard = {agent.place for agent in self.agents.values()}
        return {place: at for place, at in self._expected_us.items() if place not in heard}

    def _left(self, report: tm.Done) -> ImagesLeft | None:
        """What an agent says of images that are not what the core believes."""
        if report.left is None:
            return None
        view = self.wpgs.get(report.wpg)
        if report.left.damaged or report.left.image is None:
            self.on_left(report, view.node if view is not None else "")
        return ImagesLeft(image=report.left.image, durable=report.left.durable)

    def _changed(self, address: bytes, report: tm.WpgChanged) -> None:
        view = self.wpgs.get(report.name)
        if view is None or view.agent != address or report.incarnation < view.incarnation:
            return
        view.incarnation, view.pids = report.incarnation, report.pids
        # It may come up again and again, and die when it is woken.
        view.reason = report.reason or (view.reason if view.lost_wakes else "")
        say(log, "wpg", name=report.name, state=report.state, reason=report.reason)
        if report.state == "up" and view.state != "up":
            view.state, view.failures = "up", 0
            self._shell.feed(
                WpgUp(at_us=now_us(), cause=CauseId("gang is up"), wpg=WpgId(report.name))
            )
        elif report.state == "down":
            # Without a start there never was a gang: its GPUs are not there.
            view.failures += NEVER if report.incarnation == 0 else view.state != "up"
            self._down(view, report.reason)
        else:
            view.state = report.state

    def _down(self, view: WpgView, reason: str) -> None:
        was_up, view.state, view.reason = view.state == "up", "down", reason
        if was_up:
            self._shell.feed(
                WpgDown(at_us=now_us(), cause=CauseId(reason), wpg=WpgId(view.name), reason=reason)
            )

    def _show(self, gang: Gang, reason: str) -> None:
        """For people."""
        view = self.wpgs[gang.id]
        states = {part.state for part in gang.parts}
        view.state = "up" if gang.up else "down" if states == {"down"} else "starting"
        view.incarnation, view.reason = gang.incarnation, reason or view.reason
        view.pids = [pid for part in gang.parts for pid in part.pids]
        if gang.up:
            view.reason = reason

    def _persist_done(self, address: bytes, done: tm.Done) -> None:
        where, asked = self._persisting.get(done.deployment, (b"", (0, 0)))
        if where != address:
            return  # nobody asked it, or not since the deployment came back to it
        if done.ok:
            self._persisted(done)
            self.stories.durable(done.deployment, done.progress)
            after = self._persist_ended
            self._after_commit(lambda: after(done.deployment, done.progress, ok=True))
        else:
            say(log, "persist_failed", deployment=done.deployment, reason=done.error)
            self._persist_ended(done.deployment, asked, ok=False, left=self._left(done))

    def _persist_ended(
        self,
        deployment: str,
        progress: tuple[int, int],
        *,
        ok: bool,
        left: ImagesLeft | None = None,
    ) -> None:
        if self._persisting.pop(deployment, None) is not None:
            self._shell.persisted(DeploymentId(deployment), progress, ok=ok, left=left)
