"""Shares of images on two nodes: whatever ends when, an image stays that both nodes have."""

import itertools
from pathlib import Path

import pytest

from plexrl_slurm.memory.part_images import PartImages
from plexrl_slurm.memory.slab import SlabHeader, SlabTensor
from tests.memory.test_slab import write

OLD, NEW = (3, 0), (5, 0)


def part(folder: Path, number: int) -> PartImages:
    return PartImages(folder / str(number), world=2, ranks=range(number, number + 1))


def save(store: PartImages, progress: tuple[int, int], *, deployment: str = "a") -> int:
    """What the ranks of one node and its agent do."""
    slot = store.begin()
    for rank, path in zip(store.ranks, store.paths(slot), strict=True):
        header = SlabHeader(
            deployment=deployment,
            progress=progress,
            rank=rank,
            world=store.whole,
            architecture="tiny",
            tensors=(SlabTensor("t", "float32", (2,), 8),),
        )
        write(path, header, progress[0])
    store.prepare(slot, deployment=deployment, progress=progress)
    return slot


def progresses(store: PartImages) -> set[tuple[int, int]]:
    return {held.progress for held in store.every()}


def test_an_image_that_is_only_here_takes_no_place_of_the_older_one(tmp_path: Path) -> None:
    store = part(tmp_path, 0)
    first = save(store, OLD)
    assert store.find("a") is None, "nobody has said that the other node has it"
    assert store.settle("a", OLD)
    second = save(store, NEW)
    found, waiting = store.find("a"), store.find_at("a", NEW)
    assert found is not None and (found.progress, found.slot) == (OLD, first)
    assert waiting is not None and waiting.slot == second
    assert store.begin() not in (first, second)


def test_the_older_image_goes_when_every_node_has_the_new_one(tmp_path: Path) -> None:
    store = part(tmp_path, 1)
    first = save(store, OLD)
    store.settle("a", OLD)
    save(store, NEW)
    assert store.settle("a", NEW)
    assert progresses(store) == {NEW}
    assert store.next_slot() == first


def test_a_new_image_that_another_node_lacks_goes_and_the_older_one_stays(tmp_path: Path) -> None:
    store = part(tmp_path, 1)
    save(store, OLD)
    store.settle("a", OLD)
    second = save(store, NEW)
    assert store.settle("a", OLD)
    assert progresses(store) == {OLD}
    assert store.next_slot() == second
    assert not store.settle("a", None)
    assert progresses(store) == set()


def test_what_an_earlier_agent_left_is_all_found_again(tmp_path: Path) -> None:
    store = part(tmp_path, 1)
    for progress in (OLD, NEW):
        save(store, progress)
    save(store, OLD, deployment="b")
    torn = store.paths(store.begin())[0]
    torn.write_bytes(b"half")
    again = part(tmp_path, 1)
    found = {(held.deployment, held.progress) for held in again.every()}
    assert found == {("a", OLD), ("a", NEW), ("b", OLD)}
    again.keep_only(["b"])
    assert {held.deployment for held in again.every()} == {"b"}


def test_slabs_of_other_ranks_or_another_shape_are_not_taken_for_images(tmp_path: Path) -> None:
    store = part(tmp_path, 1)
    slot = save(store, OLD)
    other = PartImages(tmp_path / "1", world=4, ranks=range(1, 2))
    assert progresses(other) == set()
    assert other.next_slot() == slot


STEPS = ["write 0", "write 1", "settle 0", "settle 1"]


@pytest.mark.parametrize("done", range(len(STEPS) + 1))
@pytest.mark.parametrize("order", list(itertools.permutations((0, 1))))
@pytest.mark.parametrize("restarted", [(), (0,), (1,), (0, 1)])
def test_a_crash_anywhere_in_a_save_leaves_an_image_that_both_nodes_have(
    tmp_path: Path, done: int, order: tuple[int, int], restarted: tuple[int, ...]
) -> None:
    stores = [part(tmp_path, number) for number in (0, 1)]
    for store in stores:
        save(store, OLD)
        store.settle("a", OLD)
    for step in STEPS[:done]:
        verb, which = step.split()
        store = stores[order[int(which)]]
        if verb == "write":
            save(store, NEW)
        else:
            store.settle("a", NEW)
    for number in restarted:
        stores[number] = part(tmp_path, number)
    both = progresses(stores[0]) & progresses(stores[1])
    assert both, "each node has an image, and none that the other has"
    assert max(both) == (NEW if done >= 2 else OLD)
    for store in stores:
        assert store.settle("a", max(both))
    assert progresses(stores[0]) == progresses(stores[1]) == {max(both)}
