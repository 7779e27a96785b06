"""Bodies, results and the sample journal on disk."""

import errno
import os
from pathlib import Path

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.errors import StorageFull
from plexrl_slurm.daemons.spool import SampleLine, Spool


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


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


def test_a_long_journal_is_begun_anew_and_the_one_before_can_still_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    spool.journal_sample("s", line(0))
    size = (tmp_path / "samples" / "s").stat().st_size
    monkeypatch.setattr(Spool, "JOURNAL_BYTES", 3 * size)
    for seq in range(1, 10):
        spool.journal_sample("s", line(seq))
    found = [one.seq for one in Spool(tmp_path).journalled_samples("s")]
    assert found == [4, 5, 6, 7, 8, 9]
    spool.close_journal("s")
    assert list((tmp_path / "samples").iterdir()) == []


def test_however_many_journals_there_are_few_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spool, "OPEN_JOURNALS", 3)
    before = _open_files()
    spool = Spool(tmp_path)
    for seq in range(2):
        for name in "abcdefgh":
            spool.journal_sample(name, line(seq))
    assert _open_files() == before + 3
    assert [one.seq for one in spool.journalled_samples("a")] == [0, 1]
    for name in "abcdefgh":
        spool.close_journal(name)
    assert _open_files() == before


def test_a_sweep_deletes_what_belongs_to_nobody(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for call in ("mine", "gone"):
        spool.write_body(call, b"b")
        spool.write_result(call, b"r")
        spool.write_result(call, b"p", part=1)
        spool.journal_sample(f"sampler.{call}", line(0))
    (tmp_path / "bodies" / ".gone").write_bytes(b"torn")
    assert spool.sweep(calls={"mine"}, sessions={"sampler.mine"}) == 5
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["mine", "mine", "mine+1", "sampler.mine"]
    spool.close_journal("sampler.mine")
    spool.close_journal("sampler.gone")


def test_a_full_disk_is_said_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFull, match="free space there"):
        spool.write_body("c1", b"body")
    assert list((tmp_path / "bodies").iterdir()) == []
