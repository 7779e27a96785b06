"""WPGs that take turns on the same GPUs: a *group* of a training WPG and a rollout WPG.

The first, the *leader*, owns the GPUs; the other names it and has none of its own. At most one
is awake: only that one has a resident, runs or moves state. The others sleep until a
:class:`Grant` has ended. Time of the GPUs is booked once, on the leader, whoever is awake.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from plexrl_slurm.core.books import Books
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.estimates import ewma
from plexrl_slurm.core.ids import CauseId, JobId, WpgId
from plexrl_slurm.core.lane import Lane, Tenant
from plexrl_slurm.core.ledger import DOWN, IDLE, Use
from plexrl_slurm.core.messages import Activity, Call, Charge, Grant, Granted

#: Expected duration of a grant before the first.
PRIOR_GRANT_US: Final = 1_000_000
#: After a grant that was refused (the memory is not free) the next is tried.
RETRY_US: Final = 5_000_000
#: Of a WPG whose ranks die whenever they are woken: twice as long each time, up to this.
LONGEST_RETRY_US: Final = 320_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A grant that has not ended."""

    order: Grant
    lane: Lane
    #: For whom the turn is taken: it is served first.
    tenant: Tenant
    payer: JobId
    start_us: int


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """Lanes on the same GPUs."""

    leader: Lane
    lanes: list[Lane]
    #: Who is awake; ``None``: nobody, or somebody is about to be.
    turn: Lane | None = None
    grant: Turn | None = None
    #: Counts grants, so that the end of a lost one is not taken for another's.
    number: int = 0
    grant_us: int = PRIOR_GRANT_US
    #: A grant was refused: the next is tried at this instant; why, and how often in a row.
    retry_us: int | None = None
    reason: str = ""
    refusals: int = 0
    #: Who was refused.
    refused: Lane | None = None
    #: By WPG, how often in a row its ranks died while they were woken.
    deadly: dict[WpgId, int] = field(default_factory=dict)

    def others(self, lane: Lane) -> Iterator[Lane]:
        """Those that ``lane`` shares with."""
        return (other for other in self.lanes if other is not lane)

    def use(self) -> Use:
        """What the GPUs do, for the ledger."""
        if self.grant is not None:
            return Use(activity=Activity.SWITCH, jobs=frozenset((self.grant.payer,)))
        if self.turn is not None:
            return self.turn.own_use()
        return IDLE if all(lane.up for lane in self.lanes) else DOWN

    def calls(self) -> Iterator[Call]:
        """What runs on the GPUs."""
        return iter(()) if self.turn is None else self.turn.calls()

    def account(self, cause: CauseId) -> list[Charge]:
        """Close the open stretches of lanes that now do something else; they have one clock."""
        held = [lane for lane in self.lanes if lane.meter is not None]
        at_us = max((lane.now_us for lane in held), default=0)
        out: list[Charge] = []
        for lane in held:
            lane.clamp(at_us)
            if lane.meter is not None:
                out += lane.meter.turn(lane.use(), at_us, lane.charged(), cause)
        return out

    def count(self) -> None:
        """What runs bears its share of the open stretch."""
        if self.leader.meter is not None:
            for call in self.calls():
                self.leader.meter.count(call)

    def look(self, now_us: int) -> None:
        """Whether it is time to try a refused grant again."""
        if self.retry_us is not None and self.retry_us <= now_us:
            self.retry_us = self.refused = None

    def allows(self, lane: Lane) -> bool:
        """Whether ``lane`` could have the GPUs now, if its time had come."""
        now_us = max(other.now_us for other in self.lanes)
        if self.refused is lane:
            return False
        room = lane.room_us is None or lane.room_us <= now_us
        return lane.up and not lane.draining and room and self.leader.wpg is not None


# -- facts ------------------------------------------------------------------------------------


def joined(books: Books, lane: Lane) -> None:
    """``lane`` is held from now on, and may share."""
    if lane.wpg is None:
        return
    leader = books.lane(lane.wpg.shares) if lane.wpg.shares else lane
    sharing = [
        each for each in books.lanes.values()
        if each.wpg is not None and each.wpg.shares == leader.id
    ]  # fmt: skip
    if not sharing:
        return
    if leader.group is None:
        leader.group = Group(leader=leader, lanes=[leader])
        leader.group.turn = leader if leader.resident is not None else None
    group = leader.group
    group.lanes = [leader, *sharing]
    for each in sharing:
        each.group = group


def left(group: Group, lane: Lane) -> Sequence[Lane]:
    """``lane`` is held no more; those that it shared with."""
    group.lanes = [other for other in group.lanes if other is not lane]
    group.deadly.pop(lane.id, None)
    lane.group = None
    if lane is group.leader:
        for other in group.lanes:
            other.group = None
    return group.lanes


