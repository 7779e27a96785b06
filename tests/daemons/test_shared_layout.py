"""WPGs that share GPUs lie on the same devices, which are given out once."""

from dataclasses import replace
from pathlib import Path

from plexrl_slurm.daemons.layout import (
    Found,
    HeldWpg,
    Place,
    Room,
    WpgSlot,
    find_again,
    lay_out,
    wpg_slots,
)
from plexrl_slurm.settings import Settings, WpgSettings

TRAIN = WpgSettings(
    pool="train", engine="fake_train", gpus=2, count=2, shared="both", residual_bytes=7,
    options={"device_bytes": 70},
)  # fmt: skip
ROLLOUT = replace(TRAIN, pool="rollout", engine="fake_sample", residual_bytes=9)
ALONE = WpgSettings(pool="train", engine="fake_train", gpus=1)


def slots(*tables: WpgSettings) -> tuple[WpgSlot, ...]:
    return wpg_slots(
        Settings(
            partition="p", state_dir=Path(), database_url="", host_dir=Path(), host_bytes=1,
            wpgs=tables,
        )
    )  # fmt: skip


def room(node: str, pool: str | None, gpus: int, component: int = 0) -> Room:
    place = Place(hold="h1", component=component, node=node)
    return Room(place=place, pool=pool, gpus=gpus)


def shown(layout: tuple[HeldWpg, ...]) -> list[tuple[str, str, tuple[int, ...], int, str | None]]:
    return [
        (held.id, held.place.node, held.devices, held.wpg.gpus, held.wpg.shares) for held in layout
    ]


EXPECTED = [
    ("rollout-0", "n1", (0, 1), 0, "train-0"),
    ("rollout-1", "n1", (2, 3), 0, "train-1"),
    ("train-0", "n1", (0, 1), 2, None),
    ("train-1", "n1", (2, 3), 2, None),
    ("train-2", "n2", (0,), 1, None),
]


def test_a_pair_lies_on_the_same_gpus_of_a_shared_component() -> None:
    rooms = [room("n1", "shared", 4), room("n2", "train", 4, component=1)]
    found = lay_out(slots(ROLLOUT, TRAIN, ALONE), rooms, taken=())
    assert shown(found) == EXPECTED
    configs = [held.config() for held in found]
    assert [config.group for config in configs] == ["train-0", "train-1", "train-0", "train-1", ""]
    assert [config.awake_bytes for config in configs] == [70, 70, 70, 70, 0]
    assert [config.residual_bytes for config in configs] == [9, 9, 7, 7, 0]


def test_a_restart_finds_the_same_pairs_again() -> None:
    rooms = {
        (0, "n1"): room("n1", "shared", 4),
        (1, "n2"): room("n2", "train", 4, component=1),
    }
    rows = [
        Found(name=name, slot=name, component=0 if node == "n1" else 1, node=node)
        for name, node, *_ in EXPECTED
    ]
    found = find_again(slots(ROLLOUT, TRAIN, ALONE), rows, rooms)
    assert sorted(shown(found)) == sorted(EXPECTED)


def test_one_machine_without_slurm_has_room_for_the_pair_once() -> None:
    found = lay_out(slots(TRAIN, ROLLOUT), [room("localhost", None, 4)], taken=())
    assert [held.id for held in found] == ["train-0", "train-1", "rollout-0", "rollout-1"]


def test_a_pair_is_left_out_as_a_whole() -> None:
    found = lay_out(slots(TRAIN, ROLLOUT), [room("n1", "shared", 3)], taken=())
    assert [held.id for held in found] == ["train-0", "rollout-0"]


def test_names_that_another_hold_has_are_not_used() -> None:
    found = lay_out(
        slots(TRAIN, ROLLOUT), [room("n1", "shared", 2)], taken=("train-0", "rollout-0")
    )
    assert [(held.id, held.wpg.shares) for held in found] == [
        ("train-1", None),
        ("rollout-1", "train-1"),
    ]
