"""What maps of files are kept, and that they keep neither deleted memory nor others out unseen."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plexrl_slurm.memory.kept_maps import KeptMap, KeptMaps
from plexrl_slurm.memory.partial import nobody_has

SIZE = 1 << 20


def kept(maps: KeptMaps, path: Path) -> None:
    path.write_bytes(bytes(SIZE))
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    maps.keep(KeptMap(descriptor=descriptor, map=mmap.mmap(descriptor, SIZE)))


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


HOLDER = """
import mmap, os, sys
fd = os.open(sys.argv[1], getattr(os, sys.argv[2]))
if sys.argv[3] == "map":
    flags = mmap.PROT_READ | (mmap.PROT_WRITE if sys.argv[2] == "O_RDWR" else 0)
    space = mmap.mmap(fd, 0, prot=flags)
    os.close(fd)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def another(path: Path, how: str, what: str) -> Iterator[None]:
    """Another process has it."""
    command = [sys.executable, "-S", "-c", HOLDER, str(path), how, what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.communicate(timeout=10)


def test_a_map_is_taken_once_by_whatever_name_the_file_has(tmp_path: Path) -> None:
    maps, path = KeptMaps(), tmp_path / "one"
    kept(maps, path)
    path.rename(tmp_path / "two")
    found = maps.take(tmp_path / "two", SIZE)
    assert found is not None
    assert maps.take(tmp_path / "two", SIZE) is None
    found.map[:3] = b"abc"
    assert (tmp_path / "two").read_bytes()[:3] == b"abc"
    maps.keep(found)
    assert maps.count == 1
    maps.close()
    assert not mapped(tmp_path / "two")


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_map_of_another_size_is_closed(tmp_path: Path, size: int) -> None:
    maps, path = KeptMaps(), tmp_path / "one"
    kept(maps, path)
    os.truncate(path, size)
    assert maps.take(path, size) is None
    assert maps.count == 0
    assert not mapped(path)


def test_memory_of_a_file_that_was_deleted_is_given_back(tmp_path: Path) -> None:
    maps = KeptMaps()
    kept(maps, tmp_path / "stays")
    kept(maps, tmp_path / "goes")
    (tmp_path / "goes").unlink()
    maps.prune()
    assert maps.count == 1
    assert not mapped(tmp_path / "goes")
    assert mapped(tmp_path / "stays")
    maps.close()


def test_what_was_deleted_while_it_was_used_is_not_kept(tmp_path: Path) -> None:
    maps = KeptMaps()
    kept(maps, tmp_path / "one")
    found = maps.take(tmp_path / "one", SIZE)
    assert found is not None
    (tmp_path / "one").unlink()
    maps.keep(found)
    assert maps.count == 0
    assert not mapped(tmp_path / "one")


def test_they_are_few(tmp_path: Path) -> None:
    maps = KeptMaps()
    for number in range(7):
        kept(maps, tmp_path / str(number))
    assert maps.count == 4
    assert [mapped(tmp_path / str(number)) for number in range(7)] == [False] * 3 + [True] * 4
    maps.close()


def test_a_map_of_our_own_does_not_count_as_somebody(tmp_path: Path) -> None:
    maps = KeptMaps()
    kept(maps, tmp_path / "one")
    assert nobody_has(tmp_path / "one", maps)
    assert not nobody_has(tmp_path / "one")
    assert not nobody_has(tmp_path / "none", maps)
    maps.close()


@pytest.mark.parametrize("what", ["open", "map"])
@pytest.mark.parametrize("how", ["O_RDONLY", "O_RDWR"])
@pytest.mark.parametrize("keep", [True, False])
def test_another_process_that_has_it_open_or_mapped_is_seen(
    tmp_path: Path, keep: bool, how: str, what: str
) -> None:
    maps = KeptMaps()
    if keep:
        kept(maps, tmp_path / "one")
    else:
        (tmp_path / "one").write_bytes(bytes(SIZE))
    with another(tmp_path / "one", how, what):
        assert not nobody_has(tmp_path / "one", maps)
    assert nobody_has(tmp_path / "one", maps)
    maps.close()
