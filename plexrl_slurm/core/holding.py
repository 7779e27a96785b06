"""Which holds a partition should have: a decision from views, without memory, clock or I/O.

Carry out every action of :func:`decide`, then show its effect in the next views (``draining``,
``ENDING``, ``replaces``, ``extending``): an action whose effect shows is not asked for again.
"""

from collections.abc import Mapping, Sequence

from plexrl_slurm.core.hold_views import (
    Demand,
    Drain,
    Extend,
    Fault,
    HoldAction,
    HoldPhase,
    HoldRules,
    HoldView,
    Release,
    Renewal,
    Submit,
    Undrain,
)

__all__ = [
    "Demand",
    "Drain",
    "Extend",
    "Fault",
    "HoldAction",
    "HoldPhase",
    "HoldRules",
    "HoldView",
    "Release",
    "Renewal",
    "Submit",
    "Undrain",
    "decide",
    "excluded",
    "next_look_us",
    "rest_until_us",
]


def decide(
    now_us: int,
    holds: Sequence[HoldView],
    demand: Demand,
    rules: HoldRules,
    *,
    not_before_us: int = 0,
) -> tuple[HoldAction, ...]:
    """What to do now; nothing is submitted before ``not_before_us`` (see :func:`rest_until_us`).

    Never asks for more live holds than ``max`` and one replacement for each that has one.
    """
    return tuple(_Decision(now_us, holds, demand, rules, not_before_us).make())


