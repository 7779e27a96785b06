"""A file system that refuses one rank fails the call on all ranks, and the gang goes on."""

from pathlib import Path

import pytest

from tests.engines.test_deepspeed_gang import run_gang

pytestmark = pytest.mark.engines


def test_what_is_refused_to_one_rank_fails_the_call_on_all_and_changes_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    one, two = run_gang(tiny_folder, tmp_path / "out", 2, module="tests.engines.refusing")
    assert one == two
    assert len(one["words"]) == 7 * 5
    for word in one["words"]:
        assert word.startswith(("StorageRefused: ", "StorageFailed: ")), word
        assert "cannot be " in word, word
    assert one["kept"]
    assert one["after"] == ["done", "done"]
    assert one["left"] == ["one"]