def came_up(group: Group, lane: Lane, *, awake: bool) -> None:
    """A gang that was started anew sleeps; one that a new daemon finds may be awake."""
    if awake:
        group.turn, group.grant = lane, None
    elif group.turn is lane:
        group.turn = None


def went_down(group: Group, lane: Lane, reason: str) -> None:
    """Whoever was about to be awake may never be."""
    woken = group.grant is not None and group.grant.lane is lane
    if group.grant is not None or group.turn is lane:
        group.turn = group.grant = None
    group.retry_us = group.refused = None
    if woken:
        times = group.deadly[lane.id] = group.deadly.get(lane.id, 0) + 1
        wait_us = min(RETRY_US << min(times - 1, 10), LONGEST_RETRY_US)
        group.retry_us, group.refused = lane.now_us + wait_us, lane
        often = "" if times == 1 else f", {times} times in a row"
        group.reason = f"its ranks died while they were woken{often}: {reason}"


def granted(lane: Lane, event: Granted) -> None:
    """A grant has ended."""
    group = lane.group
    if group is None or group.grant is None or group.grant.order.number != event.number:
        return  # it was given up when a gang was lost
    taken, group.grant = group.grant, None
    group.turn = next((each for each in group.lanes if each.id == event.awake and each.up), None)
    if event.ok:
        group.grant_us = ewma(group.grant_us, lane.now_us - taken.start_us)
        group.refusals, group.reason = 0, ""
        group.deadly.pop(lane.id, None)
        if taken.tenant.key in lane.waiting and not lane.draining:
            lane.owed = taken.tenant
    else:
        group.refusals += 1
        group.retry_us, group.reason, group.refused = lane.now_us + RETRY_US, event.error, lane


# -- what the planner asks ----------------------------------------------------------------------


def rivals(lane: Lane) -> Sequence[Lane]:
    """Lanes with work that want the GPUs which ``lane`` has, or which nobody has."""
    group = lane.group
    if group is None:
        return ()
    return [other for other in group.others(lane) if other.waiting and group.allows(other)]


def waits_elsewhere(lane: Lane, job: JobId) -> bool:
    """Whether ``job`` waits for the GPUs of ``lane`` on another WPG of its group."""
    return any(
        head.call.job == job
        for other in rivals(lane)
        for tenant in other.waiting.values()
        if (head := tenant.head()) is not None
    )


def find(lane: Lane, key: str) -> Tenant:
    """A tenant of ``lane``, or of one that it shares with."""
    found = lane.tenants.get(key)
    if found is not None or lane.group is None:
        return lane.tenants[key]
    return next(each.tenants[key] for each in lane.group.lanes if key in each.tenants)


def turn_us(lane: Lane, costs: SwitchCosts) -> int:
    """What it costs ``lane`` to be awake, before it loads anything."""
    group = lane.group
    if group is None or group.turn is lane:
        return 0
    awake = group.turn
    dirty = None if awake is None else awake.resident
    if awake is None or dirty is None or not dirty.dirty:
        return group.grant_us
    return group.grant_us + costs.estimate_us(awake.id, dirty.image_bytes)


def take(group: Group, tenant: Tenant, payer: JobId, at_us: int, cause: CauseId) -> Grant:
    """The turn goes to the lane of ``tenant``; who had it has nothing on the device any more."""
    lane = next(each for each in group.lanes if each.tenants.get(tenant.key) is tenant)
    group.number += 1
    order = Grant(wpg=lane.id, number=group.number, cause=cause)
    group.turn = group.retry_us = group.refused = None
    group.grant = Turn(order=order, lane=lane, tenant=tenant, payer=payer, start_us=at_us)
    return order


# -- audit --------------------------------------------------------------------------------------


def complaints(group: Group) -> Iterator[str]:
    """Contradictions in one group."""
    names = " and ".join(lane.id for lane in group.lanes)
    for lane in group.lanes:
        acts = lane.resident is not None or lane.move is not None or bool(lane.running)
        if acts and group.turn is not lane:
            yield f"{lane.id} does something, and of {names} it is not the one awake"
        if lane.group is not group:
            yield f"{lane.id} has left {names}"
        if lane.wpg is not None and lane is not group.leader and lane.wpg.gpus:
            yield f"{lane.id} shares the GPUs of {group.leader.id} and has some of its own"
    if group.turn is not None and not group.turn.up:
        yield f"{group.turn.id} is awake and down"
    if group.grant is not None and (group.turn is not None or not group.grant.lane.up):
        yield f"{group.grant.lane.id} is getting the GPUs of {names}, which others have"
