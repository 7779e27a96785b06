"""A file that says what a folder has in it is what was written, or it is refused."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import manifests


class Thing(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    format: int = 1


class Other(msgspec.Struct, frozen=True):
    size: int
    format: int = 1


WRITTEN = manifests.encoded(Thing(names=("a", "b")))


def sealed(text: bytes) -> bytes:
    return b"%08x\n%s\n" % (crc32c(text), text)


@pytest.mark.parametrize("rest", [b"", bytes(1), bytes(4096)])
def test_it_comes_back_as_it_was_written_though_its_file_was_made_larger(
    tmp_path: Path, rest: bytes
) -> None:
    (tmp_path / "m").write_bytes(WRITTEN + rest)
    assert manifests.read(tmp_path / "m", Thing, format_=1) == Thing(names=("a", "b"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda data: data[:-3], "does not match its own checksum"),
        (lambda _: b"", "does not match its own checksum"),
        (lambda data: bytes(len(data)), "does not match its own checksum"),
        (lambda data: data + b"more", "does not match its own checksum"),
        (lambda data: data.replace(b'"a"', b'"c"'), "does not match its own checksum"),
        (lambda _: sealed(b'{"names":["a"],"format":2}'), "has format 2; this release reads"),
        (lambda _: sealed(b'{"names":["a"]}'), "has format 0; this release reads format 1"),
        (lambda _: manifests.encoded(Other(size=3)), "is no manifest of PlexRL's"),
        (lambda _: sealed(b"[]"), "is no manifest of PlexRL's"),
        (lambda _: sealed(b"not JSON"), "is no manifest of PlexRL's"),
    ],
)
def test_anything_else_is_refused(
    tmp_path: Path, harm: Callable[[bytes], bytes], words: str
) -> None:
    (tmp_path / "m").write_bytes(harm(WRITTEN))
    with pytest.raises(BadImage, match=words):
        manifests.read(tmp_path / "m", Thing, format_=1)


def test_one_that_is_not_there_is_said_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"m: cannot be read \(No such file or directory\)") as found:
        manifests.read(tmp_path / "m", Thing, format_=1)
    assert isinstance(found.value.__cause__, FileNotFoundError)
