"""Bodies, results and the sample journal on disk."""

import errno
from pathlib import Path

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.errors import StorageFull
from plexrl_slurm.daemons.spool import SampleLine, Spool


def line(seq: int) -> SampleLine:
    return SampleLine(f"s.{seq}", seq, wire.Sample([1, 2], 1, 4, seed=seq))


def test_a_body_is_read_back_until_it_is_dropped(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write_body("c1", b"body")
    assert spool.read_body("c1") == b"body"
    spool.drop_body("c1")
    spool.drop_body("c1")
    assert spool.read_body("c1") is None


def test_parts_of_a_result_are_kept_apart_from_the_whole(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write_result("c1", b"0", part=0)
    spool.write_result("c1", b"1", part=1)
    spool.write_result("c1", b"whole")
    spool.drop_result("c1", parts=2)
    assert spool.read_result("c1", part=0) is None
    assert spool.read_result("c1") == b"whole"


def test_the_journal_gives_back_every_line_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for seq in range(3):
        spool.journal_sample("s", line(seq))
    assert list(Spool(tmp_path).journalled_samples("s")) == [line(0), line(1), line(2)]


def test_a_torn_tail_is_cut_off_and_writing_goes_on_behind_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.journal_sample("s", line(0))
    path = tmp_path / "samples" / "s"
    with path.open("ab") as file:
        file.write((500).to_bytes(4, "little") + b"torn")
    later = Spool(tmp_path)
    later.mend_journals()
    later.journal_sample("s", line(1))
    assert list(later.journalled_samples("s")) == [line(0), line(1)]


def test_a_closed_journal_is_gone(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.journal_sample("s", line(0))
    spool.close_journal("s")
    assert list(spool.journalled_samples("s")) == []


def test_a_full_disk_is_said_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageFull, match="free space there"):
        spool.write_body("c1", b"body")
    assert list((tmp_path / "bodies").iterdir()) == []
