"""Shared memory that libraries of a gang made, and that nobody removes when it is killed.

Python's and vLLM's names say nothing of whose they are, so what the gang's processes have mapped
is noted while they live.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_THEIRS: Final = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+$", re.MULTILINE)


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
