"""Which images leave a tier that has no room: the coldest, and never the last complete copy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Tier(IntEnum):
    """Where an image may lie; a larger number is slower and larger."""

    HOST = 0
    NVME = 1
    DURABLE = 2


class How(StrEnum):
    """What becomes of an image that leaves a tier."""

    #: The same progress, or a later one, is complete elsewhere.
    DROP = "drop"
    #: It is copied to the next tier first.
    SPILL = "spill"


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredImage:
    """One complete image of a deployment, with every tier that has a copy of this progress."""

    id: str
    bytes: int
    tiers: frozenset[Tier]
    #: When it was last written or read, or, for a resident, now.
    last_use_us: int
    #: When it will be wanted, as far as one can tell; ``None``: unknown.
    next_use_us: int | None = None
    #: Somebody reads it, or will in a moment.
    pinned: bool = False
    #: Whether no later progress of the deployment is complete anywhere.
    newest: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """An image that leaves a tier."""

    id: str
    how: How
    bytes: int


def choose(
    images: Iterable[TieredImage],
    *,
    tier: Tier,
    needed_bytes: int,
    below_bytes: int = 0,
    now_us: int = 0,
) -> tuple[Eviction, ...]:
    """What to evict from ``tier``, in this order, to free at least ``needed_bytes`` there.

    First what costs least for the time that it is gone: an image is read back when it is wanted,
    and one without a copy below has to be written there before, which is as much again.

    Fewer bytes are freed if there is no more to evict. ``below_bytes``: room in the next tier,
    for images of which no other complete copy exists. Of images that are not needed for the
    others' sake none is evicted.
    """
    if needed_bytes <= 0:
        return ()
    here = [image for image in images if tier in image.tiers and not image.pinned]
    chosen: list[Eviction] = []
    freed = 0
    for image in sorted(here, key=lambda each: _warmth(each, tier, now_us)):
        if freed >= needed_bytes:
            break
        how = _way_out(image, tier)
        if how is How.SPILL:
            if image.bytes > below_bytes:
                continue
            below_bytes -= image.bytes
        freed += image.bytes
        chosen.append(Eviction(id=image.id, how=how, bytes=image.bytes))
    return _without_the_needless(chosen, freed - needed_bytes)


def coldest_first(
    images: Iterable[TieredImage], *, tier: Tier = Tier.HOST, now_us: int = 0
) -> Sequence[TieredImage]:
    """The order in which images leave."""
    return sorted(images, key=lambda each: _warmth(each, tier, now_us))


def next_use_us(*, last_us: int, gap_us: int | None, now_us: int) -> int:
    """When a deployment will be wanted again: one that comes round, after its usual time; one
    that is overdue or was wanted once, after as long as nobody has wanted it."""
    quiet = max(0, now_us - last_us)
    return last_us + gap_us if gap_us is not None and gap_us > quiet else now_us + quiet


def _way_out(image: TieredImage, tier: Tier) -> How:
    return How.DROP if len(image.tiers - {tier}) or not image.newest else How.SPILL


def _warmth(image: TieredImage, tier: Tier, now_us: int) -> tuple[bool, float, int, str]:
    """The coldest has the smallest; one that a later progress has replaced is colder than any.

    Of each byte, which is moved once or twice.
    """
    moves = 2 if _way_out(image, tier) is How.SPILL else 1
    gone = float("inf") if image.next_use_us is None else max(0, image.next_use_us - now_us)
    return image.newest, -gone / moves, image.last_use_us, image.id


def _without_the_needless(chosen: Sequence[Eviction], spare: int) -> tuple[Eviction, ...]:
    """A small cold image may turn out to be needless once a large one has to go as well; it is
    the warmer ones that are asked first, and a spill rather than a drop."""
    kept = list(chosen)
    for each in sorted(reversed(chosen), key=lambda each: each.how is How.DROP):
        if each.bytes <= spare:
            kept.remove(each)
            spare -= each.bytes
    return tuple(kept)
