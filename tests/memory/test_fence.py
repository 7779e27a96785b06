"""Durable images of a deployment that has moved: its earlier home adds none any more."""

import random
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import Denied
from plexrl_slurm.memory import claims, durable, fence
from plexrl_slurm.memory.fence import Token, token_of
from plexrl_slurm.memory.shares import finish, write_share
from plexrl_slurm.memory.slab import SlabHeader
from tests.memory.test_shares import slabs
from tests.memory.test_slab import make_header, write


def header(seq: int) -> SlabHeader:
    made = make_header(8)
    return SlabHeader(
        deployment="a", progress=(seq, 0), rank=0, world=1, architecture=made.architecture,
        tensors=made.tensors,
    )  # fmt: skip


def persist(folder: Path, seq: int, order: Token, *, fill: int = 1) -> None:
    slab = folder / f"slab-{seq}-{fill}"
    write(slab, header(seq), fill)
    image = durable.folder_of(folder / "d", "a", (seq, 0))
    durable.write_image(image, [slab], writer=f"w{order[1]}", order=order)


def images(folder: Path) -> dict[int, Token]:
    """Progress of each image, and the order that wrote it."""
    return {
        durable.progress_of(each)[0]: durable.read_manifest(each).order
        for each in durable.folders_of(folder / "d" / "a")
    }


def content(folder: Path, seq: int) -> bytes:
    return (durable.folder_of(folder / "d", "a", (seq, 0)) / "rank-0.slab").read_bytes()


def test_orders_are_newer_with_the_daemon_and_with_their_number() -> None:
    assert token_of(7, "7.9") < token_of(7, "7.10") < token_of(8, "8.1")
    assert token_of(7, "odd") == (7, 0)


def test_an_order_of_before_a_move_adds_no_image(tmp_path: Path) -> None:
    persist(tmp_path, 1, (1, 1))
    durable.take_over(tmp_path / "d", "a", (1, 5), (1, 0))
    with pytest.raises(Denied, match="lives elsewhere now"):
        persist(tmp_path, 9, (1, 4))
    persist(tmp_path, 2, (1, 6))
    assert images(tmp_path) == {1: (1, 1), 2: (1, 6)}
    assert not list((tmp_path / "d" / "a").glob(".*.part"))


def test_what_was_added_between_is_not_the_new_homes(tmp_path: Path) -> None:
    persist(tmp_path, 1, (1, 1))
    persist(tmp_path, 4, (1, 2), fill=2)
    durable.take_over(tmp_path / "d", "a", (1, 5), (1, 0))
    assert images(tmp_path) == {1: (1, 1)}, "the new home does not know of the other"
    persist(tmp_path, 4, (1, 6), fill=3)
    written = content(tmp_path, 4)
    persist(tmp_path, 4, (1, 7), fill=4)
    assert content(tmp_path, 4) == written, "it is there, and of this home"


def test_an_order_that_had_begun_before_the_move_ends_in_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = durable.write_rank

    def late(part: Path, slab: Path, rank: int) -> durable.RankFile:
        durable.take_over(tmp_path / "d", "a", (1, 5), None)
        return real(part, slab, rank)

    monkeypatch.setattr(durable, "write_rank", late)
    with pytest.raises(Denied):
        persist(tmp_path, 3, (1, 4))
    assert images(tmp_path) == {}


def test_shares_of_an_order_of_before_a_move_are_no_image(tmp_path: Path) -> None:
    folder = durable.folder_of(tmp_path / "d", "a", (7, 1))
    said = [write_share(folder, [path], name="n") for path in slabs(tmp_path)]
    durable.take_over(tmp_path / "d", "a", (2, 1), None)
    with pytest.raises(Denied):
        finish(folder, said, name="n", order=(1, 9))
    assert durable.folders_of(folder.parent) == []


def test_a_writer_that_hangs_with_the_lock_does_not_hold_up_the_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_S", 0.1)
    home = tmp_path / "d" / "a"
    home.mkdir(parents=True)
    with fence.passing(home, (1, 1)):
        durable.take_over(tmp_path / "d", "a", (1, 5), None)
    with pytest.raises(Denied):
        persist(tmp_path, 3, (1, 4))


@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_of_events_images_are_of_the_newest_home(tmp_path: Path, seed: int) -> None:
    """Homes and zombies of earlier ones persist; what a move went on from is always there."""
    rng, moved, known = random.Random(seed), 0, 0
    homes: list[list[int]] = [[]]  # numbers of orders that each home got
    trusted: dict[int, int] = {}
    for number in range(1, 41):
        what, seq = rng.random(), known + rng.randint(0 if known else 1, 3)
        if what < 0.15:
            went_on = (known, 0) if known else None
            durable.take_over(tmp_path / "d", "a", (1, number), went_on)
            moved = number
            homes.append([])
        elif what < 0.6:
            homes[-1].append(number)
            persist(tmp_path, seq, (1, number), fill=len(homes))
            known = max(seq, known)
            trusted.setdefault(seq, number)
        elif old := [each for home in homes[:-1] for each in home]:
            with pytest.raises(Denied):
                persist(tmp_path, seq, (1, rng.choice(old)), fill=99)
        found = images(tmp_path)
        assert all(token[1] > moved or at <= known for at, token in found.items())
        assert not known or known in found
        for at, first in trusted.items():
            assert found[at][1] >= first
