"""Requests: exactly the bytes, wherever they lie in memory, or an error."""

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from crc32c import crc32c

from plexrl_slurm.memory import disk, requests
from plexrl_slurm.memory.requests import Requests

SIZE = 3 * 4096 + 512


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PIECE", 4096)


def aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def bytes_of(seed: int, size: int = SIZE) -> bytes:
    return bytes((seed + i * i) % 251 for i in range(size))


@pytest.mark.parametrize("at", [0, 4, 256, 512, 4096])
@pytest.mark.parametrize("size", [4, 1000, 4096, SIZE])
def test_what_was_written_is_read_wherever_it_lies_in_memory(
    tmp_path: Path, at: int, size: int
) -> None:
    data, into = aligned(2 * SIZE + 4096), aligned(2 * SIZE + 4096)
    data[at : at + size] = bytes_of(1, size)
    files = Requests()
    files.write(tmp_path / "a", data[at : at + size])
    assert files.wait() == 1
    files.read(tmp_path / "a", into[at : at + size])
    assert files.wait() == 1
    assert into[at : at + size] == bytes_of(1, size)
    assert not any(into[:at]) and not any(into[at + size :])


@pytest.mark.parametrize("at", [0, 4095, 4096, SIZE - 1])
def test_what_is_not_what_it_was_is_no_read(tmp_path: Path, at: int) -> None:
    files, into = Requests(), aligned(SIZE)
    data = bytearray(bytes_of(1))
    (tmp_path / "a").write_bytes(data)
    files.read(tmp_path / "a", into, crc=crc32c(data))
    assert files.wait() == 1
    was, data[at] = crc32c(data), data[at] ^ 4
    (tmp_path / "a").write_bytes(data)
    files.read(tmp_path / "a", into, crc=was)
    with pytest.raises(OSError, match=r"is damaged: it does not match its checksum: .*/a"):
        files.wait()
    files.read(tmp_path / "a", into)
    assert files.wait() == 1


def test_many_files_are_under_way_at_once_and_counted(tmp_path: Path) -> None:
    files = Requests()
    for number in range(20):
        files.write(tmp_path / str(number), memoryview(bytes_of(number)), checksum=number == 3)
    assert files.wait() == 20
    assert files.wait() == 0
    assert all((tmp_path / str(n)).read_bytes() == bytes_of(n) for n in range(20))
    assert files.checksums() == {tmp_path / "3": crc32c(bytes_of(3))}
    assert files.checksums() == {}


def test_a_disk_that_does_less_than_it_was_asked_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(disk.Disk):
        def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
            return super().write(descriptor, memoryview(data)[:700], offset)

        def read(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
            return super().read(descriptor, [into[0][:300]], offset)

    monkeypatch.setattr(disk, "disk", Slow())
    files, into = Requests(), bytearray(SIZE)
    files.write(tmp_path / "a", memoryview(bytes_of(2)))
    files.wait()
    files.read(tmp_path / "a", memoryview(into))
    files.wait()
    assert into == bytes_of(2)


def test_a_file_that_is_too_short_is_an_error_and_not_half_a_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes_of(1)[:-512])
    files = Requests()
    files.read(tmp_path / "a", aligned(SIZE))
    with pytest.raises(OSError, match=r"512 bytes are missing.*/a'"):
        files.wait()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_is_told_once_all_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Broken(disk.Disk):
        def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
            if offset == 4096:
                raise OSError(code, os.strerror(code))
            return super().write(descriptor, data, offset)

    files = Requests()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "disk", Broken())
        files.write(tmp_path / "bad", memoryview(bytes_of(1)))
        files.write(tmp_path / "good", memoryview(bytes_of(2)[:4096]))
        with pytest.raises(OSError, match=r"/bad'") as caught:
            files.wait()
    assert caught.value.errno == code
    assert (tmp_path / "good").read_bytes() == bytes_of(2)[:4096]
    files.write(tmp_path / "bad", memoryview(bytes_of(3)))
    assert files.wait() == 1
    assert (tmp_path / "bad").read_bytes() == bytes_of(3)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    files = Requests()
    files.read(tmp_path / "none", aligned(4096))
    with pytest.raises(FileNotFoundError, match="none"):
        files.wait()
