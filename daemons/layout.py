"""Which WPGs a hold has, on which of its nodes, and what each is told to run."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.settings import Settings, WpgSettings
from plexrl_slurm.slurm_settings import Shape, in_turn, window
from plexrl_slurm.transport import messages as tm

#: The node of a hold without Slurm, and the first of its nodes if a WPG lies on several.
LOCALHOST = "localhost"


def local_nodes(settings: Settings) -> list[str]:
    """What counts as the nodes of a hold without Slurm: one agent each, all on this machine."""
    most = max((table.nodes for table in settings.wpgs), default=1)
    return [LOCALHOST, *(f"{LOCALHOST}-{number}" for number in range(2, most + 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgSlot:
    """One of the WPGs that every hold of the partition has."""

    #: ``train-0``, ``rollout-0``, ...
    name: str
    table: WpgSettings
    #: Which of the table's WPGs it is.
    index: int

    @property
    def pool(self) -> Pool:
        """Where it works."""
        return Pool(self.table.pool)

    @property
    def shape(self) -> Shape:
        """What it needs."""
        table = self.table
        return Shape(pool=table.place, gpus=table.gpus_per_node, nodes=table.nodes)

    @property
    def follows(self) -> bool:
        """Whether it has the GPUs of the training WPG that it takes turns with."""
        return bool(self.table.shared) and self.pool is Pool.ROLLOUT

    def leads(self, other: "WpgSlot") -> bool:
        """Whether ``other`` follows it."""
        mine, theirs = (self.table.shared, self.index), (other.table.shared, other.index)
        return other.follows and not self.follows and mine == theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node of a component of a hold: where one agent works."""

    hold: str
    component: int
    node: str


def in_order(places: Iterable[Place]) -> list[Place]:
    """By component, then as people count: ``n2`` before ``n10``."""
    return sorted(places, key=lambda place: (place.component, _counted(place.node), place.node))


def _counted(node: str) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", node)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The share of a WPG that one node has."""

    place: Place
    #: GPUs of the node, counted from 0.
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWpg:
    """A WPG of a hold that has its nodes."""

    wpg: Wpg
    slot: WpgSlot
    #: One for each of its nodes, in the order of its ranks.
    seats: tuple[Seat, ...]

    @property
    def id(self) -> WpgId:
        """Its name, in the whole partition."""
        return self.wpg.id

    @property
    def place(self) -> Place:
        """Where its first rank is."""
        return self.seats[0].place

    @property
    def places(self) -> tuple[Place, ...]:
        """All its nodes."""
        return tuple(seat.place for seat in self.seats)

    @property
    def nodes(self) -> str:
        """Their names, for the database and for people."""
        return ",".join(place.node for place in self.places)

    @property
    def devices(self) -> tuple[int, ...]:
        """Of its first node."""
        return self.seats[0].devices

    def config(self, number: int = 0) -> tm.WpgConfig:
        """What the agent of one of its nodes is told."""
        table, index = self.slot.table, self.slot.index
        cores: tuple[int, ...] = table.cores[index] if index < len(table.cores) else ()
        options: dict[str, Any] = dict(table.options)
        if self.wpg.second_slot:
            options["second_slot"] = True
        return tm.WpgConfig(
            name=self.id,
            engine=table.engine,
            world=table.gpus,
            gpus=table.gpus,
            options=options,
            cores=list(cores),
            devices=list(self.seats[number].devices),
            nodes=len(self.seats),
            number=number,
            group=(self.wpg.shares or self.id) if table.shared else "",
            awake_bytes=options.get("device_bytes", 0),
            residual_bytes=table.residual_bytes,
        )


