"""``--export`` and ``--export-file``: a job's own environment, and its credentials in it.

The values never stand in an argument: sbatch has them in its environment, or in a file without a
name. What sbatch makes of the two options was seen with 22.05: a file replaces the environment,
so that names find nothing in it, and ``NONE`` makes it ignore the file.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def with_credentials(
    given: Mapping[str, str], *, export: str | None, export_file: str | None
) -> list[str]:
    """Options for sbatch, after those of the user."""
    if not given:
        return []
    if export_file is not None and not is_none(export):
        descriptor = _merged(export_file, given)
        # sbatch says itself what is wrong with the file.
        return [] if descriptor is None else [f"--export-file={descriptor}"]
    return [] if export is None else [f"--export={exported(export, given)}"]


def is_none(export: str | None) -> bool:
    """Whether the job is to have nothing of this environment."""
    return export is not None and export.strip().upper() in ("NONE", "NIL")


def exported(export: str, names: Iterable[str]) -> str:
    """``--export`` with ``names`` added.

    ``NONE`` takes no names beside it. A list of names does the same as ``NONE`` with them: the
    job gets its user's login environment, and its steps what is named.
    """
    words = export.split(",")
    if "ALL" in (word.strip().upper() for word in words):
        return export
    kept = [word for word in words if word and not is_none(word)]
    return ",".join((*kept, *names))


def in_memory(data: bytes) -> int:
    """A descriptor to read ``data`` from."""
    file = os.memfd_create("plexrl")
    with open(file, "wb", closefd=False) as stream:
        stream.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _merged(export_file: str, given: Mapping[str, str]) -> int | None:
    """A descriptor of the user's file with ``given`` added; ``None``: it cannot be read."""
    try:
        if export_file.isdecimal() and int(export_file) >= 3:
            with open(int(export_file), "rb", closefd=False) as stream:
                data = stream.read()
        else:
            data = Path(export_file).read_bytes()
    except OSError:
        return None
    ours = tuple(f"{name}=".encode() for name in given)
    words = [word for word in data.split(b"\0") if word and not word.startswith(ours)]
    words += [f"{name}={value}".encode() for name, value in given.items()]
    file = in_memory(b"\0".join(words) + b"\0")
    os.set_inheritable(file, True)
    return file