def next_look_us(
    now_us: int,
    holds: Sequence[HoldView],
    demand: Demand,
    rules: HoldRules,
    *,
    not_before_us: int = 0,
) -> int | None:
    """When time alone may change the decision next; ``None``: never."""
    times = [not_before_us]
    if demand.waiting_since_us is not None:
        times.append(demand.waiting_since_us + rules.scale_up_after_us)
    for hold in holds:
        if hold.limit_end_us is not None:
            before = (rules.renew_before_us, rules.call_us, rules.call_us // 2)
            times += [hold.limit_end_us - each_us for each_us in before]
        if hold.idle_since_us is not None:
            times.append(hold.idle_since_us + rules.idle_release_us)
        if hold.vacant_since_us is not None:
            times.append(hold.vacant_since_us + rules.idle_release_us)
        times += [hold.submitted_us + rules.idle_release_us, hold.submitted_us + rules.call_us]
    return min((at_us for at_us in times if at_us > now_us), default=None)


class _Decision:
    """One decision. A *line* is a hold and, if it has one, its replacement; it counts once."""

    def __init__(
        self,
        now_us: int,
        holds: Sequence[HoldView],
        demand: Demand,
        rules: HoldRules,
        not_before_us: int,
    ) -> None:
        self._now_us, self._demand, self._rules = now_us, demand, rules
        self._may_submit = now_us >= not_before_us
        live = [hold for hold in holds if hold.phase is not HoldPhase.ENDING]
        self._live = sorted(live, key=lambda hold: (hold.submitted_us, hold.id))
        self._by_id = {hold.id: hold for hold in self._live}
        #: By the id of the hold that it replaces.
        self._successors = {hold.replaces: hold for hold in self._live if hold.replaces}
        #: The newest hold of each line.
        self._heads = [hold for hold in self._live if hold.id not in self._successors]
        self._wanted_back = self._choose_wanted_back()
        self._staying = [h for h in self._heads if not h.draining or h.id in self._wanted_back]
        self._excess = self._choose_excess()
        self._spare = self._choose_spare()
        self._new_lines = 0
        self._actions: list[HoldAction] = []

    def make(self) -> list[HoldAction]:
        for hold in self._live:
            if hold.id in self._wanted_back:
                self._take_back(hold)
            elif hold.draining:
                if hold.drained or hold.phase is HoldPhase.PENDING:
                    self._release(hold, "it is drained: nothing lives on it")
            elif hold.id in self._excess:
                self._let_go(hold, f"there are more holds than hold.max = {self._rules.max}")
            elif hold.id in self._spare:
                self._spare_it(hold)
            elif hold.phase is HoldPhase.RUNNING:
                self._keep(hold)
        for _ in range(self._rules.min - len(self._staying)):
            self._submit(f"there are fewer holds than hold.min = {self._rules.min}")
        if self._needs_more():
            self._submit(self._why_more())
        return self._actions

    # ---- one hold -------------------------------------------------------------------------

    def _take_back(self, hold: HoldView) -> None:
        if self._is_late(hold):
            # It was drained because Slurm had not extended it in time; it still may.
            self._extend(hold)
        else:
            reason = f"hold {hold.id} is used again: {self._why_more()}"
            self._actions.append(Undrain(hold=hold.id, reason=reason))

    def _let_go(self, hold: HoldView, why: str) -> None:
        """Pending: at once. Running: when nothing has to live on it, at the latest before its
        limit."""
        if hold.phase is HoldPhase.PENDING:
            self._release(hold, f"it has not started, and {why}")
        elif self._unneeded_since_us(hold) is not None or self._is_late(hold) or _faulty(hold):
            self._drain(hold, why)

    def _spare_it(self, hold: HoldView) -> None:
        """Nobody needs it now: given back after a while, and not renewed until then."""
        since_us = self._unneeded_since_us(hold)
        if since_us is not None and self._now_us >= since_us + self._rules.idle_release_us:
            idle_s = self._rules.idle_release_us / 1e6
            if self._idle_since_us(hold) is not None:
                self._let_go(hold, f"nothing has needed it for {idle_s:g} s")
            else:
                self._let_go(hold, f"others have had room for all who live on it for {idle_s:g} s")
        elif self._is_late(hold) or _faulty(hold):
            self._let_go(hold, "nothing needs it, so it is not renewed")

    def _keep(self, hold: HoldView) -> None:
        """Renew or replace it in time."""
        successor = self._successors.get(hold.id)
        if successor is not None:
            self._change_over(hold, successor)
            return
        if hold.replaces in self._by_id:
            # One replacement for a line at a time; without this one the old hold gets another.
            why = _fault(hold) if hold.useless else "its time limit is near"
            if hold.useless or self._is_late(hold):
                self._drain(hold, f"{why}, and hold {hold.replaces} is still there")
            return
        if _faulty(hold):
            self._replace(hold, _fault(hold))
        elif hold.outdated:
            self._replace(hold, "it was made before the settings had all of these WPGs")
        elif self._is_near(hold, self._rules.renew_before_us):
            self._renew(hold)
        if hold.useless and not hold.in_use:
            self._drain(hold, f"{_fault(hold)}, and nothing lives on it")
        elif self._is_late(hold):
            self._drain(hold, "its time limit is near, and nothing has replaced it yet")

    def _renew(self, hold: HoldView) -> None:
        before_s = self._rules.renew_before_us / 1e6
        if self._is_extendable(hold):
            self._extend(hold)
        elif not hold.whole:
            self._replace(hold, f"{_fault(hold)}, and its time limit is {before_s:g} s away")
        elif self._rules.renewal is Renewal.AUTO:
            self._replace(
                hold, f"its time limit is {before_s:g} s away, and Slurm does not extend it"
            )
        elif self._rules.renewal is Renewal.REPLACE:
            self._replace(hold, f"its time limit is {before_s:g} s away")

    def _change_over(self, hold: HoldView, successor: HoldView) -> None:
        """It is wanted until its successor is ready, or as long as it may stay."""
        waited_us = self._now_us - successor.submitted_us
        if successor.ready and not successor.draining:
            self._drain(hold, f"hold {successor.id}, which replaces it, is ready")
        elif self._is_late(hold):
            self._drain(hold, f"its time limit is near, and {_still(successor)}")
        elif hold.useless and not hold.in_use:
            self._drain(hold, f"{_fault(hold)}, and nothing lives on it")
        elif hold.useless and waited_us >= self._rules.call_us:
            self._drain(hold, f"{_fault(hold)}, and {_still(successor)}")

    # ---- how many -------------------------------------------------------------------------

    def _choose_wanted_back(self) -> set[str]:
        """Draining holds to use again instead of asking for others: those that live longest."""
        staying = [hold for hold in self._heads if not hold.draining]
        missing = self._rules.min - len(staying)
        if missing < 1 and self._demand and not any(self._has_room(hold) for hold in staying):
            missing = 1
        if len(self._heads) > self._rules.max or missing < 1:
            return set()
        usable = [
            hold
            for hold in self._heads
            if hold.draining and hold.phase is HoldPhase.RUNNING and not _faulty(hold)
            if not self._is_late(hold) or self._is_extendable(hold)
        ]
        usable.sort(key=lambda hold: (hold.limit_end_us is not None, -(hold.limit_end_us or 0)))
        return {hold.id for hold in usable[:missing]}

    def _choose_excess(self) -> set[str]:
        """Holds above a lowered ``max``: pending, then idle, then those that end first."""

        def order(hold: HoldView) -> tuple[bool, bool, int]:
            used = self._idle_since_us(hold) is None
            first = hold.limit_end_us or 0 if used else -hold.submitted_us
            return hold.phase is HoldPhase.RUNNING, used, first

        many = max(len(self._staying) - self._rules.max, 0)
        return {hold.id for hold in sorted(self._staying, key=order)[:many]}

    def _choose_spare(self) -> set[str]:
        """Idle holds above ``min``: those that had to be renewed, then the youngest; if there are
        none, one that all can leave."""
        many = len(self._staying) - len(self._excess) - self._rules.min
        if self._demand or self._rules.idle_release_us == 0 or many < 1:
            return set()
        idle = [
            hold
            for hold in reversed(self._staying)
            if hold.id not in self._excess and self._idle_since_us(hold) is not None
        ]
        idle.sort(
            key=lambda hold: (
                not (_faulty(hold) or self._is_near(hold, self._rules.renew_before_us)),
                hold.phase is HoldPhase.RUNNING,
            )
        )
        if not idle:
            left = [hold for hold in self._staying if hold.id not in self._excess]
            idle = [hold for hold in left if self._unneeded_since_us(hold) is not None][:1]
        return {hold.id for hold in idle[:many]}

    def _needs_more(self) -> bool:
        """Demand that no hold which is there or comes can serve."""
        waiting_us = self._demand.waiting_since_us
        long = waiting_us is not None and (
            self._now_us >= waiting_us + self._rules.scale_up_after_us
        )
        if not (long or self._demand.homeless) or self._wanted_back:
            return False
        asked = any(isinstance(action, Submit) for action in self._actions)
        return not asked and not any(_comes(h) or self._has_room(h) for h in self._live)

    def _why_more(self) -> str:
        if self._demand.homeless:
            return "deployments have lost their WPG and no hold has room for them"
        if self._demand:
            return "jobs wait for WPGs that one more hold gives"
        return f"there are fewer holds than hold.min = {self._rules.min}"

    # ---- actions --------------------------------------------------------------------------

    def _submit(self, reason: str) -> None:
        """One more line, if there may be one."""
        if self._may_submit and len(self._heads) + self._new_lines < self._rules.max:
            self._new_lines += 1
            self._actions.append(Submit(reason=reason))

    def _replace(self, hold: HoldView, why: str) -> None:
        if self._may_submit:
            reason = f"hold {hold.id} is to be replaced: {why}"
            self._actions.append(Submit(replaces=hold.id, reason=reason))

    def _extend(self, hold: HoldView) -> None:
        if hold.started_us is None or self._rules.time_limit_us is None:
            return
        full_s = self._rules.time_limit_us / 1e6
        self._actions.append(
            Extend(
                hold=hold.id,
                limit_us=self._now_us - hold.started_us + self._rules.time_limit_us,
                reason=f"hold {hold.id} is near its time limit and shall run {full_s:g} s more",
            )
        )

    def _drain(self, hold: HoldView, why: str) -> None:
        self._actions.append(Drain(hold=hold.id, reason=f"hold {hold.id} is drained: {why}"))

    def _release(self, hold: HoldView, why: str) -> None:
        self._actions.append(Release(hold=hold.id, reason=f"hold {hold.id} is given back: {why}"))

    # ---- facts ----------------------------------------------------------------------------

    def _is_near(self, hold: HoldView, before_us: int) -> bool:
        end_us = hold.limit_end_us
        return end_us is not None and not hold.extending and self._now_us >= end_us - before_us

    def _is_late(self, hold: HoldView) -> bool:
        """Its last call has come; half of it is left to Slurm if it may still extend the hold."""
        call_us = self._rules.call_us
        return self._is_near(hold, call_us // 2 if self._is_extendable(hold) else call_us)

    def _is_extendable(self, hold: HoldView) -> bool:
        known = hold.started_us is not None and self._rules.time_limit_us is not None
        asked = self._rules.renewal is not Renewal.REPLACE and not hold.extend_refused
        return known and asked and hold.whole and not _faulty(hold)

    def _idle_since_us(self, hold: HoldView) -> int | None:
        """Since when nothing has needed its line; a pending hold alone: since it was submitted."""
        line = [hold]
        if (before := self._by_id.get(hold.replaces)) is not None:
            line.append(before)
        running = [each for each in line if each.phase is HoldPhase.RUNNING]
        since = [each.idle_since_us for each in running if not each.in_use]
        known = [at_us for at_us in since if at_us is not None]
        if len(known) < len(running):
            return None
        return max(known, default=hold.submitted_us)

    def _unneeded_since_us(self, hold: HoldView) -> int | None:
        """Since when it is idle, or, for one that nothing replaces, since when all can leave it."""
        idle_us = self._idle_since_us(hold)
        alone = hold.replaces not in self._by_id and hold.id not in self._successors
        return hold.vacant_since_us if idle_us is None and alone else idle_us

    def _has_room(self, hold: HoldView) -> bool:
        """A whole hold is empty: what waits goes there, or would fit on no hold."""
        empty = hold.ready and hold.whole and not hold.in_use and not hold.draining
        return empty and hold.phase is HoldPhase.RUNNING and not self._is_late(hold)


def _comes(hold: HoldView) -> bool:
    """It will soon be of more use than now."""
    starting = not hold.ready and not hold.useless
    return not hold.draining and (hold.phase is HoldPhase.PENDING or starting)


def _faulty(hold: HoldView) -> bool:
    return hold.batch_lost or hold.useless


def _fault(hold: HoldView) -> str:
    many = hold.lost_nodes
    lost = f", because it lost {many} node{'s' if many > 1 else ''}" if many else ""
    if hold.useless:
        return f"it has no WPG of one of its pools{lost}"
    if hold.batch_lost:
        return "the node of its batch script is gone, and nobody starts its agents again"
    return f"it lacks some of its WPGs{lost}"


def _still(successor: HoldView) -> str:
    if successor.phase is HoldPhase.PENDING:
        why = f" ({successor.pending_reason})" if successor.pending_reason else ""
        still = f"is still pending{why} and may start on the GPUs that it gives back"
    else:
        still = "is not ready yet"
    return f"hold {successor.id}, which replaces it, {still}"


def rest_until_us(failed_us: Sequence[int], *, first_us: int, longest_us: int) -> int:
    """Until when nothing is submitted after refusals and early ends: twice as long each time.

    ``failed_us``: instants of the failures since a hold last came up.
    """
    if not failed_us:
        return 0
    return max(failed_us) + min(first_us << min(len(failed_us) - 1, 30), longest_us)


def excluded(now_us: int, faults: Sequence[Fault], after: int, window_us: int) -> Mapping[str, int]:
    """Nodes that failed ``after`` times within ``window_us``, each left out so long after that."""
    until: dict[str, int] = {}
    for node in sorted({fault.node for fault in faults}):
        times = sorted(fault.at_us for fault in faults if fault.node == node)
        for first, last in zip(times, times[after - 1 :], strict=False):
            if last - first <= window_us:
                until[node] = last + window_us
    return {node: end for node, end in until.items() if now_us < end}
