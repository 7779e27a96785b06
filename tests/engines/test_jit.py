"""Locks of dead builds are removed, those of living ones are not."""

import os
import time
from pathlib import Path

import pytest

from plexrl_slurm.engines.jit import clear_stale_locks


def make_lock(root: Path, *, age_s: float, touched_s: float) -> Path:
    lock = root / "py311_cpu" / "shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    source = lock.parent / "build.ninja"
    now = time.time()
    for path, age in ((lock, age_s), (source, touched_s)):
        path.touch()
        os.utime(path, (now - age, now - age))
    return lock


@pytest.mark.parametrize(
    ("age_s", "touched_s", "held", "removed"),
    [
        pytest.param(300, 300, False, True, id="its builder is gone"),
        pytest.param(300, 300, True, False, id="its builder lives"),
        pytest.param(300, 5, False, False, id="another host builds"),
        pytest.param(5, 300, False, False, id="just made"),
        pytest.param(700, 5, True, True, id="too old for any build"),
    ],
)
def test_a_lock(tmp_path: Path, age_s: float, touched_s: float, held: bool, removed: bool) -> None:
    lock = make_lock(tmp_path, age_s=age_s, touched_s=touched_s)
    holder = lock.open() if held else None
    try:
        assert clear_stale_locks(tmp_path) == ([lock] if removed else [])
    finally:
        if holder is not None:
            holder.close()
    assert lock.exists() is not removed


def test_a_folder_that_is_not_there_has_no_locks(tmp_path: Path) -> None:
    assert clear_stale_locks(tmp_path / "none") == []
