"""The scheduler: facts in, decisions out. No I/O, clock, randomness or configuration.

``handle`` books one fact; ``plan`` decides for the WPGs that changed and is called once for a
burst of facts. Nothing else changes the core. ``audit`` and ``explain`` read it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from plexrl_slurm.core import facts
from plexrl_slurm.core.audit import complaints
from plexrl_slurm.core.books import Books
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.explain import Asker, Explanation, WpgView, explain, explain_job, view
from plexrl_slurm.core.handover import why_not_move
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import AnyEvent, AnyInstruction, Tick, WakeAt
from plexrl_slurm.core.planner import Planner
from plexrl_slurm.core.policy import Policy
from plexrl_slurm.core.scales import Scales
from plexrl_slurm.core.tails import TailRules

_NOBODY: Final = Asker()


class SchedulerCore:
    """Changed only by :meth:`handle` and :meth:`plan`."""

    def __init__(
        self,
        policy: Policy,
        *,
        costs: SwitchCosts,
        hold_us: int = 2_000_000,
        hysteresis: float = 4.0,
        image_every: int = 10,
        max_attempts: int = 3,
        durable_every: int | None = None,
        spare_images: bool = False,
        hints: bool = False,
        tails: TailRules | Mapping[str, Any] | None = None,
    ) -> None:
        """``hints``: say who is expected next, for images that lie on disks of the nodes.
        ``durable_every``: images live on nodes that can be lost, so calls are kept until a
        durable image has them, and one is made after so many optimizer steps. ``None``: a host
        image is enough. ``spare_images``: calls are kept until the last but one has them, so
        that the newest durable image may be damaged as well. ``tails``: which tails of rollouts
        may be paused (a journal has the fields of the rules); ``None``: none.
        """
        self._books = Books(
            hold_us=hold_us,
            max_attempts=max_attempts,
            costs=costs,
            durable_every=durable_every,
            spare_images=spare_images,
        )
        self._planner = Planner(
            books=self._books,
            scales=Scales(books=self._books, holds=policy.holds),
            policy=policy,
            hysteresis=hysteresis,
            image_every=image_every,
            hints=hints,
            tails=TailRules(**tails) if isinstance(tails, Mapping) else tails,
        )
        #: The tick that was asked for last and has not come.
        self._armed_us: int | None = None
        #: It came, and nobody has looked yet whether another is needed.
        self._rang = False

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        """Book one fact."""
        if isinstance(event, Tick) and self._armed_us is not None and event.at_us >= self._armed_us:
            self._armed_us, self._rang = None, True
        return facts.book(self._books, event)

    def plan(self, at_us: int, cause: CauseId) -> list[AnyInstruction]:
        """Decide for every WPG that changed; a second call without events decides nothing."""
        out: list[AnyInstruction] = []
        books = self._books
        stale, books.stale = books.stale, {}
        for lane in stale.values():
            if lane.wpg is None:
                continue
            if lane.clamp(at_us) < books.beat_us:
                books.due_us = 0
            out += self._planner.plan(lane, cause)
        for lane in stale.values():
            if (alarm_us := lane.alarm_us()) is not None:
                books.alarms_us[lane.id] = alarm_us
            elif lane.id in books.alarms_us:
                del books.alarms_us[lane.id]
        if stale or self._rang:
            self._rang = False
            out += self._arm(cause)
        return out

    def _arm(self, cause: CauseId) -> list[AnyInstruction]:
        """Ask for a tick when the first lane wants it, unless one comes before that anyway."""
        if not self._books.alarms_us:
            return []
        first_us = min(self._books.alarms_us.values())
        if self._armed_us is not None and self._armed_us <= first_us:
            return []
        self._armed_us = first_us
        return [WakeAt(at_us=self._armed_us, cause=cause)]

    def clock_us(self, wpg: WpgId) -> int:
        """Latest instant that is booked or could be: no later event of ``wpg`` comes before it."""
        lane = self._books.lanes.get(wpg)
        return lane.now_us if lane is not None else 0

    def check_invariants(self) -> None:
        """Raise if the books contradict each other. For tests, and in production on demand."""
        found = [*complaints(self._books), *self._planner.scales.complaints()]
        if found:
            raise AssertionError("; ".join(found))

    def explain(
        self, subject: CallId | DeploymentId | WpgId, asker: Asker = _NOBODY
    ) -> Explanation:
        """What a call, a deployment or a WPG does or waits for."""
        return explain(self._planner, subject, asker)

    def explain_job(self, job: JobId, asker: Asker = _NOBODY) -> Sequence[Explanation]:
        """The same for everything of a job that waits or runs."""
        return explain_job(self._planner, job, asker)

    def story(self, deployment: DeploymentId) -> Sequence[str]:
        """What happened to its state, oldest first: one line a step, and one a move."""
        home = self._books.homes.get(deployment)
        return () if home is None else home[1].where.story

    def why_not_move(self, deployment: DeploymentId) -> str:
        """Why :class:`DeploymentMoved` would be refused now; "" if it would not."""
        home = self._books.homes.get(deployment)
        return "" if home is None else why_not_move(*home)

    def views(self) -> Sequence[WpgView]:
        """What every held WPG does."""
        return tuple(
            view(self._planner, lane)
            for lane in self._books.lanes.values()
            if lane.wpg is not None and lane.meter is not None
        )
