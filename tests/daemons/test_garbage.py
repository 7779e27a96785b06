"""What is there when the daemon begins to serve is not looked through for garbage again."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from plexrl_slurm.daemons.garbage import YOUNG, keep_what_is_there


class Node:
    """Part of a circle."""

    def __init__(self) -> None:
        self.next = self


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_what_is_there_is_kept_and_what_comes_is_looked_at() -> None:
    kept, gone = Node(), Node()
    circle = weakref.ref(gone)
    del gone
    keep_what_is_there()
    assert circle() is None
    assert gc.get_freeze_count() > 10_000
    assert kept not in gc.get_objects()
    assert gc.get_threshold()[0] == YOUNG
    later = Node()
    assert later in gc.get_objects()
    circle = weakref.ref(later)
    del later
    gc.collect()
    assert circle() is None
