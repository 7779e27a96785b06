"""What leaves a tier without room."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.tiers import (
    Eviction,
    How,
    Tier,
    TieredImage,
    choose,
    coldest_first,
    next_use_us,
)


def image(name: str, size: int = 10, *more: Tier, **facts: int | bool | None) -> TieredImage:
    values: dict[str, object] = {"last_use_us": 0, "next_use_us": None}
    return TieredImage(
        id=name,
        bytes=size,
        tiers=frozenset({Tier.HOST, *more}),
        **(values | facts),  # type: ignore[arg-type]
    )


def names(found: tuple[Eviction, ...]) -> list[str]:
    return [each.id for each in found]


@st.composite
def scenes(draw: st.DrawFn) -> list[TieredImage]:
    return [
        TieredImage(
            id=f"d{number}",
            bytes=draw(st.integers(1, 50)),
            tiers=draw(st.frozensets(st.sampled_from(Tier), min_size=1)),
            last_use_us=draw(st.integers(0, 9)),
            next_use_us=draw(st.none() | st.integers(0, 20)),
            pinned=draw(st.booleans()),
            newest=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 8)))
    ]


SIZES = st.integers(0, 200)
SOURCES = st.sampled_from([Tier.HOST, Tier.NVME])


@given(scenes(), SIZES, SIZES, SOURCES)
def test_the_last_complete_copy_is_never_dropped(
    images: list[TieredImage], needed: int, below: int, tier: Tier
) -> None:
    by_name = {each.id: each for each in images}
    for out in choose(images, tier=tier, needed_bytes=needed, below_bytes=below):
        gone = by_name[out.id]
        assert out.how is How.SPILL or not gone.newest or gone.tiers - {tier}


@given(scenes(), SIZES, SIZES, SOURCES)
def test_only_what_is_there_and_free_leaves_and_once(
    images: list[TieredImage], needed: int, below: int, tier: Tier
) -> None:
    found = choose(images, tier=tier, needed_bytes=needed, below_bytes=below)
    free = {each.id for each in images if tier in each.tiers and not each.pinned}
    assert len(set(names(found))) == len(found) and set(names(found)) <= free


@given(scenes(), SIZES, SIZES, SOURCES)
def test_what_is_spilled_has_room_below(
    images: list[TieredImage], needed: int, below: int, tier: Tier
) -> None:
    found = choose(images, tier=tier, needed_bytes=needed, below_bytes=below)
    assert sum(each.bytes for each in found if each.how is How.SPILL) <= below


@given(scenes(), SIZES, SOURCES)
def test_enough_leaves_where_that_is_possible_and_nothing_in_vain(
    images: list[TieredImage], needed: int, tier: Tier
) -> None:
    found = choose(images, tier=tier, needed_bytes=needed, below_bytes=10**6)
    possible = sum(each.bytes for each in images if tier in each.tiers and not each.pinned)
    freed = sum(each.bytes for each in found)
    assert freed >= min(needed, possible)
    if needed <= possible:
        assert all(freed - each.bytes < needed for each in found)


@given(scenes(), SIZES, SIZES, SOURCES)
def test_the_order_in_which_images_are_listed_does_not_matter(
    images: list[TieredImage], needed: int, below: int, tier: Tier
) -> None:
    found = choose(images, tier=tier, needed_bytes=needed, below_bytes=below)
    turned = choose(images[::-1], tier=tier, needed_bytes=needed, below_bytes=below)
    assert turned == found


@given(scenes())
def test_nothing_leaves_a_tier_with_room(images: list[TieredImage]) -> None:
    assert choose(images, tier=Tier.HOST, needed_bytes=0, below_bytes=10**6) == ()


def test_what_is_wanted_last_leaves_first_and_what_is_unknown_before_it() -> None:
    images = [image("soon", next_use_us=5), image("late", next_use_us=9), image("never")]
    assert names(choose(images, tier=Tier.HOST, needed_bytes=20, below_bytes=99)) == [
        "never",
        "late",
    ]
    assert [each.id for each in coldest_first(images)] == ["never", "late", "soon"]


def test_what_need_not_be_written_leaves_before_what_is_wanted_a_little_later() -> None:
    """One that is written first and then read back costs twice as much, for the same room."""
    copied = image("copied", 10, Tier.NVME, next_use_us=1010)
    for later, first in ((1019, "copied"), (1021, "alone")):
        images = [copied, image("alone", next_use_us=later)]
        found = choose(images, tier=Tier.HOST, needed_bytes=1, below_bytes=99, now_us=1000)
        assert names(found) == [first]
        order = coldest_first(images, now_us=1000)
        assert order[0].id == first


def test_what_a_later_image_has_replaced_leaves_before_all_others() -> None:
    images = [image("cold"), image("replaced", newest=False, next_use_us=1)]
    found = choose(images, tier=Tier.HOST, needed_bytes=1)
    assert found == (Eviction(id="replaced", how=How.DROP, bytes=10),)


def test_an_image_with_a_copy_below_needs_no_room_there() -> None:
    images = [image("alone", last_use_us=1), image("copied", 10, Tier.NVME, last_use_us=2)]
    assert names(choose(images, tier=Tier.HOST, needed_bytes=10)) == ["copied"]


def test_who_comes_round_is_expected_in_time_and_who_is_overdue_later_and_later() -> None:
    assert next_use_us(last_us=100, gap_us=50, now_us=120) == 150
    assert next_use_us(last_us=100, gap_us=50, now_us=180) == 260
    assert next_use_us(last_us=100, gap_us=None, now_us=110) == 120
