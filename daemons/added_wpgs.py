"""WPGs that the settings got after a hold was made: into it where it has room, or else into the
hold that takes its place.

On Slurm a hold has what Slurm gave it, so another one replaces it. The machine of a local hold has
room for whatever the settings say, and its agents start what they are told.
"""

from collections.abc import Iterable, Mapping, Sequence

from plexrl_slurm.daemons.layout import HeldWpg, Room, WpgSlot, follower_of, lay_out


def added(
    slots: Sequence[WpgSlot],
    ever: Iterable[str],
    there: Sequence[HeldWpg],
    rooms: Mapping[object, Room],
    *,
    taken: Iterable[str],
) -> tuple[HeldWpg, ...]:
    """Of a local hold: what it gets besides what is ``there``; ``ever``: slots that it has had."""
    known, names = set(ever), {*taken, *(held.id for held in there)}
    new = [slot for slot in slots if slot.name not in known]
    found = list(lay_out(new, list(rooms.values()), taken=names))
    names |= {held.id for held in found}
    laid = {held.slot.name for held in found}
    for slot in new:
        if slot.name not in laid and (held := follower_of(slot, there, names)) is not None:
            found.append(held)
    return tuple(found)


def lacking(
    slots: Sequence[WpgSlot], ever: Iterable[str], there: Iterable[HeldWpg]
) -> tuple[str, ...]:
    """Slots that the hold was made without and has not got since."""
    known = {*ever, *(held.slot.name for held in there)}
    return tuple(slot.name for slot in slots if slot.name not in known)


def why_lacking(hold: str, lacks: Sequence[str], *, local: bool) -> str:
    """One sentence, or "" if nothing is lacking."""
    if not lacks:
        return ""
    what = f"hold {hold} was made before the settings had WPG {', '.join(lacks)}"
    if local:
        return f"{what}, and its agents have no room for it: run `plexrl partition down`, then `up`"
    return f"{what}: it is replaced once Slurm has started another hold (see `plexrl sinfo`)"
