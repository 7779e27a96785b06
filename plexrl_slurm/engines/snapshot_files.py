"""The safetensors files of a snapshot or a model folder: which, whether whole, whether they fit."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadImage

#: Same file, same contents: ``(path, inode, mtime in ns, size)`` of every file.
Key = tuple[tuple[str, int, int, int], ...]
#: A safetensors header is never longer; the format's own limit.
_LONGEST_HEADER: Final = 100_000_000
#: Tensors that may be absent from a file, because another's weights are used for them.
_TIED: Final = frozenset({"lm_head.weight"})


def find(path: Path) -> list[Path]:
    """The safetensors files of a snapshot or a model folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise BadImage(str(path), "there is no safetensors file")
    return files


def key_of(files: list[Path]) -> Key:
    """Changes whenever one of the files is another."""
    found = [(str(file), file.stat()) for file in files]
    return tuple((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in found)


def shapes_in(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, from the header; refuses a file that is not whole."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
        header.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in header.values())
        shapes = [(name, tuple(entry["shape"])) for name, entry in header.items()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadImage(str(file), "it is no safetensors file") from error
    if file.stat().st_size != 8 + length + end:
        raise BadImage(str(file), f"it is torn: {8 + length + end} bytes were promised")
    yield from shapes


def compare(path: Path, files: list[Path], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that would leave a tensor unset; vLLM itself would only warn."""
    found = dict(shape for file in files for shape in shapes_in(file))
    for name in sorted((found.keys() ^ expected.keys()) - _TIED):
        word = "lacks" if name in expected else "has"
        raise BadImage(str(path), f"it {word} tensor {name}, unlike the slot's architecture")
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            raise BadImage(
                str(path), f"tensor {name} is {found[name]}, and the slot's is {expected[name]}"
            )