def wpg_slots(settings: Settings) -> tuple[WpgSlot, ...]:
    """The WPGs of one hold, in the order of the settings file."""
    slots: list[WpgSlot] = []
    counts: dict[str, int] = {}
    for table in settings.wpgs:
        for index in range(table.count):
            number = counts.get(table.pool, 0)
            counts[table.pool] = number + 1
            slots.append(WpgSlot(name=f"{table.pool}-{number}", table=table, index=index))
    return tuple(slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A place and what it offers."""

    place: Place
    #: Of its component; ``None``: WPGs of any pool (a machine without Slurm).
    pool: str | None
    gpus: int


def lay_out(
    slots: Sequence[WpgSlot], rooms: Sequence[Room], *, taken: Iterable[str]
) -> tuple[HeldWpg, ...]:
    """Put the slots into rooms, those of most nodes and then the largest first, each into the
    first ones with room; give each a free name.

    What does not fit (the hold came with fewer nodes than it should have) is left out. A name is
    the slot's own if nobody has it, else the lowest free number of its pool.
    """
    used, names = dict.fromkeys(rooms, 0), set(taken)
    found: dict[str, HeldWpg] = {}
    for slot in _in_turn(slots):
        if slot.follows:
            continue
        fitting = [room for room in rooms if room.pool in (None, slot.table.place)]
        home = window(
            [room.place.component for room in fitting],
            [room.gpus - used[room] for room in fitting],
            slot.table.nodes,
            slot.table.gpus_per_node,
        )
        if home is None:
            continue
        seats = tuple(_seat(slot, fitting[at], used) for at in home)
        found[slot.name] = HeldWpg(
            wpg=_wpg(slot, _name(slot, names)),
            slot=slot,
            seats=seats,
        )
    for slot in slots:
        if slot.follows and (leader := _leader(slot, found.values())) is not None:
            found[slot.name] = _follower(slot, leader, _name(slot, names))
    return tuple(found[slot.name] for slot in slots if slot.name in found)


def follower_of(slot: WpgSlot, there: Iterable[HeldWpg], names: set[str]) -> HeldWpg | None:
    """``slot`` on the GPUs of its leader, if that is there, with a name that is added to these."""
    leader = _leader(slot, there)
    return None if leader is None else _follower(slot, leader, _name(slot, names))


def _leader(slot: WpgSlot, found: Iterable[HeldWpg]) -> HeldWpg | None:
    return next((held for held in found if held.slot.leads(slot)), None)


def _follower(slot: WpgSlot, leader: HeldWpg, name: WpgId) -> HeldWpg:
    """On the same GPUs, which count as the leader's."""
    wpg = Wpg(id=name, pool=slot.pool, gpus=0, shares=leader.id)
    return HeldWpg(wpg=wpg, slot=slot, seats=leader.seats)


def _wpg(slot: WpgSlot, name: WpgId) -> Wpg:
    two = slot.table.second_slot_bytes > 0
    return Wpg(id=name, pool=slot.pool, gpus=slot.table.gpus, second_slot=two)


def _in_turn(slots: Sequence[WpgSlot]) -> list[WpgSlot]:
    return [slots[at] for at in in_turn([slot.shape for slot in slots])]


def _seat(slot: WpgSlot, room: Room, used: dict[Room, int]) -> Seat:
    first = used.get(room, 0)
    used[room] = first + slot.table.gpus_per_node
    devices = tuple(range(first, used[room])) if room.pool is not None else ()
    return Seat(place=room.place, devices=devices)


def _name(slot: WpgSlot, taken: set[str]) -> WpgId:
    name, number = slot.name, 0
    while name in taken:
        name = f"{slot.table.pool}-{number}"
        number += 1
    taken.add(name)
    return WpgId(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A WPG as the database remembers it."""

    name: str
    slot: str
    component: int
    #: Several are separated by commas.
    node: str

    @property
    def nodes(self) -> list[str]:
        """In the order of its ranks."""
        return self.node.split(",")


def find_again(
    slots: Sequence[WpgSlot],
    rows: Sequence[Found],
    rooms: Mapping[tuple[int, str], Room],
) -> tuple[HeldWpg, ...]:
    """The layout that was made before; rows whose slot or node is gone are left out."""
    by_name = {slot.name: slot for slot in slots}
    known = [row for row in rows if row.slot in by_name]
    used: dict[Room, int] = {}
    found: list[HeldWpg] = []
    # The order in which the devices were given out.
    for at in in_turn([by_name[row.slot].shape for row in known]):
        row, slot = known[at], by_name[known[at].slot]
        if slot.follows:
            continue
        homes = [rooms.get((row.component, node)) for node in row.nodes]
        there = [room for room in homes if room is not None]
        if len(there) < len(homes) or len(there) != slot.table.nodes:
            continue
        found.append(
            HeldWpg(
                wpg=_wpg(slot, WpgId(row.name)),
                slot=slot,
                seats=tuple(_seat(slot, room, used) for room in there),
            )
        )
    for row in known:
        slot = by_name[row.slot]
        if slot.follows and (leader := _leader(slot, found)) is not None:
            found.append(_follower(slot, leader, WpgId(row.name)))
    return tuple(found)
