"""Which WPGs a hold has, on which of its nodes, and what each is told to run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.settings import Settings, WpgSettings
from plexrl_slurm.transport import messages as tm

#: The node of a hold without Slurm.
LOCALHOST = "localhost"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node of a component of a hold: where one agent works."""

    hold: str
    component: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWpg:
    """A WPG of a hold that has its nodes."""

    wpg: Wpg
    slot: WpgSlot
    place: Place
    #: GPUs of the node, counted from 0.
    devices: tuple[int, ...]

    @property
    def id(self) -> WpgId:
        """Its name, in the whole partition."""
        return self.wpg.id

    def config(self) -> tm.WpgConfig:
        """What its agent is told."""
        table, index = self.slot.table, self.slot.index
        cores: tuple[int, ...] = table.cores[index] if index < len(table.cores) else ()
        options: dict[str, Any] = dict(table.options)
        return tm.WpgConfig(
            name=self.id,
            engine=table.engine,
            world=table.gpus,
            gpus=table.gpus,
            options=options,
            cores=list(cores),
            devices=list(self.devices),
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
    #: ``None``: WPGs of any pool (a machine without Slurm).
    pool: Pool | None
    gpus: int


def lay_out(
    slots: Sequence[WpgSlot], rooms: Sequence[Room], *, taken: Iterable[str]
) -> tuple[HeldWpg, ...]:
    """Put the slots into rooms, largest first into the first with room; give each a free name.

    What does not fit (the hold came with fewer nodes than it should have) is left out. A name is
    the slot's own if nobody has it, else the lowest free number of its pool.
    """
    used, names = dict.fromkeys(rooms, 0), set(taken)
    found: dict[str, HeldWpg] = {}
    for slot in sorted(slots, key=lambda slot: -slot.table.gpus):
        gpus = slot.table.gpus
        home = next(
            (
                room
                for room in rooms
                if room.pool in (None, slot.pool) and used[room] + gpus <= room.gpus
            ),
            None,
        )
        if home is None:
            continue
        devices = tuple(range(used[home], used[home] + gpus))
        used[home] += gpus
        found[slot.name] = HeldWpg(
            wpg=Wpg(id=_name(slot, names), pool=slot.pool, gpus=gpus),
            slot=slot,
            place=home.place,
            devices=devices if home.pool is not None else (),
        )
    return tuple(found[slot.name] for slot in slots if slot.name in found)


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
    node: str


def find_again(
    slots: Sequence[WpgSlot],
    hold: str,
    rows: Sequence[Found],
    rooms: Mapping[tuple[int, str], Room],
) -> tuple[HeldWpg, ...]:
    """The layout that was made before; rows whose slot or node is gone are left out."""
    by_name = {slot.name: slot for slot in slots}
    used: dict[tuple[int, str], int] = {}
    found = []
    # The order in which the devices were given out.
    for row in sorted(rows, key=lambda row: -_gpus(by_name, row)):
        slot = by_name.get(row.slot)
        place = Place(hold=hold, component=row.component, node=row.node)
        room = rooms.get((row.component, row.node))
        if slot is None or room is None:
            continue
        first = used.get((row.component, row.node), 0)
        used[row.component, row.node] = first + slot.table.gpus
        devices = tuple(range(first, first + slot.table.gpus))
        found.append(
            HeldWpg(
                wpg=Wpg(id=WpgId(row.name), pool=slot.pool, gpus=slot.table.gpus),
                slot=slot,
                place=place,
                devices=devices if room.pool is not None else (),
            )
        )
    return tuple(found)


def _gpus(slots: Mapping[str, WpgSlot], row: Found) -> int:
    slot = slots.get(row.slot)
    return slot.table.gpus if slot is not None else 0
