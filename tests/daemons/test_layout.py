"""Where the WPGs of a hold lie, what they are called, and how a restart finds them again."""

from pathlib import Path

from plexrl_slurm.core.messages import Pool
from plexrl_slurm.daemons.layout import (
    LOCALHOST,
    Found,
    HeldWpg,
    Place,
    Room,
    WpgSlot,
    find_again,
    in_order,
    lay_out,
    wpg_slots,
)
from plexrl_slurm.settings import Settings, WpgSettings


def slots(*tables: tuple[str, int, int], nodes: int = 1) -> tuple[WpgSlot, ...]:
    """``(pool, gpus, count)`` each; training WPGs lie on ``nodes``."""
    engines = {"train": "fake_train", "rollout": "fake_sample"}
    return wpg_slots(
        Settings(
            partition="p",
            state_dir=Path(),
            database_url="",
            host_dir=Path(),
            host_bytes=1,
            wpgs=tuple(
                WpgSettings(
                    pool=pool,
                    engine=engines[pool],
                    gpus=gpus,
                    count=count,
                    nodes=nodes if pool == "train" else 1,
                )
                for pool, gpus, count in tables
            ),
        )
    )


def room(component: int, node: str, pool: Pool | None, gpus: int) -> Room:
    place = Place(hold="h1", component=component, node=node)
    return Room(place=place, pool=pool, gpus=gpus)


def shown(layout: tuple[HeldWpg, ...]) -> list[tuple[str, str, str, tuple[int, ...]]]:
    return [(held.id, held.slot.name, held.place.node, held.devices) for held in layout]


def test_wpgs_go_to_the_nodes_of_their_pool_and_have_gpus_of_their_own() -> None:
    rooms = [room(0, "n1", Pool.TRAIN, 4), room(1, "n1", Pool.ROLLOUT, 2)]
    found = lay_out(slots(("train", 2, 2), ("rollout", 1, 2)), rooms, taken=())
    assert shown(found) == [
        ("train-0", "train-0", "n1", (0, 1)),
        ("train-1", "train-1", "n1", (2, 3)),
        ("rollout-0", "rollout-0", "n1", (0,)),
        ("rollout-1", "rollout-1", "n1", (1,)),
    ]
    assert found[0].config().devices == [0, 1] and found[0].config().world == 2


def test_the_largest_find_their_place_first() -> None:
    rooms = [room(0, "n1", Pool.TRAIN, 4), room(0, "n2", Pool.TRAIN, 2)]
    found = lay_out(slots(("train", 2, 1), ("train", 4, 1)), rooms, taken=())
    assert shown(found) == [
        ("train-0", "train-0", "n2", (0, 1)),
        ("train-1", "train-1", "n1", (0, 1, 2, 3)),
    ]


def test_names_that_are_taken_are_passed_over_and_the_lowest_free_number_is_used() -> None:
    rooms = [room(0, "n1", Pool.TRAIN, 2)]
    found = lay_out(slots(("train", 1, 2)), rooms, taken={"train-0", "train-2"})
    assert [held.id for held in found] == ["train-1", "train-3"] or [held.id for held in found] == [
        "train-3",
        "train-1",
    ]
    assert [held.slot.name for held in found] == ["train-0", "train-1"]


def test_a_hold_that_came_with_fewer_nodes_has_fewer_wpgs() -> None:
    found = lay_out(slots(("train", 4, 2)), [room(0, "n1", Pool.TRAIN, 4)], taken=())
    assert [held.id for held in found] == ["train-0"]


def test_without_slurm_all_pools_share_the_machine_and_no_gpu_is_named() -> None:
    rooms = [room(0, LOCALHOST, None, 2)]
    found = lay_out(slots(("train", 1, 1), ("rollout", 1, 1)), rooms, taken=())
    assert shown(found) == [
        ("train-0", "train-0", LOCALHOST, ()),
        ("rollout-0", "rollout-0", LOCALHOST, ()),
    ]


def test_a_restart_finds_the_same_layout() -> None:
    wanted = slots(("train", 1, 2), ("train", 2, 1), ("rollout", 1, 1))
    rooms = [room(0, "n1", Pool.TRAIN, 4), room(1, "n2", Pool.ROLLOUT, 1)]
    made = lay_out(wanted, rooms, taken={"train-1"})
    rows = [
        Found(
            name=held.id,
            slot=held.slot.name,
            component=held.place.component,
            node=held.place.node,
        )
        for held in made
    ]
    by_place = {(each.place.component, each.place.node): each for each in rooms}
    again = find_again(wanted, rows, by_place)
    assert sorted(again, key=lambda held: held.id) == sorted(made, key=lambda held: held.id)


def test_what_is_no_longer_configured_is_not_found_again() -> None:
    rows = [Found(name="train-0", slot="train-0", component=0, node="n1")]
    rooms = {(0, "n1"): room(0, "n1", Pool.TRAIN, 4)}
    assert find_again(slots(("rollout", 1, 1)), rows, rooms) == ()
    assert find_again(slots(("train", 1, 1)), rows, {}) == ()


def test_a_wpg_of_several_nodes_has_neighbours_and_as_many_gpus_on_each() -> None:
    rooms = [
        *(room(0, f"n{n}", Pool.TRAIN, 4) for n in (1, 2, 3)),
        room(1, "n9", Pool.ROLLOUT, 1),
    ]
    found = lay_out(slots(("train", 6, 1), ("rollout", 1, 1), nodes=2), rooms, taken=())
    assert [(held.nodes, held.wpg.gpus) for held in found] == [("n1,n2", 6), ("n9", 1)]
    configs = [found[0].config(number) for number in (0, 1)]
    assert [(c.world, c.gpus, list(c.ranks), c.devices) for c in configs] == [
        (6, 6, [0, 1, 2], [0, 1, 2]),
        (6, 6, [3, 4, 5], [0, 1, 2]),
    ]


def test_neighbours_are_of_one_component() -> None:
    rooms = [room(0, "n1", Pool.TRAIN, 2), room(1, "n2", Pool.TRAIN, 2)]
    assert lay_out(slots(("train", 4, 1), nodes=2), rooms, taken=()) == ()


def test_nodes_are_neighbours_as_people_count_them() -> None:
    places = [Place(hold="h1", component=c, node=n) for c, n in ((1, "a1"), (0, "n10"), (0, "n2"))]
    assert [place.node for place in in_order(places)] == ["n2", "n10", "a1"]


def test_a_restart_finds_the_same_neighbours_and_nothing_of_a_lost_one() -> None:
    wanted = slots(("train", 4, 2), nodes=2)
    rooms = [room(0, f"n{n}", Pool.TRAIN, 4) for n in (1, 2)]
    made = lay_out(wanted, rooms, taken=())
    assert [held.devices for held in made] == [(0, 1), (2, 3)]
    rows = [Found(name=held.id, slot=held.slot.name, component=0, node=held.nodes) for held in made]
    by_place = {(0, each.place.node): each for each in rooms}
    assert find_again(wanted, rows, by_place) == made
    del by_place[0, "n2"]
    assert find_again(wanted, rows, by_place) == ()
    assert find_again(slots(("train", 4, 2)), rows, by_place) == ()
