"""The WPGs of live holds: in when Slurm gives a hold its nodes, out when it takes one away."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.core.holding import Fault, HoldPhase
from plexrl_slurm.core.ids import CauseId, SlurmId, WpgId
from plexrl_slurm.core.messages import WpgDown, WpgHeld, WpgReleased
from plexrl_slurm.daemons.added_wpgs import added, lacking
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.layout import HeldWpg, Place, Room, local_nodes, wpg_slots
from plexrl_slurm.daemons.moves import Mover
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.db import holds as rows
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.port import ENDED, JobStatus

log = logging.getLogger(__name__)


#: A limit that Slurm took and does not show after so long was not raised.
EXTEND_US = 60_000_000
#: Slurm requeues the components of a hold one by one; one that it ends it ends in fewer looks.
TORN_LOOKS = 5


@dataclass(slots=True, eq=False)
class LiveHold:
    """A hold that has not ended."""

    id: str
    slurm_id: SlurmId
    submitted_us: int
    replaces: str = ""
    running_us: int | None = None
    #: Up to when it is booked, if Slurm has requeued it: Slurm cuts its instants to seconds.
    closed_us: int = 0
    #: How often Slurm has requeued it.
    restarts: int = 0
    limit_end_us: int | None = None
    draining: bool = False
    #: Since when it is being given back.
    releasing_us: int | None = None
    cancelled: bool = False
    wpgs: dict[WpgId, HeldWpg] = field(default_factory=dict)
    places: set[Place] = field(default_factory=set)
    batch_node: str = ""
    lost_nodes: int = 0
    #: Its limit when Slurm took a longer one, which it does not show yet, and when that was.
    extending_from_us: int | None = None
    extended_us: int = 0
    extend_refused: bool = False
    idle_since_us: int | None = None
    #: Since when all who live on it have had a place on the others.
    vacant_since_us: int | None = None
    #: All its WPGs have been up.
    came_up: bool = False
    #: Slurm's, or why it drains or waits.
    reason: str = ""
    unknown: int = 0
    #: WPGs that it may lack once it runs, because the settings got them after it was made.
    lacks: tuple[str, ...] = ()
    #: Looks in a row that found it requeued without all of its components.
    torn: int = 0

    def is_torn(self, status: JobStatus, jobs: Mapping[SlurmId, JobStatus]) -> bool:
        """Whether Slurm will never start it again, because it has ended a component for good.

        It does so if the first component has one node, and another, which has more, loses one.
        """
        others = [jobs.get(each) for each in status.components if each != self.slurm_id]
        ended = any(each is None or each.state in ENDED for each in others)
        self.torn = self.torn + 1 if status.restarts and ended else 0
        return self.torn >= TORN_LOOKS

    def see_extension(self, at_us: int) -> None:
        """Whether Slurm's answer of that instant shows the limit that it was asked for."""
        if self.extending_from_us is None:
            return
        if self.limit_end_us != self.extending_from_us:
            self.extending_from_us = None
        elif at_us - self.extended_us > EXTEND_US:
            self.extending_from_us, self.extend_refused = None, True

    @property
    def missing(self) -> tuple[str, ...]:
        """WPGs that the settings got after it was made, and that it has no room for."""
        return self.lacks if self.running_us is not None else ()

    @property
    def phase(self) -> HoldPhase:
        """For the decision."""
        if self.releasing_us is not None:
            return HoldPhase.ENDING
        return HoldPhase.PENDING if self.running_us is None else HoldPhase.RUNNING

    @property
    def batch_lost(self) -> bool:
        """Whether the node of its batch script is gone."""
        nodes = {place.node for place in self.places if place.component == 0}
        return self.running_us is not None and self.batch_node not in nodes


