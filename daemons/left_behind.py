"""Shared memory that libraries of a gang made, and that nobody removes when it is killed.

Python's and vLLM's names say nothing of whose they are, so what the gang's processes have mapped
is noted while they live.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_THEIRS: Final = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+$", re.MULTILINE)


def mapped_by_any() -> set[str]:
    """Such files that any process has mapped now, as far as this user may look."""
    found = set[str]()
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit():
                found.update(_THEIRS.findall((process / "maps").read_text(encoding="utf-8")))
    return found


def note(notes: Path, files: Iterable[str]) -> None:
    """Write down that a gang has these, for whoever comes after this agent."""
    lines = []
    for file in sorted(files):
        with suppress(FileNotFoundError):
            found = Path(file).stat()
            lines.append(f"{found.st_dev} {found.st_ino} {file}\n")
    part = notes.with_name(f".{notes.name}.part")
    part.write_text("".join(lines), encoding="utf-8")
    part.rename(notes)


def noted(notes: Path) -> list[str]:
    """Those that are still there, the same and not others of their names, and this user's."""
    there = []
    for line in notes.read_text(encoding="utf-8").splitlines():
        device, inode, file = line.split(" ", 2)
        with suppress(FileNotFoundError):
            found = Path(file).lstat()
            same = (found.st_dev, found.st_ino) == (int(device), int(inode))
            if same and found.st_uid == os.geteuid() and _THEIRS.fullmatch(file):
                there.append(file)
    return there


def mapped_by(groups: Iterable[int]) -> set[str]:
    """Such files that processes of some process groups have mapped now."""
    wanted, found = set(groups), set[str]()
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            if process.name.isdigit() and _group(process) in wanted:
                found.update(_THEIRS.findall((process / "maps").read_text(encoding="utf-8")))
    return found


def remove(files: Iterable[str]) -> None:
    """Remove what is still there."""
    for file in files:
        Path(file).unlink(missing_ok=True)


def _group(process: Path) -> int:
    fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[2])