class HeldWpgs:
    """Tells the books, the core, the placer, the agents' hub and the mover of every change."""

    def __init__(self, parts: Parts, hub: AgentHub, mover: Mover) -> None:
        self.slots = wpg_slots(parts.settings)
        #: Of nodes, oldest first.
        self.faults: list[Fault] = []
        hub.on_fault = self.note_fault
        self._parts, self._hub, self._mover, self._settings = parts, hub, mover, parts.settings

    def is_whole(self, hold: LiveHold) -> bool:
        """Whether it has every WPG that it was made for."""
        return len(hold.wpgs) == len(self.slots)

    def places_of(self, hold: LiveHold, status: JobStatus) -> set[Place] | None:
        """Where the hold has nodes; ``None`` while not every component is known."""
        if self._settings.backend == "local":
            nodes = local_nodes(self._settings)
            return {Place(hold=hold.id, component=0, node=node) for node in nodes}
        found: set[Place] = set()
        for index, each in enumerate(status.components or (hold.slurm_id,)):
            component = status if each == hold.slurm_id else self._parts.watch.jobs.get(each)
            if component is None:
                return None
            found |= {Place(hold=hold.id, component=index, node=n) for n in component.nodes}
        return found

    def room(self, hold: LiveHold, component: int, node: str) -> Room | None:
        """What a node offers; ``None``: its component is no longer configured."""
        place = Place(hold=hold.id, component=component, node=node)
        if self._settings.backend == "local":
            gpus = sum(slot.table.gpus for slot in self.slots if not slot.follows)
            return Room(place=place, pool=None, gpus=gpus)
        if component >= len(self._settings.hold.components):
            return None
        table = self._settings.hold.components[component]
        return Room(place=place, pool=table.pool, gpus=table.gpus_per_node)

    def add(self, hold: LiveHold, layout: Iterable[HeldWpg], held_us: Mapping[WpgId, int]) -> None:
        """The hold has these WPGs, each booked from the instant on that is given."""
        for held in layout:
            hold.wpgs[held.id] = held
            self._parts.books.holds[held.id] = hold.id
            self._parts.placer.wpgs[held.id] = held
            self._parts.shell.feed(
                WpgHeld(at_us=held_us[held.id], cause=CauseId(f"hold {hold.id}"), wpg=held.wpg)
            )

    def add_new(
        self, hold: LiveHold, layout: tuple[HeldWpg, ...], ever: set[str]
    ) -> tuple[HeldWpg, ...]:
        """What the settings have had only since the hold was made, as far as it takes that;
        ``ever``: slots that it has had."""
        found: tuple[HeldWpg, ...] = ()
        if self._settings.backend == "local":
            rooms = {each: self.room(hold, each.component, each.node) for each in hold.places}
            found = added(
                self.slots,
                ever,
                layout,
                {place: room for place, room in rooms.items() if room is not None},
                taken=self._parts.placer.wpgs,
            )
        if found:
            since_us = max(now_us(), hold.closed_us)
            held_us = {h.id: max(since_us, self._parts.shell.core.clock_us(h.id)) for h in found}
            say(log, "hold_gets_wpgs", hold=hold.id, wpgs=sorted(held_us))
            self._parts.writer.add(rows.hold_wpgs, hold.id, stays_of(found, held_us))
            self.add(hold, found, held_us)
        hold.lacks = lacking(self.slots, ever, found)
        if hold.lacks:
            say(log, "hold_lacks_wpgs", hold=hold.id, lacks=hold.lacks)
        return found

    def lose_place(self, hold: LiveHold, place: Place, reason: str) -> None:
        """A node is lost: its agent is fenced off, and what lived there is rebuilt elsewhere."""
        say(log, "node_lost", hold=hold.id, node=place.node, reason=reason)
        hold.places.discard(place)
        hold.lost_nodes += 1
        self.note_fault(place.node, reason)
        self.drop_place(hold, place, now_us(), reason)
        self._mover.resettle(reason)

    def note_fault(self, node: str, reason: str) -> None:
        """A node that fails often is left out for a while."""
        at_us = now_us()
        self.faults.append(Fault(node=node, at_us=at_us, reason=reason))
        self._parts.writer.add(_fault, self._settings.partition, node, reason, at_us)

    def drop_place(self, hold: LiveHold, place: Place, at_us: int, reason: str) -> None:
        """The hold does not have this node any more."""
        self._hub.forget_place(place, reason)
        for wpg in [wpg for wpg, held in hold.wpgs.items() if place in held.places]:
            del hold.wpgs[wpg]
            self._release_wpg(hold, wpg, at_us, reason)

    def _release_wpg(self, hold: LiveHold, wpg: WpgId, at_us: int, reason: str) -> None:
        shell, cause = self._parts.shell, CauseId(reason)
        end_us = max(at_us, shell.core.clock_us(wpg))
        shell.feed(WpgDown(at_us=end_us, cause=cause, wpg=wpg, reason=reason, blame=False))
        shell.feed(WpgReleased(at_us=end_us, cause=cause, wpg=wpg, reason=reason))
        hold.closed_us = max(hold.closed_us, end_us)
        self._parts.writer.add(_release, hold.id, wpg, end_us)
        self._parts.placer.wpgs.pop(wpg, None)
        self._parts.placer.draining.discard(wpg)
        self._mover.gone(wpg)

    def drop_all(self, hold: LiveHold, at_us: int, reason: str) -> None:
        """The hold has no node any more; ``at_us`` 0: nobody knows since when."""
        for place in list(hold.places):
            self.drop_place(hold, place, at_us, reason)
        hold.places.clear()
        hold.idle_since_us = None


def _release(session: Any, hold: str, wpg: WpgId, at_us: int) -> None:
    try:
        rows.release_wpg(session, hold, wpg, now_us=at_us)
    except NotFound:
        log.warning("WPG %s of hold %s was released before", wpg, hold)


def _fault(session: Any, partition: str, node: str, reason: str, at_us: int) -> None:
    rows.node_failed(session, partition=partition, node=node, reason=reason, now_us=at_us)


def stays_of(layout: Sequence[HeldWpg], held_us: Mapping[WpgId, int]) -> list[rows.Stay]:
    """What is written of WPGs that are held from these instants on."""
    return [
        rows.Stay(
            wpg=held.wpg,
            held_us=held_us[held.id],
            component=held.place.component,
            node=held.nodes,
            slot=held.slot.name,
        )
        for held in layout
    ]
